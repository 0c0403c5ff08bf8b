"""Studies of `ablate`: runs, statistics, verdicts, figures."""
