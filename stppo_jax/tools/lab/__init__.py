"""The lab: algorithms on the tokens of one saved batch."""
