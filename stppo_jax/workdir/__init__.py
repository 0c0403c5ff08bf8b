"""The folder of a run: its record, its lock, and its signs of life."""
