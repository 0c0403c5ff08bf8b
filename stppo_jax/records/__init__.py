"""Writes and reads the records of a run: checkpoints, metrics, dialogues."""
