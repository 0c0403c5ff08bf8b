"""The training loops, and the modules that start, save and end a run."""
