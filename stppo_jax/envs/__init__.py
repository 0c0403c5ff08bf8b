"""Environments: prompts, actions, observations, rewards and scores.

An environment speaks text and never sees token ids. Pure Python without jax.
"""
