"""Estimate memory, time and cost of a run on hardware that you do not have.

python -m stppo_jax plan --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE ...]
    [--topology=v5e:4x4 | --devices=64] [--hbm_gib=80.0] [--length=0]
    [--loss_fraction=0.5] [--compile=true] [--programs=decode,update]
    [--price=0.0] [--json] [--sweep_mesh] [--compile_best=0]

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --topology=NAME               a TPU slice (a generation and its chips along
                                each axis), gpu:h100:8, or cpu:8
  --devices=N                   short for --topology=cpu:N
  --hbm_gib=X                   the memory of one device, in GiB; 0 = that of
                                the topology's devices
  --length=N                    tokens of a row; 0 = env.max_length
  --loss_fraction=X             the largest share of them that is trained on
  --compile=true                whether to compile, which takes minutes;
                                without it, temporaries are estimated too
  --programs=NAMES              the programs to compile: some of extend, decode,
                                publish, annotate, update
  --price=X                     the price of a chip for an hour, for the cost
  --json                        prints one JSON object
  --sweep_mesh                  ranks all meshes, those that fit by their time
  --compile_best=N              with --sweep_mesh: compiles the N best; -1 = all

The command shards the run's models over devices that need not exist. In
`model.path` it reads only config.json, and it reads no data. It prints the
bytes that one device holds, engines included. By formulas it also estimates the
time of a step, and prints the assumptions of these formulas.
For a TPU slice, the programs of the run are compiled for TPU, which needs the
package libtpu but no TPU. For cpu:N, the update is compiled for CPU. A run has
each program in several sizes, of which only the largest is compiled. For GPUs
nothing is compiled. If the run does not fit in the memory, the exit code is 2,
and a line names changes of the config with which it would fit. If programs are
compiled, the programs with these changes were compiled, too.
"""

from collections.abc import Sequence
import math

from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.configs import external


def main(argv: Sequence[str]) -> int:
  """Prints the plan; returns the exit code, 2 if the run does not fit."""
  flags = command_line.flags(
    topology='',
    devices=command_line.integer(lower_bound=1),
    length=command_line.integer(0, lower_bound=0),
    hbm_gib=command_line.number(0.0, lower_bound=0),
    price=command_line.number(0.0, lower_bound=0),
    loss_fraction=command_line.number(0.5, lower_bound=1e-3, upper_bound=1.0),
    compile=True,
    programs=[],
    json=False,
    sweep_mesh=False,
    compile_best=command_line.integer(0, lower_bound=-1),
  )
  config = configuration.parse(
    argv,
    flags=flags,
    ignored=[external.data_exist, external.passages_are_named],
  )
  errors = [
    # The bounds of absl let a number be infinite, but JSON has no infinity.
    f'--{name}={value}: must be finite'
    for name, value in (('hbm_gib', flags.hbm_gib), ('price', flags.price))
    if math.isinf(value)
  ]
  if flags.topology and flags.devices:
    errors.append(f'--devices={flags.devices}: not allowed with --topology')
  if flags.compile_best and not flags.sweep_mesh:
    errors.append(f'--compile_best={flags.compile_best}: needs --sweep_mesh')
  # Imports come late, so that most wrong flags are reported before jax loads.
  if flags.programs:
    from stppo_jax.tools.plan import programs

    errors += [
      f'--programs={name}: must be some of {", ".join(programs.PROGRAMS)}'
      for name in flags.programs
      if name not in programs.PROGRAMS
    ]
  command_line.refuse(errors)
  from stppo_jax.tools.plan import estimate

  return estimate.show(
    config,
    topology_name=flags.topology or f'cpu:{flags.devices or 64}',
    programs=flags.programs if flags.compile else None,
    gib=flags.hbm_gib,
    length=flags.length or config.env.max_length,
    loss_fraction=flags.loss_fraction,
    price=flags.price,
    as_json=flags.json,
    sweeps=flags.sweep_mesh,
    compile_best=flags.compile_best,
  )
