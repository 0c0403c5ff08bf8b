"""Parses flags, config files and config keys for all commands."""
