"""The folder of a run: whose it is, who holds it, and whether it is alive."""
