"""Export the policy of a run to a directory that transformers and vLLM load.

python -m stppo_jax export --workdir=RUN --out=DIR [--step=N]
    [--dtype=float32|bfloat16] [--model=SOURCE]

  --workdir=RUN  the folder of the run, which may still be in progress
  --out=DIR      gets config.json, the tokenizer, and model.safetensors or
                 several files with an index; it is replaced as a whole, or left
                 as it was
  --step=N       exports the checkpoint of this step, not the newest valid one
  --dtype=TYPE   float32 (the default) or bfloat16
  --model=SOURCE where the directory that was the run's model.path is now

No other input of the run is needed.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import recorded_config
from stppo_jax.workdir import run_folder

DTYPES = ('float32', 'bfloat16')  # keys of `models.hf.export.DTYPES`
_FLAGS = ('workdir', 'out', 'step', 'dtype', 'model')


def main(argv: Sequence[str]) -> int:
  """Exports a policy; returns the exit code."""
  given = configuration.split(argv, _FLAGS)
  flags, errors = given.values, list(given.errors)
  for name in ('workdir', 'out'):
    if not flags.get(name) and name not in given.meant:
      errors.append(f'--{name}: missing')
  dtype, step = flags.get('dtype', DTYPES[0]), flags.get('step')
  if dtype not in DTYPES:
    errors.append(f'--dtype={dtype}: must be one of {", ".join(DTYPES)}')
  if step is not None and not step.isdecimal():
    errors.append(f'--step={step}: must be an integer, 0 or greater')
  config: Any = None
  if flags.get('workdir'):
    try:
      config = recorded_config.read(pathlib.Path(flags['workdir']))
      recorded = config.copy_and_resolve_references()
      problems = recorded_config.prepare_export(config, flags.get('model'))
      hint = '' if flags.get('model') else '; if it has moved: --model=DIR'
      errors += [
        line + hint if line.startswith('config.model.path=') else line
        for line in problems
      ]
      if flags.get('out') and not errors:
        errors += _check_out(recorded, flags)
    except (OSError, ValueError) as error:
      errors.append(f'--workdir={flags["workdir"]}: {error}')
  if errors:
    raise configuration.ConfigurationError(errors)
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.tools import export

  return export.export(
    config.lock(),
    flags['workdir'],
    flags['out'],
    step=None if step is None else int(step),
    dtype=dtype,
  )


def _check_out(config: Any, flags: Mapping[str, str]) -> list[str]:
  """Returns a line if the export would replace what it or the run reads."""
  workdir = pathlib.Path(flags['workdir'])
  folders = {
    **configuration.folders_read(config),
    '--workdir': workdir,
    'the supervised start': workdir / 'start',
  }
  if flags.get('model'):
    folders['--model'] = pathlib.Path(flags['model'])
  return run_folder.problems(
    flags['out'],
    flag='--out',
    command=run_folder.EXPORT,
    reads=folders,
    may_lie_inside=True,
  )
