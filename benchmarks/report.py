"""Measures the report of a long run, and the cost of records.

    python -m benchmarks.report

A run of 500 steps with 5,000 dialogues is made up, whose tokens all have
numbers. Its report is written, and opened in Chromium if that and the package
playwright are installed.

Then the quickstart trains some steps and writes all of its dialogues. What
records cost is compared with the median step; the first two steps, which
compile, are left out. The records are the numbers of tokens, the files of
dialogues and metrics, and the measures of ratios and clipping at all levels.
The last ones are part of the updates: the policy loss of a microbatch of random
numbers is timed with and without them.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import functools
import io
import pathlib
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import batches
from benchmarks import chromium
from benchmarks import made_runs
from benchmarks import measure
from benchmarks import same_numbers
from stppo_jax import __main__
from stppo_jax.configs import quickstart
from stppo_jax.learner import cpu_parallel
from stppo_jax.records import trajectory_metrics
from stppo_jax.records import writer as writer_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics

_MEGABYTE = 1e6
_GOALS = {'seconds': 30, 'MB': 25, 'loading': 3.0, 'records': 0.03}
_COMPILES = 2  # steps that are not counted


def write_report(folder: pathlib.Path, page: pathlib.Path) -> float:
  """Writes the report of a run; returns the seconds that it took."""
  start = time.perf_counter()
  with contextlib.redirect_stdout(io.StringIO()):
    code = __main__.main(['report', str(folder), f'--out={page}'])
  assert code == 0
  return time.perf_counter() - start


def load(browser: Any, page: pathlib.Path) -> tuple[float, float]:
  """Returns the seconds until dialogues are shown, and of a search in them."""
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


def recording_seconds(
  folder: pathlib.Path, words: Sequence[str]
) -> tuple[float, float, float]:
  """Trains; returns the seconds of a step, of token numbers and of writing.

  Args:
    folder: an empty folder for the run.
    words: flags of `train`.
  """
  with contextlib.ExitStack() as stack:
    writing = [
      stack.enter_context(_timed(owner, name))
      for owner, name in (
        (trajectory_metrics, 'records'),
        (writer_lib.Writer, 'write'),
        (writer_lib.Writer, 'write_trajectories'),
      )
    ]
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    code = __main__.main(['train', *words, f'--workdir={folder}'])
  assert code == 0
  lines = same_numbers.json_lines(folder / 'metrics.jsonl')[_COMPILES:]
  step = statistics.median(line['timing_s/step'] for line in lines)
  tokens = statistics.median(line['timing_s/token_details'] for line in lines)
  calls = zip(*writing, strict=True)  # one of each in a step
  return step, tokens, statistics.median([*map(sum, calls)][_COMPILES:])


@contextlib.contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
  """Yields the seconds of each call of a function in this context."""
  function, seconds = getattr(owner, name), []

  def timed(*arguments, **options):
    start = time.perf_counter()
    result = function(*arguments, **options)
    seconds.append(time.perf_counter() - start)
    return result

  with mock.patch.object(owner, name, timed):
    yield seconds


def measuring_seconds(config: Any) -> float:
  """Returns the seconds of a step in which its updates measure ratios.

  Args:
    config: the config of a run on the cores of a CPU (`updates.core_rows`).
  """
  rows = config.updates.core_rows
  batch, logprobs_BL, entropy_BL = batches.token_batch(
    rows=rows, length=config.env.max_length, num_turns=config.env.max_turns
  )
  algorithm = algorithm_lib.build_algorithm(config.algorithm)
  num_turns = config.env.max_turns + 1

  def gradient(measures, logprobs_BL, entropy_BL, batch):
    def loss(logprobs_BL):
      result = batches.policy_loss(
        algorithm,
        logprobs_BL,
        entropy_BL,
        batch,
        entropy_coefficient=0.0,
        num_turns=num_turns,
      )
      if not measures:
        return result.loss, None
      return result.loss, diagnostics.policy_diagnostics(
        algorithm, result, logprobs_BL, entropy_BL, batch, num_turns=num_turns
      )

    return jax.value_and_grad(loss, has_aux=True)(logprobs_BL)

  arguments = jax.device_put((logprobs_BL, entropy_BL, batch))
  cases = {
    name: measure.compiled(
      functools.partial(gradient, name == 'with'), *arguments
    ).case(*arguments)
    for name in ('with', 'without')
  }
  seconds = measure.interleave(cases, repeats=measure.MIN_REPEATS)
  extra = float(np.median(seconds['with']) - np.median(seconds['without']))
  microbatches = (
    config.rollout.trajectories_per_step * config.updates.num_epochs / rows
  )
  of_minibatch = config.updates.minibatch_size // rows
  workers = min(cpu_parallel.num_cores(), of_minibatch)
  return extra * microbatches / workers


def pages(steps: int, dialogues: int, tokens: int) -> list[str]:
  """Returns the lines about the report of a run.

  Args:
    steps: the steps of the run.
    dialogues: the dialogues of a step.
    tokens: the policy tokens of a turn.
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


def records(words: Sequence[str]) -> str:
  """Returns the line about the cost of records.

  Args:
    words: flags of `train`, for the quickstart.
  """
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name, 'run')
    step, tokens, writing = recording_seconds(folder, words)
    # Here, because its programs are kept in the folder of the run.
    measures = measuring_seconds(quickstart.get_config())
  parts = {
    'numbers of tokens': tokens,
    'writing': writing,
    'measures of all levels': measures,
  }
  texts = [
    f'{name} {1e3 * seconds:.1f} ms ({seconds / step:.1%})'
    for name, seconds in parts.items()
  ]
  return (
    f'a step of {step:.2f} s: {", ".join(texts)}; together '
    f'{sum(parts.values()) / step:.1%} (goal {_GOALS["records"]:.0%})'
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'report', steps=500, dialogues=10, tokens=64, train_steps=12
  )
  flags = measure.start(parser, arguments)
  print('\n'.join(pages(flags.steps, flags.dialogues, flags.tokens)))
  words = [
    '--config=configs/quickstart.py',
    f'--config.num_steps={flags.train_steps}',
    '--config.evaluate.every=0',
    '--config.writer.trajectories=128',  # all
  ]
  print(records(words))


if __name__ == '__main__':
  main()
