"""A tracker gets every step; if it fails or hangs, the run goes on."""

import json
import pathlib
import queue
import sys
import threading
import types

import pytest

from stppo_jax.records import progress
from stppo_jax.records import scrubbing
from stppo_jax.records import trackers
from stppo_jax.records import writer as writer_lib

_IDENTITY = trackers.Identity(
  title='quickstart: st_ppo, seed 0',
  run_id='abc',
  folder=pathlib.Path('.'),
  config={
    'seed': 3,
    'lora': False,
    'model.tokenizer_path': 'a/tokenizer',
    'retrieval.url': 'http://me:hush@host/',
    'servers': ('run --api-key hush', 'http://host/?token=hush&n=1'),
  },
)


class _Experiment:
  """Stands for an experiment of a package that is not installed here."""

  def __init__(self, *, fails=(), waits_for=None):
    self.logged, self.finished = {}, False
    self._fails, self._waits_for = fails, waits_for

  def log(self, metrics, step):
    if self._waits_for is not None:
      self._waits_for.wait()
    if step in self._fails:
      raise ConnectionError(f'step {step} was not sent')
    self.logged[step] = metrics

  def finish(self):
    self.finished = True


def _tracker(monkeypatch, experiment):
  monkeypatch.setitem(trackers.TRACKERS, 'wandb', lambda identity: experiment)
  return trackers.Tracker('wandb', _IDENTITY)


def test_every_step_arrives_in_order(monkeypatch):
  experiment = _Experiment()
  tracker = _tracker(monkeypatch, experiment)
  for step in range(5):
    tracker.write(step, {'actor/entropy': step / 2})
  tracker.close()
  assert experiment.finished
  assert experiment.logged == {n: {'actor/entropy': n / 2} for n in range(5)}
  unused = _tracker(monkeypatch, experiment)
  unused.close()


def test_errors_are_counted_and_the_run_goes_on(monkeypatch, tmp_path, caplog):
  experiment = _Experiment(fails=(1,))
  tracker = _tracker(monkeypatch, experiment)
  writer = writer_lib.Writer(
    tmp_path,
    display=progress.Progress(2),
    tensorboard=False,
    trajectories=0,
    trackers=[tracker],
  )
  writer.write(1, {'actor/entropy': 1.0})
  tracker.close()  # Now it has raised its error.
  assert experiment.finished
  writer.write(2, {'actor/entropy': 1.0})
  writer.close()
  lines = (tmp_path / 'metrics.jsonl').read_text('utf-8').splitlines()
  errors = [json.loads(line)['writer/sink_errors'] for line in lines]
  assert errors == [0, 1]
  assert 'cannot write wandb, the run goes on' in caplog.text
  assert 'step 1 was not sent' in caplog.text


def test_a_package_that_is_missing_is_an_error_of_the_tracker(monkeypatch):
  monkeypatch.setitem(sys.modules, 'trackio', None)
  tracker = trackers.Tracker('trackio', _IDENTITY)
  tracker.write(1, {})
  tracker.close()
  with pytest.raises(ModuleNotFoundError, match='trackio'):
    tracker.write(2, {})


def test_wandb_is_shut_down_before_it_goes_offline(monkeypatch, caplog):
  calls = []

  def init(*, mode, **_):
    # As wandb does: the id of a run that failed to open stays in use.
    calls.append(mode)
    if mode == 'online' or calls[-2:] == ['online', 'offline']:
      raise ConnectionError('out of reach')
    return _Experiment()

  fake = types.SimpleNamespace(
    init=init,
    teardown=lambda: calls.append('teardown'),
    Settings=lambda **_: None,
  )
  monkeypatch.setitem(sys.modules, 'wandb', fake)
  monkeypatch.setenv('WANDB_API_KEY', 'x')
  monkeypatch.delenv('WANDB_MODE', raising=False)
  tracker = trackers.Tracker('wandb', _IDENTITY)
  tracker.write(1, {})
  tracker.close()
  tracker.write(2, {})  # It would raise an error of the tracker.
  assert calls == ['online', 'teardown', 'offline']
  assert 'wandb cannot be reached' in caplog.text


def test_a_tracker_that_hangs_holds_up_nothing(monkeypatch):
  hangs = threading.Event()
  tracker = _tracker(monkeypatch, _Experiment(waits_for=hangs))
  with pytest.raises(queue.Full):
    for step in range(2000):
      tracker.write(step, {})
  tracker.close(patience=0.01)
  other = _tracker(monkeypatch, _Experiment(waits_for=hangs))
  other.write(1, {})
  other.close(patience=0.01)
  hangs.set()


def test_what_leaves_the_machine_has_no_secrets():
  assert scrubbing.scrubbed_plain(_IDENTITY.config) == {
    'seed': 3,
    'lora': False,
    'model.tokenizer_path': 'a/tokenizer',
    'retrieval.url': 'http://***@host/',
    'servers': "('run --api-key ***', 'http://host/?token=***&n=1')",
  }
