"""Holds kernels for one platform each, which know nothing of the models."""
