"""The transformer (policy and value), its heads and its files."""
