"""Meshes, shardings and the copy of weights to the engine."""
