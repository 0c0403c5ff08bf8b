"""The first steps of a run, in which only the value model learns."""

import pytest

from tests.training import runs

_CHANGES = {
  'loss__value_warmup_steps': 9,
  'loss__value_warmup_patience': 2,
  'evaluate__every': 0,
}


@pytest.mark.slow
def test_the_warmup_ends_early_and_at_the_same_step_in_a_resumed_run(
  tmp_path,
):
  assert runs.train(tmp_path, **_CHANGES, num_steps=2) == 0
  assert runs.train(tmp_path, **_CHANGES, num_steps=4) == 0
  lines = runs.metrics(tmp_path)
  # These dialogues earn nothing, so there is nothing to explain, and the
  # explained variance has not risen for two steps before the updates of step 3.
  assert [line['critic/vf_explained_var'] for line in lines[:3]] == [0, 0, 0]
  moved = [line['critic/kl_per_trajectory'] != 0 for line in lines]
  assert moved == [False, False, False, True]


@pytest.mark.slow
def test_a_resumed_run_may_have_a_shorter_warmup(tmp_path):
  changes = _CHANGES | {'loss__value_warmup_patience': 0}
  assert runs.train(tmp_path, **changes, num_steps=2) == 0
  changes |= {
    'loss__value_warmup_steps': 2,
    'resume__allow_change': ('loss.value_warmup_steps',),
  }
  assert runs.train(tmp_path, **changes, num_steps=4) == 0
  lines = runs.metrics(tmp_path)
  moved = [line['critic/kl_per_trajectory'] != 0 for line in lines]
  assert moved == [False, False, False, True]
