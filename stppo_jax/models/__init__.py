"""The transformer of policy and value model, its heads and its files."""
