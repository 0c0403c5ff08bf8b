"""The line of a step: its metrics and the remaining time."""

import io

import rich.console

from stppo_jax.records import progress


def _progress(num_steps, times, *, terminal=False):
  file = io.StringIO()
  console = rich.console.Console(
    file=file, force_terminal=terminal, width=120, highlight=False
  )
  clock = iter(times).__next__
  return progress.Progress(num_steps, console=console, clock=clock), file


def test_a_plain_line_a_step():
  shown, file = _progress(10, [0.0, 5.0, 10.0])
  shown.update(
    1,
    {
      'critic/score/mean': 0.25,
      'perf/throughput': 12345.6,
      'val/em/a': 0.5,
      'val/em/b': 1.0,
    },
  )
  shown.update(2, {'critic/score/mean': 0.5})
  shown.close()
  assert file.getvalue().splitlines() == [
    'step 1/10  reward 0.250  val/em 0.750  12,346 tokens/s  eta 0:00:45',
    'step 2/10  reward 0.500  val/em 0.750  12,346 tokens/s  eta 0:00:40',
  ]


def test_skipped_updates_are_told_where_there_are_some():
  shown, file = _progress(10, [0.0, 5.0, 10.0])
  shown.update(1, {'update/skipped': 0.25})
  shown.update(2, {'update/skipped': 0.0})
  assert file.getvalue().splitlines() == [
    'step 1/10  skipped 25% of the updates  eta 0:00:45',
    'step 2/10  eta 0:00:40',
  ]


def test_a_resumed_run_counts_its_own_steps():
  shown, file = _progress(100, [0.0, 2.0])
  shown.update(51, {})
  assert file.getvalue() == 'step 51/100  eta 0:01:38\n'


def test_before_the_first_step_nothing_is_known_of_the_pace():
  shown, file = _progress(10, [0.0, 6.0])
  shown.update(0, {'val/em/a': 0.125})
  shown.update(1, {})
  assert file.getvalue().splitlines() == [
    'step 0/10  val/em 0.125',
    'step 1/10  val/em 0.125  eta 0:00:54',
  ]


def test_a_terminal_shows_a_bar_and_text_above_it():
  shown, file = _progress(4, [0.0, 1.0], terminal=True)
  shown.update(1, {'critic/score/mean': 0.5})
  shown.show('[bold]not markup[/bold]')
  shown.close()
  assert 'step 1/4  reward 0.500  eta 0:00:03' in file.getvalue()
  assert '[bold]not markup[/bold]' in file.getvalue()
  assert '━' in file.getvalue()
