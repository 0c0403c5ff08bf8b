"""Search over passages: indexes, server and client.

Only the indexes of vectors, dense and FAISS, import jax.
"""
