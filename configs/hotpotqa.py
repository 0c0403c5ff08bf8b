"""Trains on HotpotQA, whose questions need two searches.

    python -m stppo_jax data build hotpotqa --root=DATA
    python -m stppo_jax train --config=configs/hotpotqa.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --workdir=runs/hotpotqa

MODEL is the Hugging Face directory of a model that follows instructions. The
search engine has the paragraphs that came with the questions, about half a
million. Set data.corpus='' and retrieval.url to search in all of Wikipedia. The
config `configs/hotpotqa.py:st_ppo,7b` searches in all of Wikipedia, in the
setting of the paper, which trains Qwen2.5 of 1.5B, 3B or 7B.
configs/nq_hotpotqa.py lists the hardware and estimates of time and memory.
"""

from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import slices


def get_config(argument: str = 'st_ppo') -> base.Config:
  algorithm, size = slices.split(argument)
  if size:
    return nq_hotpotqa.of_one('hotpotqa', argument)
  config = base.get_config(algorithm)
  config.num_steps = 200
  config.data.update(
    name='tfds',
    root='DATA',
    train='hotpotqa:train',
    evaluation='hotpotqa:validation',
    corpus='hotpotqa.corpus.jsonl',
  )
  return config
