"""Computes losses and advantages on the tokens of one saved batch."""
