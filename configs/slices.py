"""The options with which Qwen2.5 trains on TPU slices and a node of GPUs.

The configs of data sets accept a size after the algorithm or in its place, such
as `configs/nq.py:st_ppo,7b` or `configs/nq.py:7b`. The size `7b` is for a slice
of TPU v5e, with 16 GiB per chip and four chips per host. The size `7b_node` is
for the same model on a node of eight H100. For other models and other devices,
`python -m stppo_jax plan --sweep_mesh` finds such options.
"""

import typing

from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base


class Slice(typing.NamedTuple):
  """A slice or a node, and the sharding of a model on its chips.

  Attributes:
    topology: the name of the slice or node, as in `plan --topology`.
    data, fsdp, tensor: the sizes of the mesh axes in training.
    microbatch_size: rows per forward pass.
    decode_tensor: the number of chips over which decoding shards the weights.
  """

  topology: str
  data: int
  fsdp: int
  tensor: int
  microbatch_size: int
  decode_tensor: int


SLICES = {
  '1_5b': Slice('v5e:4x4', 2, 8, 1, 16, 2),
  '3b': Slice('v5e:8x8', 2, 32, 1, 64, 2),
  '7b': Slice('v5e:8x8', 1, 16, 4, 16, 4),
  '1_5b_node': Slice('gpu:h100:8', 1, 8, 1, 16, 1),
  '3b_node': Slice('gpu:h100:8', 1, 8, 1, 16, 1),
  '7b_node': Slice('gpu:h100:8', 1, 8, 1, 8, 1),
}


def split(argument: str) -> tuple[str, str]:
  """Returns the algorithm and the size in a config's argument.

  If the argument has no algorithm, the algorithm is st_ppo. If it has no size,
  the size is ''.

  Args:
    argument: ALGORITHM, SIZE, or ALGORITHM,SIZE.

  Raises:
    UnknownName: a word is neither an algorithm nor a size. The message lists
      the choices.
  """
  words = argument.split(',')
  algorithm = words.pop(0) if words[0] in algorithms.ALGORITHMS else 'st_ppo'
  size = words.pop(0) if words and words[0] in SLICES else ''
  if words:
    # After an algorithm only a size may follow, and after a size nothing.
    is_first = words[0] == argument.partition(',')[0]
    choices = [] if size else [*SLICES]
    if is_first:
      choices = [*sorted(algorithms.ALGORITHMS), *SLICES]
    raise algorithms.UnknownName(
      f'unknown {words[0]!r}, expected ALGORITHM, SIZE or ALGORITHM,SIZE'
      + settings.closest(words[0], choices)
    )
  return algorithm, size


def place(config: base.Config, size: str) -> None:
  """Sets the options with which a model of a size trains on its slice.

  Args:
    config: the config, which is changed. Its number of steps and its batch
      sizes must already be set.
    size: a key of `SLICES`.
  """
  chosen = SLICES[size]
  config.title += f' {size}'
  config.model.dtype = 'bfloat16'
  config.mesh.update(data=chosen.data, fsdp=chosen.fsdp, tensor=chosen.tensor)
  config.updates.remat = 'full'
  config.updates.microbatch_size = chosen.microbatch_size
  config.updates.head_chunk = 1024
  config.rollout.tensor = chosen.decode_tensor
  # If this is False, a free slot is refilled at once, see docs/engines.md.
  config.rollout.deterministic = False
  # A call with fewer tokens would mostly wait until the weights are read.
  config.rollout.prefill_chunk = 256
  warm_up(config)


def warm_up(config: base.Config) -> None:
  """Sets the warm-up of the learning rates to the shares of ST-PPO.

  The warm-up takes 28.5 % of the updates for the policy, and 1.5 % for the
  value model (arXiv:2511.20718).

  Args:
    config: the config, which is changed. Its number of steps and its batch
      sizes must already be set.
  """
  per_epoch = (
    config.rollout.trajectories_per_step // config.updates.minibatch_size
  )
  updates = config.num_steps * per_epoch * config.updates.num_epochs
  config.policy_optimizer.warmup_updates = round(0.285 * updates)
  config.value_optimizer.warmup_updates = round(0.015 * updates)
