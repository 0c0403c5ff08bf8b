"""Build, list, show and demonstrate data sets of questions.

python -m stppo_jax data build NAME --root=DIR [--mirror=URL] [--force]
    [--from_files=FOLDER | --from_files=SPLIT:FILE,...]
python -m stppo_jax data list [--root=DIR]
python -m stppo_jax data show NAME[:SPLIT]|FILE [--root=DIR] [--rows=N]
    [--start=N]
python -m stppo_jax data demonstrate --config=FILE.py [--config.KEY=VALUE ...]
    [--rows=N]

build fetches the files of a published data set, or takes the files that you
have, and writes the data set to DIR, from which runs with data.name=tfds read
it. list prints the data sets that can be built and the data sets in DIR. show
prints questions of a data set or of a file. demonstrate prints, as JSON lines,
the dialogues that sft imitates. sft.demonstrations can name a file of such
lines. docs/data.md has more.

  --root=DIR          the folder of the data sets
  --from_files=FILES  the files to read: a folder or an archive with the
                      originals, or a file for each split, such as
                      train:FILE,test:FILE
  --mirror=URL        fetches the originals from this folder of the web
  --force             builds a data set again that is there already
  --rows=N            the number of questions or dialogues that are printed, 3
                      by default
  --start=N           the first question that is shown, 0 by default
  --config=FILE.py    the config, as for sft
  --config.KEY=VALUE  sets a key of the config
"""

from collections.abc import Sequence
import pathlib

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.tools import data_sets

_MISSING = '{} must come before the flags'


def main(argv: Sequence[str]) -> int:
  """Runs the subcommand `argv[0]`; returns its exit code."""
  subcommands = {
    'build': _build,
    'list': _list,
    'show': _show,
    'demonstrate': _demonstrate,
  }
  name = command_line.subcommand('data', argv, subcommands)
  with exits.as_misconfigured():
    subcommands[name](argv[1:])
  return 0


def _build(argv: Sequence[str]) -> None:
  flags = command_line.flags(root='', from_files='', mirror='', force=False)
  given = command_line.parse(
    flags, argv, words=1, missing=_MISSING.format('a name'), required=('root',)
  )
  command_line.refuse(given.errors)
  data_sets.build(
    pathlib.Path(flags.root),
    *given.words,
    from_files=flags.from_files,
    mirror=flags.mirror,
    force=flags.force,
  )


def _list(argv: Sequence[str]) -> None:
  flags = command_line.flags(root='')
  errors = command_line.parse(flags, argv).errors
  if flags.root and not pathlib.Path(flags.root).is_dir():
    errors.append(f'--root={flags.root}: no such folder')
  command_line.refuse(errors)
  data_sets.show_all(pathlib.Path(flags.root) if flags.root else None)


def _show(argv: Sequence[str]) -> None:
  flags = command_line.flags(
    root='',
    rows=command_line.integer(3, lower_bound=1),
    start=command_line.integer(0, lower_bound=0),
  )
  given = command_line.parse(
    flags, argv, words=1, missing=_MISSING.format('a data set or a file')
  )
  command_line.refuse(given.errors)
  root = pathlib.Path(flags.root) if flags.root else None
  data_sets.show(root, *given.words, start=flags.start, count=flags.rows)


def _demonstrate(argv: Sequence[str]) -> None:
  flags = command_line.flags(rows=command_line.integer(3, lower_bound=1))
  config = configuration.parse(argv, flags=flags)
  data_sets.demonstrate(config, count=flags.rows)
