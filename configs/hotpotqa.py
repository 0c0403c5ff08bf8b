"""Trains on HotpotQA, whose questions need two searches.

    python -m stppo_jax data build hotpotqa --root=DATA
    python -m stppo_jax train --config=configs/hotpotqa.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --workdir=runs/hotpotqa

MODEL is the Hugging Face directory of a model that follows instructions. The
search engine has the paragraphs that came with the questions, some half a
million. Set data.corpus='' and retrieval.url to search in all of Wikipedia.
"""

from stppo_jax.configs import base


def get_config(algorithm: str = 'st_ppo') -> base.Config:
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
