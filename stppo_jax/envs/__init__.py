"""Environments: prompts, actions, observations, rewards and scores.

An environment reads and writes text and never sees token ids. The modules of
this package are pure Python and do not import jax.
"""
