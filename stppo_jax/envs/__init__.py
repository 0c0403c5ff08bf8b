"""Environments: prompts, actions, observations, rewards and scores.

An environment speaks text and never sees token ids. These modules are pure
Python and do not import jax.
"""
