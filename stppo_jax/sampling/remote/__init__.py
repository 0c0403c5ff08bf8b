"""The engine whose turns an inference server writes."""
