"""Holds attention kernels for one platform each, independent of the models."""
