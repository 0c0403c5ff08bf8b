"""Generates turns: tokenizer, stop strings and the decoding engine."""
