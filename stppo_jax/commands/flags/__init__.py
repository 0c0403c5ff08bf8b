"""Parses the flags, config files and config keys that commands share."""
