"""Trains on Natural Questions with real passages behind a real server.

    python -m stppo_jax train --config=configs/nq.py:st_ppo \
        --config.data.root=DATA --workdir=runs/nq

DATA is a folder that holds general/nq_train.questions.jsonl and
general/nq_train.corpus.jsonl; docs/data.md has their format. The run takes a
few minutes on two CPU cores. A byte-level BPE tokenizer is trained on the
passages. A small random model is first trained on demonstrations of dialogues,
without which it would never search, and then by RL for five steps. It is far
too small to answer anything: expect finite metrics and readable dialogues.

`configs/nq.py:st_ppo,7b` is the setting of the paper for Qwen2.5 of 1.5B, 3B or
7B instead; configs/nq_hotpotqa.py has its hardware and figures.
"""

from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import own
from stppo_jax.configs import slices


def get_config(argument: str = 'st_ppo') -> base.Config:
  algorithm, size = slices.split(argument)
  if size:
    return nq_hotpotqa.of_one('nq', argument)
  config = own.get_config(algorithm)
  config.data.update(
    root='',
    train='general/nq_train.questions.jsonl',
    evaluation='',
    corpus='general/nq_train.corpus.jsonl',
  )
  config.evaluate.every = 0
  config.evaluate.num_questions = 512
  return config
