"""Trains on questions and passages of your own: copy this file and edit it.

    python -m stppo_jax train --config=configs/own.py:st_ppo \
        --config.data.root=DATA --workdir=runs/own

DATA is a folder that holds train.jsonl, test.jsonl and corpus.jsonl;
docs/data.md has their format, and an example that makes the three files. With
the small model below the example takes a few minutes on two CPU cores.
"""

from stppo_jax.configs import base


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = base.get_config(algorithm)
  config.num_steps = 5

  # The data. Without an evaluation file, set evaluation='' and
  # config.evaluate.every = 0.
  config.data.update(
    name='jsonl',
    root='DATA',
    train='train.jsonl',
    evaluation='test.jsonl',
    corpus='corpus.jsonl',
    tokenizer_vocab_size=2048,
  )
  config.retrieval.topk = 2  # passages per search
  config.evaluate.every = 5  # steps
  config.evaluate.num_questions = 64

  # The model. A real run starts from a model that can follow instructions: set
  # config.model.path to its Hugging Face directory, and delete the lines down
  # to the lengths. The small random model below learns from demonstrations how
  # to search and answer, and then from rewards.
  config.model.hidden_size = 128
  config.model.intermediate_size = 352
  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.sft.before_training = True
  config.sft.num_steps = 200
  config.sft.batch_size = 16

  # Lengths in tokens. A longest dialogue fits if max_length is at least the
  # prompt, plus a turn and an observation for each of max_turns, plus a turn.
  config.env.max_turns = 2
  config.env.max_turn_tokens = 48
  config.env.max_observation_tokens = 160
  config.env.max_length = 640
  config.rollout.length_bucket = 128

  # Batches. A real run has hundreds of trajectories per step, and
  # config.updates.microbatch_size says how many fit in memory at once.
  config.rollout.trajectories_per_step = 16
  if config.rollout.group_size > 1:
    config.rollout.group_size = 8  # divides trajectories_per_step
  config.updates.minibatch_size = 8
  # A large model needs smaller rates: 1e-6 and 1e-5 are the defaults.
  config.policy_optimizer.learning_rate = 1e-5
  config.value_optimizer.learning_rate = 1e-4
  config.checkpoint.every = 5
  return config
