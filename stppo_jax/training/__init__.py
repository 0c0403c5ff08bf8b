"""The training loops, what starts and ends a run, and evaluation."""
