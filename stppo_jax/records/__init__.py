"""The records of a run: checkpoints, metrics, dialogues, plots."""
