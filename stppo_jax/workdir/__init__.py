"""The folder of a run: its record, its lock, its heartbeat and its bucket."""
