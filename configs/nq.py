"""Trains on Natural Questions with real passages behind a real server.

    python -m stppo_jax train --config=configs/nq.py:st_ppo \
        --config.data.root=DATA --workdir=runs/nq

DATA is a folder that holds general/nq_train.questions.jsonl and
general/nq_train.corpus.jsonl; docs/commands.md has their format. The run takes
a few minutes on two CPU cores. A byte-level BPE tokenizer is trained on the
passages. A small random model is first trained on demonstrations of dialogues,
without which it would never search, and then by RL for five steps. It is far
too small to answer anything: expect finite metrics and readable dialogues. This
config shows that everything works with your own files.
"""

from stppo_jax.configs import base


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = base.get_config(algorithm)
  config.num_steps = 5
  config.data.update(
    name='jsonl',
    train='general/nq_train.questions.jsonl',
    corpus='general/nq_train.corpus.jsonl',
    tokenizer_vocab_size=2048,
  )

  config.model.hidden_size = 128
  config.model.intermediate_size = 352
  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.sft.before_training = True
  config.sft.num_steps = 200
  config.sft.batch_size = 16

  config.env.max_turns = 2
  config.env.max_turn_tokens = 48
  config.env.max_observation_tokens = 160
  config.env.max_length = 640
  config.retrieval.topk = 2
  config.rollout.trajectories_per_step = 16
  if config.rollout.group_size > 1:
    config.rollout.group_size = 8  # divides trajectories_per_step
  config.rollout.length_bucket = 128
  config.updates.minibatch_size = 8
  config.policy_optimizer.learning_rate = 1e-5
  config.value_optimizer.learning_rate = 1e-4
  config.evaluate.every = 0
  config.checkpoint.every = 5
  return config
