"""The scripted policy keeps the promises of the engine."""

import numpy as np
import pytest

from stppo_jax.sampling import scripted


def _ids(*values):
  return np.array(values, np.int32)


def _begun(scripts, prompts, *, max_length, group_size=1, max_turn_tokens=9):
  engine = scripted.ScriptedEngine(scripts, max_length=max_length)
  engine.begin(prompts, group_size=group_size, max_turn_tokens=max_turn_tokens)
  return engine


def _poll(engine):
  return {row: x.token_ids.tolist() for row, x in engine.poll().items()}


def test_each_row_plays_its_own_script_at_its_own_pace():
  engine = _begun(
    [[_ids(1, 2), _ids(3)], [_ids(4)], [_ids(5, 6, 7)]],
    [_ids(9, 9), None, _ids(9)],
    max_length=8,
    max_turn_tokens=2,
  )
  first = engine.poll()
  assert first.keys() == {0, 2} and not engine.busy
  assert first[0].token_ids.tolist() == [1, 2] and first[0].stopped
  assert first[2].token_ids.tolist() == [5, 6] and not first[2].stopped
  assert not first[0].logprobs.any() and first[0].logprobs.shape == (2,)
  assert first[0].truncated_logprobs.shape == (2,)
  assert [engine.remaining(row) for row in (0, 2)] == [4, 5]
  assert not engine.poll()
  engine.close(2)
  engine.resume(0, _ids(8))
  assert engine.busy and engine.remaining(0) == 3
  assert _poll(engine) == {0: [3]}
  with pytest.raises(KeyError):
    engine.remaining(2)


def test_a_group_shares_its_prompt():
  scripts = [[_ids(row)] for row in range(4)]
  engine = _begun(scripts, [None, _ids(7, 7, 7)], max_length=8, group_size=2)
  assert [engine.remaining(row) for row in (2, 3)] == [5, 5]
  assert _poll(engine) == {2: [2], 3: [3]}


def test_length_cuts_and_scripts_run_out():
  engine = _begun([[_ids(1, 2, 3)]], [_ids(9, 9)], max_length=4)
  (written,) = engine.poll().values()
  assert written.token_ids.tolist() == [1, 2] and not written.stopped
  assert engine.remaining(0) == 0
  engine.resume(0, _ids())
  assert _poll(engine) == {0: []}
  engine.begin([_ids(9)], group_size=1, max_turn_tokens=9)
  assert engine.remaining(0) == 3
  assert _poll(engine) == {0: [1, 2, 3]}


def test_more_rows_than_scripts_are_refused():
  for scripts, group_size in ((1, 1), (3, 2)):
    with pytest.raises(
      ValueError, match=f'{2 * group_size} rows for {scripts} scripts'
    ):
      _begun(
        [[_ids(1)]] * scripts,
        [_ids(1)] * 2,
        max_length=4,
        group_size=group_size,
      )
