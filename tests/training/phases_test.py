"""The time of a phase is that of its devices, too."""

import time

import jax
import pytest

from stppo_jax.learner import learner as learner_lib
from tests.training import runs

_SECONDS = 0.2


def _slow(x):
  time.sleep(_SECONDS)
  return x


@jax.jit
def _wait_on_device(x):
  return jax.pure_callback(_slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.slow
def test_updates_last_until_the_devices_are_done(tmp_path, monkeypatch):
  update = learner_lib.Learner.update

  def slow_update(*args):
    state, outputs = update(*args)
    skipped = outputs.metrics['update/skipped']
    metrics = outputs.metrics | {'update/skipped': _wait_on_device(skipped)}
    return state, outputs._replace(metrics=metrics)

  monkeypatch.setattr(learner_lib.Learner, 'update', slow_update)
  assert runs.train(tmp_path, num_steps=2, writer__token_details=0) == 0
  line = runs.metrics(tmp_path)[-1]  # of a step that compiles nothing
  assert line['timing_s/update'] > line['update/count'] * _SECONDS
