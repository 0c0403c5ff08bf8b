"""The scripted engine has the interface of the local engine."""

import numpy as np
import pytest

from stppo_jax.sampling import scripted


def _ids(*values):
  return np.array(values, np.int32)


def _begin(scripts, prompts, *, max_length, group_size=1, max_turn_tokens=9):
  engine = scripted.ScriptedEngine(scripts, max_length=max_length)
  engine.begin(prompts, group_size=group_size, max_turn_tokens=max_turn_tokens)
  return engine


def _poll(engine):
  return {row: x.token_ids.tolist() for row, x in engine.poll().items()}


def test_each_row_generates_its_own_script():
  engine = _begin(
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


def test_turns_are_cut_to_the_room_and_empty_after_the_script():
  engine = _begin([[_ids(1, 2, 3)]], [_ids(9, 9)], max_length=4)
  (turn,) = engine.poll().values()
  assert turn.token_ids.tolist() == [1, 2] and not turn.stopped
  assert engine.remaining(0) == 0
  engine.resume(0, _ids())
  assert _poll(engine) == {0: []}
  engine.begin([_ids(9)], group_size=1, max_turn_tokens=9)
  assert engine.remaining(0) == 3
  assert _poll(engine) == {0: [1, 2, 3]}
