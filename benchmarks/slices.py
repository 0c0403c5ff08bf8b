"""Compiles the programs of published models for TPU slices; no TPU is needed.

python -m benchmarks.slices [--only=TEXT] [--write]

Each pair of a model and a slice takes some minutes and some GB of memory, in a
process of its own. `--only` selects the pairs whose name contains the text,
for example `7b` or `1_5b@v5e:4x4`. `--write` puts their lines into the table of
docs/sharding.md and keeps the other lines.

A run has 512 trajectories of 4096 tokens in a step, and 256 trajectories in an
update. Half of the tokens are policy tokens. Policy and value model have
bfloat16 activations. Each group of devices that shares rows has one or two rows
in a forward pass. The engine has as many slots as the memory leaves room for.
"""

import functools
import math
import pathlib
from typing import NamedTuple

from benchmarks import page_tables

_MODELS = pathlib.Path(__file__).parents[1] / 'tests' / 'models' / 'published'
_GIB = 2**30
_LENGTH, _LOSS_FRACTION = 4096, 0.5


# The compiler does not estimate the time of the kernel that reads cached keys
# and values. The kernel is assumed to reach this share of a chip's bandwidth,
# which a similar kernel reaches in decoding on TPU7x ("Ragged Paged Attention",
# arXiv 2604.15464).
_KERNEL = 0.86


class Setting(NamedTuple):
  """The mesh of a model on a slice, and of the engine of each of its hosts.

  If a sum of gradients goes over all chips, and the slice has 16 chips or more,
  the sum is compiled to an all-reduce, which sends twice as much as a
  reduce-scatter. So on such slices `fsdp` has fewer chips than the slice.

  Attributes:
    data, fsdp, expert, tensor: the sizes of the axes of the training mesh.
    decode_tensor: the number of chips over which the weights are divided in
      decoding.
    rows: the number of rows, in a forward pass, of each group of chips that
      share rows.
  """

  data: int
  fsdp: int
  expert: int
  tensor: int
  decode_tensor: int
  rows: int = 1


SETTINGS = {
  'qwen2_5_1_5b@v5e:2x4': Setting(1, 8, 1, 1, 2),
  'qwen2_5_1_5b@v5e:4x4': Setting(2, 8, 1, 1, 2),
  'qwen2_5_1_5b@v5p:2x2x4': Setting(2, 8, 1, 1, 1),
  'qwen3_1_7b@v6e:2x4': Setting(1, 8, 1, 1, 1),
  'qwen2_5_3b@v5e:2x4': Setting(1, 8, 1, 1, 2),
  'qwen2_5_3b@v5e:4x4': Setting(1, 8, 1, 2, 2),
  'qwen3_4b@v5e:4x8': Setting(2, 8, 1, 2, 2),
  'qwen2_5_7b@v5e:8x8': Setting(1, 32, 1, 2, 4),
  'qwen2_5_7b@v5p:2x2x4': Setting(2, 8, 1, 1, 1),
  'qwen2_5_7b@v6e:4x4': Setting(1, 8, 1, 2, 4),
  'qwen3_14b@v5p:2x4x4': Setting(1, 16, 1, 2, 4),
  # With decode_tensor=2, half of an expert is 384 wide. A fourth would be 192
  # wide, which the kernel of experts pads to 256, so decode would first copy
  # the weights of all experts. With two rows, weights are gathered half as
  # often, and the memory has room for two rows.
  'qwen3_30b_a3b@v5p:2x4x4': Setting(1, 8, 4, 1, 2, rows=2),
}


