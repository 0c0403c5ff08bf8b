"""Estimates the memory and time of a run on devices that need not exist."""
