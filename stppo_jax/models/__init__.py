"""Computes policy and value model, and reads and writes their files."""
