"""Measures the report of a long run.

    python -m benchmarks.report

A run of 500 steps with 5,000 dialogues is made up. Its records have numbers for
each token, such as ratios and advantages. Its report is written, and opened in
Chromium if Chromium and the package playwright are installed.
"""

from collections.abc import Sequence
import contextlib
import io
import pathlib
import tempfile
import time
from typing import Any

from benchmarks import chromium
from benchmarks import made_runs
from benchmarks import measure
from stppo_jax import __main__

_MEGABYTE = 1e6
_GOALS = {'seconds': 30, 'MB': 25, 'loading': 3.0}


def write_report(folder: pathlib.Path, page: pathlib.Path) -> float:
  """Writes the report of a run; returns the seconds that it took."""
  start = time.perf_counter()
  with contextlib.redirect_stdout(io.StringIO()):
    code = __main__.main(['report', str(folder), f'--out={page}'])
  assert code == 0
  return time.perf_counter() - start


def load(browser: Any, page: pathlib.Path) -> tuple[float, float]:
  """Returns the seconds until dialogues are shown, and the search's seconds."""
  opened = browser.new_page()
  start = time.perf_counter()
  opened.goto(page.resolve().as_uri() + '#tab=dialogues')
  opened.wait_for_selector('#detail[data-number="0"]')
  shown = time.perf_counter() - start
  start = time.perf_counter()
  opened.fill('#filter-text', 'no dialogue has these words')
  opened.get_by_text('0 of ').wait_for()
  searched = time.perf_counter() - start
  opened.close()
  return shown, searched


def pages(steps: int, dialogues: int, tokens: int) -> list[str]:
  """Returns the lines about the report of a run.

  Args:
    steps: the number of steps of the run.
    dialogues: the number of dialogues of a step.
    tokens: the number of policy tokens of a turn.
  """
  with tempfile.TemporaryDirectory() as name:
    folder = made_runs.make(
      pathlib.Path(name, 'run'),
      steps=steps,
      dialogues=dialogues,
      tokens=tokens,
      detailed=dialogues,
      questions=steps,
    )
    page = pathlib.Path(name, 'report.html')
    seconds = write_report(folder, page)
    size = page.stat().st_size / _MEGABYTE
    lines = [
      f'{steps} steps, {steps * dialogues:,} dialogues, {tokens} tokens a '
      f'turn: report in {seconds:.1f} s (goal {_GOALS["seconds"]}), '
      f'{size:.1f} MB (goal {_GOALS["MB"]})'
    ]
    try:
      with chromium.started() as browser:
        shown, searched = load(browser, page)
    except chromium.Missing as missing:
      return [*lines, f'not opened: {missing}']
    return [
      *lines,
      f'dialogues shown after {shown:.2f} s (goal {_GOALS["loading"]}), all '
      f'texts searched in {searched:.2f} s',
    ]


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser('report', steps=500, dialogues=10, tokens=64)
  flags = measure.start(parser, arguments)
  print('\n'.join(pages(flags.steps, flags.dialogues, flags.tokens)))


if __name__ == '__main__':
  main()
