"""Trains the models: turns a collected batch into new weights."""
