"""Writes, lists, verifies and restores checkpoints."""
