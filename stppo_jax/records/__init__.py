"""What a run leaves in its folder: checkpoints, metrics, dialogues, plots."""
