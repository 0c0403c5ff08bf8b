"""Trains on questions and passages of your own: copy this file and edit it.

    python -m stppo_jax train --config=configs/own.py:st_ppo \
        --config.data.root=DATA --workdir=runs/own
    python -m stppo_jax ablate --config=configs/own.py \
        --config.data.root=DATA --workdir=runs/own_study

DATA is a folder that holds train.jsonl, test.jsonl and corpus.jsonl.
docs/your_own_data.md describes what the small model below learns from these
files, how long that takes on two CPU cores, and what the model does not learn.
"""

from stppo_jax.configs import base
from stppo_jax.configs import quickstart


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = base.get_config(algorithm)
  config.num_steps = 20

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
  config.retrieval.topk = 1  # passages per search
  config.evaluate.every = 10  # steps
  config.evaluate.num_questions = 256

  # The model. A real run starts from a model that can follow instructions: set
  # config.model.path to its Hugging Face directory, and delete the lines from
  # here to the batches, and the lines of the learning rates. Such a model can
  # read, so its short answers can match exactly. The small random model below
  # first imitates searching and quoting. Then it learns from rewards which
  # query finds the answer, and how much it must quote.
  config.model.hidden_size = 128
  config.model.intermediate_size = 128
  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.num_kv_heads = 2
  config.env.prompt_template = quickstart.get_config().env.prompt_template
  config.env.rewards.exact_match = 0.0
  config.env.rewards.substring_match = 1.0
  config.sft.before_training = True
  config.sft.num_steps = 1500
  config.sft.clean_steps = 1100
  config.sft.batch_size = 16
  config.sft.error_rate = 0.75
  config.sft.quote_words = 40

  # Lengths in tokens. Every dialogue fits if max_length is at least the length
  # of the longest prompt, plus a turn and an observation for each of max_turns,
  # plus a turn.
  config.env.max_turns = 1
  config.env.max_turn_tokens = 96
  config.env.max_observation_tokens = 100
  config.env.max_length = 256
  config.rollout.length_bucket = config.env.max_length

  # A small model soon makes errors when it samples a quotation. A low
  # temperature prevents this.
  config.rollout.temperature = 0.5

  # Batches. A real run has hundreds of trajectories per step. In place of
  # core_rows, it sets config.updates.microbatch_size to the number of rows that
  # fit in memory at once.
  config.rollout.trajectories_per_step = 128
  if config.rollout.group_size > 1:
    config.rollout.group_size = 8  # divides trajectories_per_step
  config.updates.minibatch_size = 32
  config.updates.core_rows = 4
  config.loss.entropy_coefficient = 0.0
  # A large model needs smaller rates: 1e-6 and 1e-5 are the defaults.
  config.policy_optimizer.update(
    learning_rate=1e-4, warmup_updates=5, weight_decay=0.0
  )
  config.value_optimizer.update(
    learning_rate=3e-4, warmup_updates=5, weight_decay=0.0
  )
  config.checkpoint.every = 10
  return config


def studies():
  """Returns a study for `ablate`; docs/your_own_study.md describes the form."""
  # All runs share one supervised start. If model.path names a model, the runs
  # start from that model instead.
  starts = {} if get_config().model.path else {'own': {}}
  arm = {'start': 'own'} if starts else {}
  arms = {name: dict(arm) for name in ('token_ppo', 'turn_ppo')}
  return {
    'own': {
      'title': 'Token ratios beside turn ratios on data of your own',
      'seeds': 3,
      'arms': {'': arms},
      'starts': starts,
    },
  }
