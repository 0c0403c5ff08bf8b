"""Compares training and decoding on one accelerator with its limits.

    python -m benchmarks.accelerator --all [--folder=figures] [--write]

The models have the shapes of Qwen2.5, random weights and bfloat16 activations.
Each piece is measured in a process of its own, which has at most 9 minutes, and
its figures are kept in the folder. If the command is repeated, it measures the
pieces without figures: after an interruption, after a piece that ran out of
time (the folder keeps its compiled programs), and after a change of the
package, its configs, the benchmarks, the version of jax or a size. The exit
code is 75 if a piece ran out of time, otherwise 70 if a piece failed. A folder
has the figures of one device.

`limits`: the rates of a large matrix product and of a large copy, with which
all other rates are compared. `update`: annotate and update for dialogues of
log-normal lengths, in packed rows. The first model is measured two more times:
in packed rows without cuDNN's attention, and in padded rows, whose
log-probabilities must equal the log-probabilities of packed rows except for
rounding. `decode`: for the last model, the decoding of turns after a prompt,
and the prefill of the prompt. `step`: a whole step of the first model, with an
environment that answers after 250 ms.

Only operations that the formulas need are counted: causal attention counts half
of the square, logits count at loss positions only, and neither padding nor
recomputation counts. Decoding a token in every row must read all weights once,
and the keys and values of each row. `--write` puts the table into
docs/benchmarks.md, if all pieces have been measured on an accelerator.
"""

import argparse
from collections.abc import Callable, Sequence
import datetime
import hashlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import jax

from benchmarks import accelerator_engine
from benchmarks import accelerator_learner
from benchmarks import measure
from benchmarks import page_tables
from stppo_jax import exits
from stppo_jax.parallel import compilation
from stppo_jax.workdir import atomic_files

_ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = _ROOT / 'docs' / 'benchmarks.md'
_SECONDS = 540  # the most seconds that a piece may take
FUNCTIONS: dict[str, Callable[..., list[accelerator_learner.Line]]] = {
  'limits': accelerator_learner.limits,
  'update': accelerator_learner.update,
  'decode': accelerator_engine.decode,
  'step': accelerator_engine.step,
}
_HEADER = (
  *('model', 'program', 'seconds', 'tokens/s', 'rate', 'of the limit'),
  'peak GiB',
)


