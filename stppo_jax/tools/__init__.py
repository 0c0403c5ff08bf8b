"""Programs that examine runs, data and machines, for the commands."""
