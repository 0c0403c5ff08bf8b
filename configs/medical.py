"""Trains on medical questions with options: MedQA, MedMCQA and PubMedQA.

    for name in medqa pubmedqa mmlu-med; do
      python -m stppo_jax data build $name --root=DATA
    done
    python -m stppo_jax data build medmcqa --root=DATA --from_files=FOLDER
    python -m stppo_jax train --config=configs/medical.py:st_ppo \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=runs/medical

FOLDER holds the files of MedMCQA, MODEL is the Hugging Face directory of a
model that follows instructions, and the server has medical passages. The reward
is the accuracy of the choice. More than half of the answers of PubMedQA are
"yes", so the weights keep it to a tenth.
"""

from stppo_jax.configs import base
from stppo_jax.configs import slices


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = base.get_config(algorithm)
  config.num_steps = 200
  config.data.update(
    name='tfds',
    root='DATA',
    train='medqa:train weight=45, medmcqa:train weight=45, '
    'pubmedqa:train weight=10',
    evaluation='medqa:test, medmcqa:validation, pubmedqa:test, mmlu-med:test',
    corpus='',
  )
  return config


def get_sized_config(algorithm: str, size: str) -> base.Config:
  """Returns the setting of the paper for a size of Qwen2.5.

  Args:
    algorithm: an entry of the table of algorithms.
    size: a key of `slices.SLICES`.
  """
  config = get_config(algorithm)
  config.env.max_turns = 6  # searches
  config.rollout.trajectories_per_step = 256
  config.updates.minibatch_size = 128
  slices.place(config, size)
  return config
