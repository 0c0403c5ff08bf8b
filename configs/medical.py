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
"yes", so only a tenth of the training questions are from PubMedQA.

The setting of the paper (arXiv:2511.20718) trains Qwen2.5-Instruct of 1.5B, 3B
or 7B: a step has 256 questions, a minibatch 128 trajectories, and a dialogue at
most 6 searches. Every host of a slice of TPU v5e runs

    python -m stppo_jax train --config=configs/medical.py:st_ppo,7b \
        --config.data.root=DATA --config.model.path=MODEL \
        --config.retrieval.url=http://HOST:8000 --workdir=/shared/run

and launch/README.md has launchers that start this command. All hosts must see
/shared, DATA and MODEL. docs/recipes.md lists metrics to look at after ten
steps. The command

    python -m stppo_jax plan --config=configs/medical.py:7b \
        --topology=v5e:8x8 --compile=False --config.model.path=MODEL

needs no data. It prints these estimates, if half of the tokens are trained on.
No run on a TPU, or on a node of eight H100, has confirmed them yet.

    size      topology   GiB of a chip seconds a step   200 steps
    1_5b      v5e:4x4    9.4 of 15.75  37, at least 16  2 hours, 33 chip-hours
    3b        v5e:8x8    6.9 of 15.75  31, at least 13  2 hours, 109 chip-hours
    7b        v5e:8x8    7.2 of 15.75  50, at least 22  3 hours, 179 chip-hours
    1_5b_node gpu:h100:8 11.1 of 79.20 16, at least 7   1 hours, 7 chip-hours
    3b_node   gpu:h100:8 19.6 of 79.20 31, at least 13  2 hours, 14 chip-hours
    7b_node   gpu:h100:8 43.5 of 79.20 68, at least 29  4 hours, 30 chip-hours
"""

from stppo_jax.configs import base
from stppo_jax.configs import slices


def get_config(argument: str = 'st_ppo') -> base.Config:
  algorithm, size = slices.split(argument)
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
  if size:
    config.env.max_turns = 6  # searches
    config.rollout.trajectories_per_step = 256
    config.updates.minibatch_size = 128
    slices.place(config, size)
  return config
