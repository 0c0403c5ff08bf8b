"""Sinks: the terminal, plots and trackers show the metrics of a run."""
