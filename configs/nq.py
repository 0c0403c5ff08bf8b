"""Trains on Natural Questions with their paragraphs of Wikipedia.

    python -m stppo_jax data build qed --root=DATA
    python -m stppo_jax train --config=configs/nq.py:st_ppo \
        --config.data.root=DATA --workdir=runs/nq

The first command fetches the part of Natural Questions for which QED has
paragraphs: some 7,600 training and 1,400 evaluation questions. The run uses
only the questions with an answer of at most five words. A byte-level BPE
tokenizer is trained on the paragraphs. As in `configs/own.py`, a small random
model first imitates searching and quoting, and then learns from rewards. This
model cannot read. docs/your_own_data.md describes what it learns, and how long
that takes.

`configs/nq.py:st_ppo,7b` is the setting of the paper for Qwen2.5 of 1.5B, 3B or
7B instead, with all questions of the data set `nq` and a server that has the
passages of Wikipedia.
configs/nq_hotpotqa.py lists the hardware and estimates of time and memory.
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
    name='tfds',
    train='qed:train answer_words<=5',
    evaluation='qed:validation answer_words<=5',
    corpus='qed.corpus.jsonl',
  )
  return config
