"""Everything between a batch and new weights."""
