"""Build, list and show data sets of questions.

python -m stppo_jax data build NAME --root=DIR [--mirror=URL] [--force]
    [--from_files=FOLDER | --from_files=SPLIT:FILE,...]
python -m stppo_jax data list [--root=DIR]
python -m stppo_jax data show NAME[:SPLIT]|FILE [--root=DIR] [--rows=N]
    [--start=N]

build fetches the files of a published data set, or takes those that you have,
and writes the data set to DIR, from which runs with data.name=tfds read it.
list prints the data sets that can be built and those in DIR, show prints
questions of a data set or of a file. docs/data.md has more.

  --root=DIR          the folder of the data sets
  --from_files=FILES  the files to read: a folder or an archive with the
                      originals, or a file for each split, such as
                      train:FILE,test:FILE
  --mirror=URL        fetches the originals from this folder of the web
  --force             builds a data set again that is there already
  --rows=N            the number of questions that are shown, 3 by default
  --start=N           the first of them, 0 by default
"""

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib

from stppo_jax import settings
from stppo_jax import streams
from stppo_jax import types
from stppo_jax.commands.flags import configuration
from stppo_jax.data import building
from stppo_jax.data import layout
from stppo_jax.data import mixtures
from stppo_jax.data import published
from stppo_jax.data import readers
from stppo_jax.data import tables

_SHOWN_NOTES = 5


def main(argv: Sequence[str]) -> int:
  """Runs the subcommand `argv[0]`; returns its exit code."""
  if not argv or argv[0] not in _COMMANDS:
    name = argv[0] if argv else ''
    problem = f'data {name}: unknown command' if name else 'data: no command'
    choices = settings.closest(name, list(_COMMANDS))
    raise configuration.ConfigurationError([problem + choices])
  try:
    return _COMMANDS[argv[0]](argv[1:])
  except (OSError, ValueError) as error:
    raise configuration.ConfigurationError([str(error)]) from error


def _build(argv: Sequence[str]) -> int:
  """Builds a data set."""
  name, flags = _split(
    argv, ('root', 'from_files', 'mirror'), ('force',), needs='a name'
  )
  values, root = flags.values, _root(flags)
  if name in layout.names(root) and 'force' not in flags.switches:
    raise ValueError(f'{name}: built already in {root}; --force builds it anew')
  notes: list[str] = []
  with streams.logged():
    summary = building.build(
      root,
      name,
      from_files=values.get('from_files', ''),
      mirror=values.get('mirror', ''),
      note=notes.append,
    )
  for note in notes[:_SHOWN_NOTES]:
    print(f'note: {note}')
  if len(notes) > _SHOWN_NOTES:
    print(f'note: ... and {len(notes) - _SHOWN_NOTES} more such lines')
  print(f'{name}: {layout.folder(root, name)}')
  for split, size in summary.sizes.items():
    print(f'  {split}: {size:,} questions, sha256 {summary.checksums[split]}')
  if layout.corpus(root, name).is_file():
    print(f'  passages: {layout.corpus(root, name)}')
  return 0


def _list(argv: Sequence[str]) -> int:
  """Lists the data sets that can be built, and those that are."""
  flags = configuration.split(argv, ('root',))
  _raise_if(flags.errors)
  root = _root(flags) if 'root' in flags.values else None
  there = layout.names(root) if root else []
  for name in [*published.PUBLISHED, *there]:
    if name in published.PUBLISHED:
      entry = published.PUBLISHED[name]
      source = entry.home
      if not all(original.url for original in entry.originals):
        source += ', needs --from_files'
      print(f'{name:16} {entry.title}; {entry.licence}; {source}')
    elif name in there:
      print(name)
    if root and name in there:
      from stppo_jax.data import built

      summary = built.summary(root, name)
      for split, size in summary.sizes.items():
        digest = summary.checksums[split]
        print(f'{"":16}   {split}: {size:,} questions, sha256 {digest}')
  return 0


def _show(argv: Sequence[str]) -> int:
  """Prints questions as a person reads them."""
  name, flags = _split(
    argv, ('root', 'rows', 'start'), (), needs='a data set or a file'
  )
  numbers = {'rows': 3, 'start': 0}
  for key in numbers:
    text = flags.values.get(key, str(numbers[key]))
    if not text.isdecimal():
      raise ValueError(f'--{key}={text}: must be a number, 0 or greater')
    numbers[key] = int(text)
  questions = _questions(name, flags)
  start = numbers['start']
  last = min(start + numbers['rows'], len(questions))
  print(f'{name}: {len(questions):,} questions')
  for number in range(start, last):
    print('\n' + streams.escape(_page(number, questions[number])))
  return 0


def _questions(
  name: str, flags: configuration.Flags
) -> Sequence[types.Question]:
  """Returns the questions of a file, or of a split that was built."""
  if pathlib.Path(name).suffix in (*tables.SUFFIXES, '.gz'):
    return readers.read_questions(name)
  (element,) = mixtures.parse(name)
  from stppo_jax.data import built

  splits = [element.split] if element.split else published.SPLITS
  return built.open_split(_root(flags), element.name, splits)


def _page(number: int, question: types.Question) -> str:
  """Returns a question as text."""
  lines = [f'[{number}] {question.data_set} {question.id}', question.text]
  lines += [f'  {key}. {text}' for key, text in question.options.items()]
  lines.append('= ' + ' | '.join(question.golden_answers))
  if question.hops:
    lines.append(f'hops: {question.hops}')
  if question.gold_passages:
    lines.append('gold passages: ' + ', '.join(question.gold_passages))
  return '\n'.join(lines)


def _split(
  argv: Sequence[str],
  known: Sequence[str],
  switches: Sequence[str],
  *,
  needs: str,
) -> tuple[str, configuration.Flags]:
  """Returns the argument before the flags, and the flags."""
  name = '' if not argv or argv[0].startswith('--') else argv[0]
  flags = configuration.split(argv[bool(name) :], known, switches=switches)
  missing = [] if name else [f'{needs} must come before the flags']
  _raise_if([*flags.errors, *missing])
  return name, flags


def _root(flags: configuration.Flags) -> pathlib.Path:
  if not flags.values.get('root'):
    raise ValueError('--root: missing; the folder of the data sets')
  return pathlib.Path(flags.values['root'])


def _raise_if(errors: Sequence[str]) -> None:
  if errors:
    raise configuration.ConfigurationError(list(errors))


_COMMANDS: Mapping = {'build': _build, 'list': _list, 'show': _show}
