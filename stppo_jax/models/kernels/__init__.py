"""Holds attention kernels, each for one platform; they use no other models."""
