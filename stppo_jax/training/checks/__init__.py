"""Checks that refuse, or end, a run that should not go on."""
