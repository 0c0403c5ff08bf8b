"""The engine whose turns an inference server writes, and a small server."""
