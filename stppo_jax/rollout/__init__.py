"""Collects trajectories and packs them into arrays."""
