"""Computes algorithms on the tokens of one saved batch."""
