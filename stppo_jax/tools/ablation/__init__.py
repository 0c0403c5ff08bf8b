"""Makes the runs of a study and compares them."""
