"""A task in which a critic can learn much, and a recipe for critics.

    python -m stppo_jax train --config=studies/critic.py:st_ppo \
        --workdir=runs/critic

Questions of up to three hops are asked, among passages that no fact points to.
The demonstrations, from which the policy starts, err in their first turn only,
and repair half of the queries that found nothing. So most of what a dialogue
will earn is decided early. A demonstration of three hops that repairs a query
has four searches, as many as `env.max_turns` allows, and then the answer.
docs/critic.md has what was measured.
"""

from stppo_jax.configs import base
from stppo_jax.configs import quickstart
from stppo_jax.rl import estimator_needs


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = quickstart.get_config(algorithm)
  config.model.path = ''
  wiki = config.data.synthetic_wiki
  wiki.hops, wiki.distractors = (1, 2, 3), 40
  wiki.error_turns, wiki.repair_rate = 1, 0.5
  config.sft.before_training = True
  config.sft.error_rate = 0.6
  config.env.max_turns = 4
  config.env.max_length = 320
  config.rollout.length_bucket = 64
  config.num_steps = 40
  # With few dialogues a critic seems to remember single dialogues. At the
  # temperature 1, a trained policy often fails by rare slips, which the critic
  # was not seen to learn.
  config.rollout.trajectories_per_step = 1024
  config.rollout.temperature = 0.7
  config.updates.minibatch_size = 256
  if config.algorithm.advantage.name == 'gae':
    config.algorithm.advantage.lambda_ = 1.0

  if config.algorithm.advantage.name in estimator_needs.VALUES:
    # The critic learns first, until it stops getting better. An answer is right
    # or wrong, so that a value is a probability.
    config.loss.value_range = (0.0, 1.0)
    config.loss.value_warmup_steps = 60
    config.loss.value_warmup_patience = 2
    config.updates.value_epochs = 2
    # At the learning rate of the quickstart, 2.5e-4, success rises from .56 to
    # .93 within four steps, and the critic cannot follow.
    config.policy_optimizer.learning_rate = 5e-5
  return config
