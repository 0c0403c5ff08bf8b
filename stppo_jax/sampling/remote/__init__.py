"""Implements an engine whose turns an inference server writes."""
