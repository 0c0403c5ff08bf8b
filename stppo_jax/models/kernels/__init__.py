"""Holds attention kernels, each for one platform, independent of the models."""