def config(name: str):
  """Returns the config of a model on a slice; `name` is a key of `SETTINGS`."""
  from stppo_jax.configs import base
  from stppo_jax.parallel import mesh as mesh_lib

  setting, model = SETTINGS[name], name.partition('@')[0]
  made = base.get_config('st_ppo')
  made.model.path = str(_MODELS / model)
  made.model.dtype = 'bfloat16'
  made.updates.remat = 'full'
  made.updates.microbatch_size = setting.rows * math.prod(setting[:3])
  made.mesh.update(dict(zip(mesh_lib.AXES, setting)))
  made.rollout.update(
    slots=0,
    tensor=setting.decode_tensor,
    prefill_chunk=256,
    deterministic=False,
  )
  return made


def line(name: str) -> str:
  """Compiles the programs of a model on a slice; returns the table's line.

  Args:
    name: a key of `SETTINGS`.
  """
  from stppo_jax.parallel import topology
  from stppo_jax.tools.plan import plan as plan_lib
  from stppo_jax.tools.plan import programs

  model, _, chips = name.partition('@')
  made = config(name)
  make = functools.partial(
    plan_lib.make,
    made,
    length=_LENGTH,
    loss_fraction=_LOSS_FRACTION,
    topology=topology.find(chips),
  )
  formula = make()
  plan = make(programs=list(programs.PROGRAMS)[::-1])
  state = plan.held.learns
  engine = plan.held.decodes - state
  update = plan.programs['update']
  setting = SETTINGS[name]
  learning, collecting, publishing = (
    [
      plan.programs[n].problem or f'{(held + plan.temporaries[n]) / _GIB:.1f}'
      for n in names
    ]
    for held, names in (
      (state, ('annotate', 'update')),
      (state + engine, ('extend', 'decode')),
      (state, ('publish',)),
    )
  )
  seconds = [f'{plan.programs[n].seconds:.1f}' for n in ('annotate', 'update')]
  cells = (
    f'{model} {chips}',
    ', '.join(map(str, setting[:4])),
    f'{state / _GIB:.1f}',
    *learning,
    f'{sum(c.sent for c in update.collectives) / _GIB:.0f}',
    f'{update.operations / 1e12:.0f}',
    ' + '.join(seconds),
    f'{plan.slots}, {setting.decode_tensor}',
    f'{engine / _GIB:.1f}',
    *collecting,
    *publishing,
    *(f'{x:.2f}' for x in against_bounds(plan, made.rollout)),
    f'{plan.total / _GIB:.1f} / {formula.total / _GIB:.1f}',
    ' / '.join('fits' if x.fits else 'does not fit' for x in (plan, formula)),
  )
  return f'| {" | ".join(cells)} |'


def against_bounds(plan, rollout) -> tuple[float, float]:
  """Returns the times of extend and of decode, each divided by its lower bound.

  Each time is a sum. The first part is the compiler's estimate of everything
  except the attention to cached tokens, which a kernel computes. The second
  part is the time of this kernel: in extend, the time of its products at the
  peak rate; in decode, the time of its reads at a share of the bandwidth. The
  bound of extend is the time of all products at the peak rate. The bound of
  decode is the time to read the weights and the keys and values. Rows have half
  of their greatest length. Both results are 0 if a program does not fit.

  Args:
    plan: the plan, in which both programs were compiled.
    rollout: the section `rollout` of the config.
  """
  from stppo_jax.models import flops

  work, limits = plan.work, plan.topology.limits
  extend, decode = (plan.programs[name] for name in ('extend', 'decode'))
  if extend.problem or decode.problem:
    return 0.0, 0.0
  tokens = work.decode_rows * rollout.prefill_chunk / work.engine_tensor
  rate = tokens / limits.operations
  kernel = rate * flops.attention_operations(work.shape, _LENGTH)
  products = rate * flops.layer_operations(work.shape, _LENGTH)
  per_token = decode.seconds / rollout.decode_chunk
  cached = work.decode_bytes - work.engine_weights
  return (
    (extend.seconds + kernel) / products,
    (per_token + cached / _KERNEL / limits.bandwidth)
    / (work.decode_bytes / limits.bandwidth),
  )


if __name__ == '__main__':
  page_tables.main('slices', line, SETTINGS, __doc__)
