"""The memory and the time of a run on devices that need not be there."""
