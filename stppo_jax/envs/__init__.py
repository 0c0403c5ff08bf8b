"""What the policy acts in: prompts, actions, observations, rewards.

An environment speaks text and never sees token ids. Pure python, no jax.
"""
