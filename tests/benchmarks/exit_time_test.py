"""The benchmark of exits sends its signal when it says, and sees the end."""

import pytest

from benchmarks import exit_time
from tests.training import runs


def test_a_signal_during_an_import_ends_at_once(tmp_path):
  end = exit_time.measure('first_imports', tmp_path)
  assert end.exit_code == 75 and end.problem == '' and end.seconds > 0


@pytest.mark.slow
def test_a_run_that_never_comes_to_the_moment_is_wrong(tmp_path):
  flags = runs.flags(num_steps=1, evaluate__every=0)[1:]
  end = exit_time.measure('save', tmp_path, flags)
  assert end.exit_code == 0 and end.problem.startswith('exit code 0: ')
  assert not end.seconds <= 1000  # nan


@pytest.mark.slow
@pytest.mark.parametrize(
  'moment', ['first_compilation', 'first_update', 'first_save']
)
def test_a_run_that_compiles_ends_and_loses_nothing(tmp_path, moment):
  """The benchmark measures the seconds, on an idle machine."""
  end = exit_time.measure(moment, tmp_path)
  assert end.exit_code == 75 and end.problem == ''
  saved = list((tmp_path / 'run' / 'checkpoints').glob('[0-9]'))
  assert [path.name for path in saved] == ['2'] * (moment == 'first_save')
