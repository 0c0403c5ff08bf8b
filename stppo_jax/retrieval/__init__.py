"""Search over passages: index, server and client. Pure Python without jax."""
