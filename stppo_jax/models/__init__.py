"""Computes policies and value models, and reads and writes their files."""
