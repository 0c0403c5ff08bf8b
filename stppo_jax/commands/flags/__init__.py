"""Flags, config files and their keys, which the commands share."""
