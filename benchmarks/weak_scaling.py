"""Counts the work of a chip as a TPU slice grows; no TPU is needed.

python -m benchmarks.weak_scaling [--only=v5e:4x4] [--write]

Each chip keeps its number of rows and its part of the weights: `fsdp` is 8, and
`data` grows. Then a chip makes the same number of multiplications on any slice,
and sends the same number of bytes along `fsdp`. Only the bytes of the sums of
gradients along `data` grow, up to twice the size of the gradients. The update
and the copy of the weights to the engine (publish) are compiled. The operations
of the update's matrix products and the bytes that both programs send are
counted in the compiled text. Beside the counted bytes, the table shows the
results of the formulas of `plan`. Each slice takes some minutes. `--write` puts
the lines into the table of docs/sharding.md, and keeps the other lines.

The model has few layers, all of the same kind, and small matrices, because the
compiler takes longer for larger models. The model's embeddings are not tied.
"""

import json
import pathlib
import tempfile
from typing import NamedTuple

from benchmarks import page_tables

_MIB = 2**20
_MODEL = {
  'architectures': ['Qwen2ForCausalLM'],
  'model_type': 'qwen2',
  'hidden_size': 512,
  'intermediate_size': 4096,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'vocab_size': 8192,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1e4,
  'max_position_embeddings': 4096,
  'tie_word_embeddings': False,
}
_LENGTH, _MICROBATCHES, _FSDP = 512, 4, 8
SLICES = ('v5e:2x4', 'v5e:4x4', 'v5e:8x8', 'v5e:16x16')


class Counted(NamedTuple):
  """The work of a chip in an update and in publishing.

  Attributes:
    topology: the name of the slice.
    data: the size of the mesh axis `data`.
    operations: the number of multiplications and additions in the matrix
      products of an update.
    update, publish: the bytes that a chip sends in an update and in publishing;
      first counted in the compiled program, then by the formula of `plan`.
  """

  topology: str
  data: int
  operations: int
  update: tuple[float, float]
  publish: tuple[float, float]


def count(name: str) -> Counted:
  """Compiles the programs for a slice, and returns the work of a chip."""
  from stppo_jax.configs import base
  from stppo_jax.parallel import topology as topology_lib
  from stppo_jax.tools.plan import plan as plan_lib

  topology = topology_lib.find(name)
  # This algorithm needs no statistics of the whole minibatch, which would take
  # one more forward pass.
  config = base.get_config('turn_ppo')
  data, rows = topology.num_devices // _FSDP, topology.num_devices
  config.model.dtype = 'bfloat16'
  config.updates.remat = 'full'
  config.mesh.update(data=data, fsdp=_FSDP, tensor=1)
  config.rollout.tensor = 2
  config.updates.microbatch_size = rows
  config.updates.minibatch_size = _MICROBATCHES * rows
  config.rollout.trajectories_per_step = _MICROBATCHES * rows
  config.rollout.slots = 16
  config.sft.batch_size = rows  # must be a multiple of the number of devices
  with tempfile.TemporaryDirectory() as folder:
    config.model.path = folder
    path = pathlib.Path(folder, 'config.json')
    path.write_text(json.dumps(_MODEL), encoding='utf-8')
    plan = plan_lib.make(
      config,
      length=_LENGTH,
      loss_fraction=0.5,
      programs=('update', 'publish'),
      topology=topology,
    )
  sent = {
    program: (
      sum(c.sent for c in plan.programs[program].collectives),
      sum(plan.phases[program].traffic.values()),
    )
    for program in ('update', 'publish')
  }
  assert plan.work.updates == 1
  return Counted(name, data, plan.programs['update'].operations, **sent)


def line(counted: Counted) -> str:
  """Returns the line of a slice in the table."""
  cells = [
    counted.topology,
    f'{counted.data}, {_FSDP}',
    f'{counted.operations / 1e9:.1f} GFLOP',
  ]
  for sent, formula in (counted.update, counted.publish):
    difference = round(100 * (sent / formula - 1), 1) + 0.0  # 0.0, never -0.0
    cells.append(f'{sent / _MIB:.1f} MiB')
    cells.append(f'{formula / _MIB:.1f} ({difference:+.1f} %)')
  return f'| {" | ".join(cells)} |'


if __name__ == '__main__':
  page_tables.main(
    'weak scaling', lambda name: line(count(name)), SLICES, __doc__
  )
