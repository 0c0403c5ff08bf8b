"""Reads and writes model directories in the format of Hugging Face."""
