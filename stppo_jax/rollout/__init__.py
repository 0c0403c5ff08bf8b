"""Collecting trajectories and packing them into arrays."""
