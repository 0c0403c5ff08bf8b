"""Search over passages: index, server, client. Pure python, no jax."""
