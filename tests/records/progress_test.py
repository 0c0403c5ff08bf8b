"""The line of a step: its metrics and the remaining time."""

import contextlib
import io
import os

import rich.console

from stppo_jax.records import progress


def _progress(num_steps, times, *, terminal=False):
  file = io.StringIO()
  console = rich.console.Console(
    file=file, force_terminal=terminal, width=120, highlight=False
  )
  clock = iter(times).__next__
  return progress.Progress(num_steps, console=console, clock=clock), file


def test_a_line_shows_what_was_measured_in_its_step():
  shown, file = _progress(10, [60.0, 65.0, 70.0])
  shown.update(0, {'val/em/a': 0.125})
  shown.update(
    1,
    {
      'critic/score/mean': 0.25,
      'actor/entropy': 1.25,
      'critic/kl': -0.00001,
      'actor/pg_clipfrac': 0.5,
      'num_turns/mean': 2.0,
      'perf/throughput': 12345.6,
    },
  )
  scores = {'val/em/a': 0.5, 'val/em/b': 1.0}
  shown.update(2, scores | {'critic/score/mean': 0.5, 'update/skipped': 0.25})
  shown.update(3, {})
  shown.close()
  assert file.getvalue().splitlines() == [
    'step 0/10  val/em 0.125',
    'step 1/10  reward 0.250  entropy 1.250  kl 0.000  clipped 0.500  '
    'turns 2.000  12,346 tokens/s',
    # The first step compiles: it does not count.
    'step 2/10  val/em 0.750  reward 0.500  skipped 25% of the updates  '
    'eta 0:00:40',
    'step 3/10  eta 0:00:35',
  ]


def test_a_resumed_run_counts_its_own_steps():
  shown, file = _progress(100, [20.0, 22.0])
  shown.update(51, {})
  shown.update(52, {})
  assert file.getvalue() == 'step 51/100\nstep 52/100  eta 0:01:36\n'


def test_a_terminal_shows_a_bar_with_the_phase_and_a_log_does_not():
  for terminal in (True, False):
    shown, file = _progress(10, [5.0], terminal=terminal)
    shown.enter_phase('update')
    shown.enter_phase('')
    shown.update(1, {'critic/score/mean': 0.25})
    shown.show('[bold]not markup[/bold]')
    shown.close()
    text = file.getvalue()
    assert 'step 1/10  reward 0.250' in text and '[bold]not markup' in text
    assert ('update' in text) == ('━' in text) == terminal


def test_a_console_that_is_lost_does_not_end_the_run(caplog):
  for kind in ('pipe', 'full'):
    if kind == 'pipe':
      reader, writer = os.pipe()
      os.close(reader)
    else:
      writer = os.open('/dev/full', os.O_WRONLY)
    with (
      open(writer, 'w', encoding='utf-8') as file,
      contextlib.redirect_stdout(file),
    ):
      shown = progress.Progress(2)
      shown.update(1, {})
      shown.show('more')
      shown.update(2, {})
      shown.close()
  first, second = [record.getMessage() for record in caplog.records]
  assert first.endswith('the run goes on: Broken pipe')
  assert second.endswith('the run goes on: No space left on device')
