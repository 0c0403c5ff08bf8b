"""Runs programs on many devices and hosts."""
