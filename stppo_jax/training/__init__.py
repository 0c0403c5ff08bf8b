"""The loop, the update, supervised start, checkpoints and reports."""