def pieces(flags: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
  """Returns the pieces by name: a key of `FUNCTIONS`, and its arguments."""
  found: dict[str, tuple[str, dict[str, Any]]] = {'limits': ('limits', {})}

  def add(kind, size, **options):
    name = '-'.join([kind, size, *map(str, options.values())])
    found[name] = kind, {'size': size, **options}

  first, last = flags.sizes[0], flags.sizes[-1]
  for size in flags.sizes:
    add('update', size, layout='packed')
  for rows in flags.decode_rows:
    add('decode', last, rows=rows)
  add('step', first)
  for layout in list(accelerator_learner.LAYOUTS)[1:]:
    add('update', first, layout=layout)
  return found


def measured(
  kind: str, arguments: dict[str, Any], options: accelerator_learner.Options
) -> dict[str, Any]:
  """Measures a piece in this process; returns its figures."""
  device = jax.devices()[0]
  figures: dict[str, Any] = {
    'size': arguments.get('size', ''),
    'device': device.device_kind,
    'jax': jax.__version__,
    'date': datetime.date.today().isoformat(),
  }
  try:
    figures['lines'] = FUNCTIONS[kind](options, **arguments)
  except jax.errors.JaxRuntimeError as error:
    # The figures say that the memory is too small, because another attempt
    # would fail again. Other errors end the process.
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    figures['lines'] = [
      accelerator_learner.Line(f'{kind}: too little memory', 0.0)
    ]
  figures['peak'] = (device.memory_stats() or {}).get('peak_bytes_in_use', 0)
  return figures


def _key(options: accelerator_learner.Options) -> dict[str, Any]:
  """Returns the key of figures: a hash of the code, jax's version, the sizes.

  Figures with another key are measured again.
  """
  digest = hashlib.sha256()
  # The package has its configs by a link, which `rglob` does not follow.
  for folder in ('stppo_jax', 'configs', 'benchmarks'):
    for path in sorted((_ROOT / folder).rglob('*.py')):
      digest.update(path.read_bytes())
  return {
    'code': digest.hexdigest()[:12],
    'jax': jax.__version__,
    **options._asdict(),
  }


def _stored(path: pathlib.Path, key: dict[str, Any]) -> dict[str, Any] | None:
  """Returns the figures of a file; None if there are none with this key."""
  if not path.exists():
    return None
  figures = json.loads(path.read_text('utf-8'))
  return figures if figures['key'] == key else None


def measured_in_process(
  name: str, words: Sequence[str]
) -> dict[str, Any] | int:
  """Measures a piece in a new process; returns its figures.

  If the piece fails or takes too long, an exit code for this process is
  returned instead.

  Args:
    name: the name of the piece.
    words: the flags of this process.
  """
  try:
    done = subprocess.run(
      [
        *(sys.executable, '-m', 'benchmarks.accelerator'),
        *(*words, f'--piece={name}'),
      ],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      text=True,
      timeout=_SECONDS,
    )
  except subprocess.TimeoutExpired:
    print(f'{name}: not done after {_SECONDS} s', flush=True)
    return exits.TRY_AGAIN
  if done.returncode:
    print(f'{name}: exit code {done.returncode}', flush=True)
    return exits.BUG
  return json.loads(done.stdout.splitlines()[-1])


def table(found: Sequence[dict[str, Any]]) -> str:
  """Returns a Markdown table of the figures of the measured pieces."""
  everything = [
    (figures, accelerator_learner.Line(*line))
    for figures in found
    for line in figures['lines']
  ]
  limits = {x.program: x for figures, x in everything if not figures['size']}
  rows = []
  for figures, line in everything:
    rate = share = ''
    for amount, limit, unit in (
      (line.operations, limits.get('product'), 'TFLOP/s'),
      (line.bytes, limits.get('copy'), 'TB/s'),
    ):
      if amount:
        rate = f'{amount / line.seconds / 1e12:.3g} {unit}'
        if limit and limit is not line:
          most = (limit.operations or limit.bytes) / limit.seconds
          share = f'{100 * amount / line.seconds / most:.1f} %'
    speed = f'{line.tokens / line.seconds:,.0f}' if line.tokens else ''
    seconds = f'{line.seconds:.3g}' if line.seconds else ''
    peak = f'{figures["peak"] / 2**30:.1f}'
    rows.append(
      (figures['size'], line.program, seconds, speed, rate, share, peak)
    )
  return measure.table(_HEADER, rows)


def _section(found: Sequence[dict[str, Any]]) -> str:
  """Returns the section of docs/benchmarks.md that has these figures."""
  commit = subprocess.run(
    ['git', 'describe', '--always', '--dirty'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
  ).stdout.strip()
  every = lambda name: ', '.join(sorted({figures[name] for figures in found}))
  return (
    f'Measured on {every("date")}: one {every("device")}, jax {every("jax")}, '
    f'commit {commit or "unknown"}.\n\n{table(found)}'
  )


def _refusal(flags: argparse.Namespace, devices: set[str], lacks: str) -> str:
  """Returns the reason to refuse the command, in one line; '' if none.

  Args:
    flags: the flags.
    devices: the kinds of devices on which pieces have been measured.
    lacks: the names of pieces without figures that will not be measured.
  """
  if len(devices) > 1:
    both = ' and '.join(sorted(devices))
    return f'--folder={flags.folder}: has one device, not {both}; name another'
  if flags.write and 'tiny' in flags.sizes:
    return '--write: not with --sizes=tiny, which is no published model'
  if flags.write and 'cpu' in devices:
    return '--write: needs figures of an accelerator, these are of a cpu'
  if flags.write and lacks:
    return f'--write: needs figures of all pieces; use --all; lacks {lacks}'
  return ''


def _flags(words: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.accelerator',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  which = parser.add_mutually_exclusive_group(required=True)
  which.add_argument('--all', action='store_true', help='all kinds of pieces')
  which.add_argument('--only', nargs='+', choices=FUNCTIONS)
  parser.add_argument(
    '--folder', type=pathlib.Path, default=pathlib.Path('figures')
  )
  parser.add_argument('--write', action='store_true')
  parser.add_argument(
    '--sizes',
    nargs='+',
    choices=accelerator_learner.MODELS,
    default=['0.5B', '1.5B'],
  )
  size = measure.positive
  parser.add_argument('--decode_rows', nargs='+', type=size, default=[128, 256])
  for name, default in accelerator_learner.Options()._asdict().items():
    parser.add_argument(f'--{name}', type=size, default=default)
  parser.add_argument('--piece', help=argparse.SUPPRESS)
  return parser.parse_args(words)


def main(arguments: Sequence[str] | None = None) -> int:
  """Measures missing pieces; prints the table of all measured pieces."""
  words = sys.argv[1:] if arguments is None else arguments
  flags = _flags(words)
  options = accelerator_learner.Options(
    *(getattr(flags, name) for name in accelerator_learner.Options._fields)
  )
  folder, every = flags.folder.absolute(), pieces(flags)
  if flags.piece:
    compilation.keep(folder / 'programs')
    print(json.dumps(measured(*every[flags.piece], options)))
    return 0
  key = _key(options)
  found = {name: _stored(folder / f'{name}.json', key) for name in every}
  todo = [
    name
    for name, (kind, _) in every.items()
    if found[name] is None and (flags.all or kind in flags.only)
  ]
  devices = {figures['device'] for figures in found.values() if figures}
  lacks = [x for x in every if found[x] is None and x not in todo]
  if refusal := _refusal(flags, devices, ', '.join(lacks)):
    print(refusal, file=sys.stderr)
    return exits.USAGE
  code = 0
  for name in todo:
    print(f'{name} ...', flush=True)
    figures = measured_in_process(name, [*words, f'--folder={folder}'])
    if isinstance(figures, int):
      code = max(code, figures)
      continue
    figures['key'] = key
    devices.add(figures['device'])
    if refusal := _refusal(flags, devices, ''):
      print(refusal, file=sys.stderr)
      return exits.USAGE
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.replace(folder / f'{name}.json', json.dumps(figures).encode())
    found[name] = figures
  measured_pieces = [figures for figures in found.values() if figures]
  print(table(measured_pieces))
  if flags.write and code:
    print(f'--write: pieces are missing, so {PAGE.name} stays', file=sys.stderr)
  elif flags.write:
    page = page_tables.replaced(
      PAGE.read_text('utf-8'), 'one accelerator', _section(measured_pieces)
    )
    atomic_files.replace(PAGE, page.encode())
  return code


if __name__ == '__main__':
  sys.exit(main())
