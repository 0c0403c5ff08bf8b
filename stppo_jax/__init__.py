"""Train language models that search, with token- and turn-level PPO."""
