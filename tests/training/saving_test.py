"""A run that a signal ends begins no save for which there is no time."""

import signal

import pytest

from tests.training import faults
from tests.training import runs

# Orbax reads the leaves concurrently; see checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.mark.slow
def test_no_save_is_begun_after_the_grace_seconds(tmp_path, capsys):
  alarm = {'finish_ratio': 2.0, 'stop': ('finish_ratio',), 'stop_after': 1}
  alarm = {f'alarms__{key}': value for key, value in alarm.items()}
  for moment, changes, code, said in (
    # Its save has begun, and is waited for.
    (('collect', 3), {}, 75, 'interrupted after step 2, saved'),
    (('collect', 2), {}, 75, 'interrupted after step 3, not saved: the last'),
    # An alarm ends the run before it knows of the signal.
    (('updated', 1), alarm, 76, 'step 3 is not saved: the last save took'),
  ):
    changes |= {
      'num_steps': 4,
      'checkpoint__every': 2,
      'evaluate__every': 0,
      'preemption__grace': 1e-6,
    }
    with faults.at(
      runs.config(**changes), faults.send_at(moment, signal.SIGTERM)
    ):
      assert runs.train(tmp_path, **changes) == code
    output = capsys.readouterr()
    assert said in output.out
    assert 'Traceback' not in output.err
    saved = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
    assert saved == ['2']
