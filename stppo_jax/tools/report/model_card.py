"""Writes the model card of an exported policy, and pushes it to the Hub."""

from collections.abc import Iterator
import json
import pathlib
import re
import shutil
from typing import Any

from stppo_jax import hub
from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.records import headline
from stppo_jax.records import plots
from stppo_jax.records import scrubbing
from stppo_jax.tools.report import markdown
from stppo_jax.workdir import run_folder

CARD, _CURVE = 'README.md', 'learning_curve.png'
_LICENCE = re.compile(r'^license(?:_name|_link)?: *\S.*$', re.MULTILINE)
# Matches config values that are paths or addresses. A card leaves them out,
# because files and servers of one machine mean nothing on another machine.
_PRIVATE = re.compile('[/~.]|.*://')


def write(
  folder: pathlib.Path,
  workdir: pathlib.Path,
  config: Any,
  step: int,
  *,
  name: str,
  adapters: bool,
) -> None:
  """Adds a model card, a learning curve and licences to an exported policy.

  If the folder already has a card, this card is kept.

  Args:
    folder: the folder of the exported policy.
    workdir: the folder of the run that trained the policy.
    config: the config of the run. Its `model.path` is the model from which the
      run started.
    step: the step of the exported checkpoint.
    name: the name of the model on the Hub.
    adapters: whether the export contains only adapters.
  """
  lines = (workdir / run_folder.METRICS).read_text('utf-8').splitlines()
  metrics = [x for line in lines if (x := json.loads(line))['step'] <= step]
  plots.learning_curve(
    workdir / run_folder.METRICS, folder / _CURVE, title=config.title
  )
  source = hub.local_folder(config.model.path) if config.model.path else None
  for path in source.glob('LICENSE*') if source else ():
    shutil.copyfile(path, folder / path.name)
  if not (folder / CARD).exists():
    text = '\n'.join(
      _lines(config, metrics, source, name, step, adapters=adapters)
    )
    (folder / CARD).write_text(text + '\n', encoding='utf-8')


def _lines(
  config, metrics, source, name, step, *, adapters: bool
) -> Iterator[str]:
  """Yields the lines of a model card."""
  card = source / CARD if source else None
  # The card of the base model may have another encoding than UTF-8, but its
  # lines about the licence are ASCII.
  head = card.read_text('utf-8', 'replace') if card and card.is_file() else ''
  # The metadata of a card is between two lines of three hyphens.
  head = head.split('\n---', 1)[0] if head.startswith('---\n') else ''
  licence = _LICENCE.findall(head)
  repository, commit = hub.split(config.model.path)
  is_named = hub.is_name(config.model.path)
  yield from ('---', *licence)
  if is_named:
    kind = 'adapter' if adapters else 'finetune'
    yield from (f'base_model: {repository}', f'base_model_relation: {kind}')
  yield f'library_name: {"peft" if adapters else "transformers"}'
  yield from ('pipeline_tag: text-generation', 'tags:', '- stppo_jax', '---')
  yield from ('', f'# {markdown.escape(name)}', '')
  start = 'weights that are not on the Hub' if source else 'random weights'
  if is_named:
    start = f'[{repository}](https://huggingface.co/{repository}) at {commit}'
  yield (
    f'The policy after step {step} of {config.num_steps} of '
    f'{markdown.escape(config.title)}, trained from {start} with stppo_jax.'
  )
  if source and not licence:
    yield from ('', 'The licence of the model that it was trained from is not')
    yield 'known: state it before you share this one.'
  yield from ('', '## Data', '')
  names = ('env.name', 'data.name', 'data.train', 'data.evaluation')
  values = settings.flatten(config)
  yield from markdown.table(
    ('key', 'value'),
    [(x, values[x]) for x in (*names, 'data.corpus') if values[x]],
  )
  yield from ('', '## Learning curve', '', f'![Learning curve]({_CURVE})', '')
  scores = {x['step']: headline.mean_score(x) for x in metrics}
  for last, score in [x for x in scores.items() if x[1] is not None][-1:]:
    yield f'The score of the evaluation after step {last} is {score:.3f}.'
  yield from ('', '## Configuration', '')
  yield 'The keys that differ from `configs/base.py`. Files and servers of the'
  yield from ('machine are left out.', '')
  known = base.values()
  values = scrubbing.scrubbed_plain(values)
  yield from markdown.table(
    ('key', 'value'),
    [
      (key, value)
      for key, value in sorted(values.items())
      if value != scrubbing.scrubbed_plain(known).get(key)
      and not _PRIVATE.match(str(value))
    ],
  )


def push(folder: pathlib.Path, name: str, *, yes: bool) -> None:
  """Pushes an export to the Hub; without `yes`, prints what would be pushed.

  Raises:
    HubError: the Hub is out of reach, or refuses the files.
  """
  names = [
    path.name
    for path in sorted(folder.iterdir())
    if path.is_file() and path.name not in run_folder.MARKS
  ]
  if yes:
    print(f'pushed: {hub.push(folder, names, name)}')
    return
  for file in names:
    print(f'would push {file}: {(folder / file).stat().st_size:,} bytes')
  print(
    f'to {hub.address(name)} (if this repository is new, it is made private). '
    f'Look at {folder / CARD}, then repeat the command with --yes'
  )
