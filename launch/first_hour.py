"""Measures on a real slice what compiling ahead cannot prove.

    python -m launch.first_hour --config=FILE.py[:ALGORITHM] --workdir=DIR
        [--config.KEY=VALUE ...] [--report=FILE] [--megabytes=N]

Run it on all hosts at once, as `train` is run, with the config and the workdir
of the run that is to follow; it takes some minutes. Process 0 prints a table
and, with `--report`, writes it to a file as JSON. A line compares what was
measured with what `plan` and the docs assume:

- devices: their number, and the memory of one;
- own programs: whether the compiler accepts a program that runs on the chips of
  one host only (`rollout.span`);
- product, copy: the rates of a large matrix product and of a large copy;
- links: what a device sends in an all-gather and a reduce-scatter of weights,
  along each axis of the mesh;
- attention: the kernel of training, forward and backward, on rows of the
  config's length;
- cached attention: the kernel of decoding, on rows that are half full;
- workdir: writing and reading a file of `--megabytes` (by default 64) on every
  host at the same time, and the latency of a small one.

If a check fails, its line has the error, the other checks go on, and the exit
code is 70.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import json
import math
import sys
import time
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import flops
from stppo_jax.models.kernels import live_pages_tpu
from stppo_jax.parallel import distributed
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import memory
from stppo_jax.parallel import topology
from stppo_jax.training import components
from stppo_jax.training import model_files
from stppo_jax.training import span

_REPEATS, _CALLS = 5, 4
_NO_ERROR = 'no error'  # the expected result of a check that has failed
_FOLDER = 'first_hour'  # the folder in the workdir for the files of `storage`


class Line(NamedTuple):
  """A line of the report.

  Attributes:
    check: the name of the measurement. If it has the field {host}, every host
      has a line. Otherwise the first host has a line for all hosts.
    found, expected: the result, and the value that `plan` assumes. Numbers are
      in `unit`.
    unit: the unit of both numbers.
  """

  check: str
  found: Any
  expected: Any = ''
  unit: str = ''


class Subject(NamedTuple):
  """The run that is to follow, and its devices.

  Attributes:
    config: the config of the run.
    shape: the shape of its models.
    mesh: the mesh of training.
    hosts: the hosts.
    limits: the published limits of a device; None if they are not known.
    workdir: the folder of the run.
    megabytes: the size of the file that is written there.
  """

  config: Any
  shape: model_config.ModelConfig
  mesh: jax.sharding.Mesh
  hosts: hosts_lib.Hosts
  limits: topology.Limits | None
  workdir: epath.Path
  megabytes: int


def devices(subject: Subject) -> Iterator[Line]:
  """Compares the devices with the mesh and with their published memory."""
  kind = jax.devices()[0].device_kind
  yield Line(f'devices of kind {kind}', jax.device_count(), subject.mesh.size)
  yield Line('hosts', jax.process_count(), subject.hosts.count)
  if (found := memory.device_limit()) is not None:
    expected = subject.limits.memory if subject.limits else ''
    yield Line('memory', round(found / memory.GIB, 2), expected, 'GiB')


def own_programs(subject: Subject) -> Iterator[Line]:
  """Checks whether programs that run on one host alone can be compiled."""
  found = span.try_here(subject.config) or 'compile'
  yield Line('own programs of host {host}', found, 'compile')


def rates(subject: Subject) -> Iterator[Line]:
  """Measures the rates of a matrix product and of a copy on one device."""
  width = 8192 if subject.limits else 256
  # Random numbers, because a product of zeros takes less power.
  x = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
  product = jax.jit(lambda x: x @ x)
  yield _rate(subject, 'product', 2.0 * width**3, lambda: product(x))
  many = jnp.ones((16, width, width), jnp.bfloat16)
  copy = jax.jit(lambda x: x + 1)  # reads and writes each element once
  moved = 2.0 * many.nbytes
  yield _rate(subject, 'copy', moved, lambda: copy(many), of='bandwidth')


def links(subject: Subject) -> Iterator[Line]:
  """Measures how fast a device sends along each axis of the mesh."""
  mesh, per_device = subject.mesh, 2**23  # float32 elements
  if not subject.limits:
    per_device = 2**16
  for axis, count in mesh.shape.items():
    if count == 1:
      continue
    gather = functools.partial(jax.lax.all_gather, axis_name=axis, tiled=True)
    scatter = functools.partial(
      jax.lax.psum_scatter, axis_name=axis, tiled=True
    )
    size = per_device // count * count
    spec = P(tuple(mesh.axis_names))
    for name, call, sent in (
      ('all-gather', gather, (count - 1) * size * 4),
      ('reduce-scatter', scatter, (count - 1) / count * size * 4),
    ):
      program = jax.jit(
        # The sum keeps the compiler from leaving the exchange out.
        jax.shard_map(
          lambda x, call=call: jnp.sum(call(x))[None],
          mesh=mesh,
          in_specs=spec,
          out_specs=spec,
          check_vma=False,
        )
      )
      x = jax.jit(
        functools.partial(jnp.ones, (size * mesh.size,)),
        out_shardings=jax.sharding.NamedSharding(mesh, spec),
      )()
      line = f'{name} along {axis}'
      yield _rate(subject, line, sent, lambda: program(x), of='links')


def kernel_of_training(subject: Subject) -> Iterator[Line]:
  """Measures the attention of a row, forward and backward, on one device."""
  shape, length = subject.shape, subject.config.env.max_length
  attend = attention.causal_attention(
    shape.attention, length, lengths_B=None, mesh=None
  )
  heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
  keys = jax.random.split(jax.random.key(0), 3)
  q, k, v = (
    jax.random.normal(key, (1, length, n, shape.head_dim), shape.dtype)
    for key, n in zip(keys, heads)
  )
  loss = lambda *qkv: jnp.sum(attend(*qkv).astype(jnp.float32))
  program = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  per_token = flops.attention_operations(shape, length) / shape.num_layers
  # A backward pass has twice the products of a forward pass.
  done = 3 * length * per_token
  yield _rate(subject, 'attention', done, lambda: program(q, k, v))


def kernel_of_decoding(subject: Subject) -> Iterator[Line]:
  """Measures attention to a KV cache on one device.

  Yields no line if the model does not decode with this kernel.
  """
  shape = subject.shape
  if shape.attention != 'splash' or shape.head_dim % live_pages_tpu.PAGE_SIZE:
    return
  B, K, H = 32, shape.num_kv_heads, shape.head_dim
  N = math.ceil(subject.config.env.max_length / live_pages_tpu.PAGE_SIZE)
  # Each row has pages of its own and is half full. The kernel should read only
  # half of all pages, and the rate counts only that half.
  lengths_B = jnp.full(B, N * live_pages_tpu.PAGE_SIZE // 2)
  pages = B * N
  kv = jax.jit(
    lambda: jax.random.normal(
      jax.random.key(0), (pages, K, live_pages_tpu.PAGE_SIZE, H), shape.dtype
    )
  )()
  q = jnp.ones((B, K, shape.num_heads // K, 1, H), shape.dtype)
  own = jnp.ones((B, K, subject.config.rollout.decode_chunk, H), shape.dtype)
  table_BN = jnp.arange(pages).reshape(B, N)
  work = live_pages_tpu.plan_work(lengths_B, table_BN, pages)
  program = jax.jit(live_pages_tpu.attend)
  run = lambda: program(q, kv, kv, own, own, work, 0)
  read = 2 * int(lengths_B.sum()) * K * H * kv.dtype.itemsize
  yield _rate(subject, 'cached attention', read, run, of='bandwidth')


def storage(subject: Subject) -> Iterator[Line]:
  """Writes and reads files in the workdir, on every host at the same time.

  Raises:
    OSError: if the workdir cannot be used, or other bytes are read than were
      written.
  """
  folder = subject.workdir / _FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f'host_{subject.hosts.index}'
  content = np.random.default_rng(subject.hosts.index).bytes(
    subject.megabytes << 20
  )
  times = [time.perf_counter()]
  path.write_bytes(content)
  times.append(time.perf_counter())
  found = path.read_bytes()
  times.append(time.perf_counter())
  for _ in range(_REPEATS):
    path.write_bytes(b'x')
    times.append(time.perf_counter())
  path.unlink()
  if found != content:
    raise OSError(f'{path}: other bytes than were written')
  written, read, *small = map(float, np.diff(times))
  for name, seconds in ('written', written), ('read', read):
    rate = round(subject.megabytes / seconds, 1)
    yield Line(f'workdir, {name} by host {{host}}', rate, '', 'MiB/s')
  latency = round(float(np.median(small)), 4)
  yield Line('workdir, a small file of host {host}', latency, '', 's')


CHECKS: Sequence[Callable[[Subject], Iterator[Line]]] = (
  devices,
  own_programs,
  rates,
  links,
  kernel_of_training,
  kernel_of_decoding,
  storage,
)


def _rate(
  subject: Subject,
  name: str,
  amount: float,
  run: Callable[[], Any],
  *,
  of: str = 'operations',
) -> Line:
  """Measures a rate; returns its line, with the published limit beside it.

  Args:
    subject: the run and the limits of its devices.
    name: the name of the measurement.
    amount: the number of operations or of bytes of a call.
    run: makes a call. The first call warms up. Each measurement is of several
      calls, so that the time to start them hardly counts.
    of: the limit that the rate is compared with, a field of `topology.Limits`.
  """
  jax.block_until_ready(run())
  found = []
  for _ in range(_REPEATS):
    begin = time.perf_counter()
    jax.block_until_ready([run() for _ in range(_CALLS)])
    found.append((time.perf_counter() - begin) / _CALLS)
  unit = 'TFLOP/s' if of == 'operations' else 'GB/s'
  scale = 1e12 if of == 'operations' else 1e9
  expected = getattr(subject.limits, of) / scale if subject.limits else ''
  rate = amount / float(np.median(found)) / scale
  return Line(name, round(rate, 3), expected, unit)


def measured(subject: Subject) -> tuple[list[Line], bool]:
  """Returns the lines of all checks and hosts, and whether all checks ran."""
  lines: list[Line] = []
  for check in CHECKS:
    here: list[Line] = []
    try:
      for line in check(subject):
        here.append(line)
    except Exception as error:  # a failed check must not stop the other checks
      failed = f'{check.__name__}, host {{host}}'
      here.append(Line(failed, hosts_lib.describe(error), _NO_ERROR))
    # This exchange also lets the hosts begin the next check together.
    everywhere = subject.hosts.exchange(check.__name__, here)
    for host, found in enumerate(everywhere):
      lines += [
        Line(line[0].format(host=host), *line[1:])
        for line in found
        if host == 0 or '{host}' in line[0]
      ]
  with contextlib.suppress(OSError):  # another host has removed the folder
    (subject.workdir / _FOLDER).rmdir()
  return lines, all(line.expected != _NO_ERROR for line in lines)


def main(argv: Sequence[str]) -> int:
  """Measures and reports; returns the exit code."""
  return command_line.program(_main, argv, __doc__)


def _main(argv: Sequence[str]) -> int:
  flags = command_line.flags(
    workdir='',
    report='',
    megabytes=command_line.integer(64, lower_bound=1),
    coordinator='',
    num_processes=0,
    process_id=-1,
  )
  given = configuration.split(argv, flags, required=('config', 'workdir'))
  config = configuration.checked(flags, given)
  with exits.as_misconfigured():
    place = distributed.place(
      flags.coordinator, flags.num_processes, flags.process_id
    )
  with distributed.joined(place) as hosts:
    # The slice may be another one than the config is for.
    with exits.as_misconfigured():
      mesh = components.build_mesh(config)
      shape = model_files.build_model_config(config, None, mesh)
    subject = Subject(
      config=config,
      shape=shape,
      mesh=mesh,
      hosts=hosts,
      limits=topology.limits_of(jax.devices()[0]),
      workdir=epath.Path(flags.workdir),
      megabytes=flags.megabytes,
    )
    lines, complete = measured(subject)
    if hosts.is_first:
      for check, found, expected, unit in [Line._fields, *lines]:
        print(f'{check:32} {found!s:>12} {expected!s:>12} {unit}'.rstrip())
      if flags.report:
        records = [line._asdict() for line in lines]
        report = epath.Path(flags.report)
        with exits.naming(f'--report={report}', (OSError,)):
          report.parent.mkdir(parents=True, exist_ok=True)
          report.write_text(json.dumps(records, indent=2))
  return 0 if complete else exits.BUG


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
