"""Checkpoints: written, listed, verified and read again."""
