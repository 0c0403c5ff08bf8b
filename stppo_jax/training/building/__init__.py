"""Builds what a run is made of: components, engines, a retriever, files."""
