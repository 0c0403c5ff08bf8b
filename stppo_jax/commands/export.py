"""Export the policy of a run to a directory that transformers and vLLM load.

python -m stppo_jax export --workdir=RUN --out=DIR [--step=N]
    [--dtype=float32|bfloat16] [--model=SOURCE] [--adapters]
    [--push_to_hub=ORG/NAME [--yes]]

  --workdir=RUN  the folder of the run, also in a bucket; it may still be in
                 progress
  --out=DIR      gets config.json, the tokenizer, and model.safetensors or
                 several files with an index; it is replaced as a whole, or left
                 as it was
  --step=N       exports the checkpoint of this step, not the newest valid one
  --dtype=TYPE   float32 (the default) or bfloat16
  --model=SOURCE where the directory that was the run's model.path is now
  --adapters     writes the adapters of a run with model.lora.rank alone, as
                 PEFT does, and not merged with the weights below them
  --push_to_hub=ORG/NAME
                 adds a model card to DIR, made from the run, and prints which
                 files would be pushed to this model of the Hugging Face Hub
  --yes          pushes them

Besides the folder of the run, the export needs the directories that the keys
model.path and model.tokenizer_path of the run name. If the run made its
tokenizer from its data, the export needs the data, too.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax import hub
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.tools import checkpoints
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import recorded_config
from stppo_jax.workdir import run_folder
from stppo_jax.workdir import run_record

DTYPES = ('float32', 'bfloat16')  # keys of `models.hf.export.DTYPES`


def main(argv: Sequence[str]) -> int:
  """Exports a policy; returns the exit code."""
  flags = command_line.flags(
    workdir='',
    out='',
    step=command_line.integer(lower_bound=0),
    dtype=command_line.one_of(DTYPES, DTYPES[0]),
    model=None,
    adapters=False,
    push_to_hub='',
    yes=False,
  )
  errors = command_line.parse(flags, argv, required=('workdir', 'out')).errors
  name = flags.push_to_hub
  if name and ('@' in name or not hub.split(name)[0]):
    errors.append(f'--push_to_hub={name}: must be a name such as org/name')
  if flags.yes and not name:
    errors.append('--yes: needs --push_to_hub, which says where to push')
  config: Any = None
  if flags.workdir:
    try:
      workdir = bucket_files.opened(flags.workdir)
      config = recorded_config.read(workdir)
      recorded = config.copy_and_resolve_references()
      problems = recorded_config.prepare_export(config, flags.model)
      source = typed = f'config.model.path={config.model.path!r}'
      hint = '; if it has moved: --model=DIR'
      if flags.model:
        typed, hint = f'--model={flags.model}', ''
      errors += [
        typed + line.removeprefix(source) + hint
        if line.startswith(source)
        else line
        for line in problems
      ]
    except (OSError, ValueError) as error:
      errors.append(f'--workdir={flags.workdir}: {error}')
    else:
      if flags.adapters and not config.model.lora.rank:
        errors.append(
          f'--adapters: the run in {flags.workdir} has none, model.lora.rank=0'
        )
      errors = errors or _out_problems(flags, recorded, workdir)
  command_line.refuse(errors)
  place, out = bucket_files.opened(flags.workdir), pathlib.Path(flags.out)
  what = {'step': flags.step, 'dtype': flags.dtype, 'adapters': flags.adapters}
  if not name:
    return checkpoints.export(config.lock(), place, out, **what)
  # Imported late, because this import loads the library for plots.
  from stppo_jax.tools.report import model_card

  def card(policy: Any) -> None:
    model_card.write(
      out,
      place,
      policy.config,
      policy.step,
      name=name,
      adapters=flags.adapters,
    )

  checkpoints.export(config.lock(), place, out, also=card, **what)
  model_card.push(out, name, yes=flags.yes)
  return 0


def _out_problems(flags: Any, config: Any, workdir: pathlib.Path) -> list[str]:
  """Returns the error lines of --out; [] if the export may write there."""
  folders = configuration.folders_read(config) | {
    '--workdir': workdir,
    'the supervised start': (
      run_record.made_start(workdir) or workdir / 'start'
    ),
  }
  if flags.model:
    folders['--model'] = pathlib.Path(flags.model)
  return run_folder.problems(
    flags.out,
    flag='--out',
    command=run_folder.EXPORT,
    reads=folders,
    may_lie_inside=True,
  )
