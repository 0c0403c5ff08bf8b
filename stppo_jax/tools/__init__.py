"""Programs that examine runs, data and machines; the core imports none."""
