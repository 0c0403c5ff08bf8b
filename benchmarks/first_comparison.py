"""Measures the time from a clone to token and turn ratios side by side.

    python -m benchmarks.first_comparison

The benchmark runs `make compare` on two cores, in a new folder and without
compiled programs, as after a fresh clone that has its .venv already. Then it
opens the report in Chromium, and waits until the paired differences are seen.
On a machine with other work, the CPU seconds tell how long an idle machine
would have taken: half of them, if both cores were busy all the time.
"""

from collections.abc import Sequence
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

from benchmarks import chromium
from benchmarks import measure

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GOAL = 360  # the most seconds on two cores
_DIFFERENCE = 'section[data-section="Paired differences"] tbody tr'


def report(
  folder: pathlib.Path, *, cores: int, arguments: Sequence[str]
) -> str:
  """Returns the table of the seconds, and the first paired difference.

  Args:
    folder: an empty folder.
    cores: the number of cores in use.
    arguments: further arguments of `ablate`.
  """
  start, before = time.monotonic(), sum(os.times()[2:4])  # CPU of children
  tools = [f'BIN={pathlib.Path(sys.executable).parent}', 'RUNTIME=']
  words = shlex.join([*arguments, f'--workdir={folder}/study'])
  subprocess.run(
    ['make', '--no-print-directory', 'compare', *tools, f'ARGS={words}'],
    cwd=_ROOT,
    env=os.environ | {'JAX_COMPILATION_CACHE_DIR': f'{folder}/compiled'},
    stdout=sys.stderr,
    check=True,
  )
  made = time.monotonic() - start
  with chromium.started() as browser:
    page = browser.new_page()
    page.goto((folder / 'study' / 'report.html').as_uri())
    row = page.locator(_DIFFERENCE).first
    row.wait_for()
    seen, text = time.monotonic() - start, row.inner_text()
  cpu = sum(os.times()[2:4]) - before
  rows = [
    ('the report is written', f'{made:.0f}', ''),
    ('the comparison is seen', f'{seen:.0f}', f'{_GOAL}'),
    ('CPU', f'{cpu:.0f}', f'{cores * _GOAL}'),
  ]
  return f'{measure.table(("until", "seconds", "goal"), rows)}\n\n{text}'


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser('first_comparison')
  parser.set_defaults(cores=2)
  parser.add_argument('arguments', nargs='*', help='flags of ablate, after --')
  flags = measure.start(parser, arguments)
  with tempfile.TemporaryDirectory() as folder:
    print(
      report(pathlib.Path(folder), cores=flags.cores, arguments=flags.arguments)
    )


if __name__ == '__main__':
  main()
