"""The scripted policy keeps the promises of the engine."""

import numpy as np

from stppo_jax.sampling import scripted


def _ids(*values):
  return np.array(values, np.int32)


def test_each_slot_plays_its_own_script():
  engine = scripted.ScriptedEngine(
    [[_ids(1, 2), _ids(3)], [_ids(4)], [_ids(5, 6, 7)]], max_length=8
  )
  engine.extend({0: _ids(9, 9), 1: _ids(9)})
  first = engine.generate([0, 2], max_tokens=2)
  assert first.keys() == {0, 2}
  assert first[0].token_ids.tolist() == [1, 2] and first[0].stopped
  assert first[2].token_ids.tolist() == [5, 6] and not first[2].stopped
  assert not first[0].logprobs.any() and first[0].logprobs.shape == (2,)
  second = engine.generate([0, 1], max_tokens=2)
  assert second[0].token_ids.tolist() == [3]
  assert second[1].token_ids.tolist() == [4]
  assert [engine.remaining(slot) for slot in range(3)] == [3, 6, 6]


def test_a_group_shares_its_prompt():
  scripts = [[_ids(slot)] for slot in range(4)]
  engine = scripted.ScriptedEngine(scripts, max_length=8)
  engine.extend({0: _ids(9)})
  engine.generate([0], max_tokens=4)
  engine.prefill({1: _ids(7, 7, 7)}, group_size=2)
  assert [engine.remaining(slot) for slot in range(4)] == [8, 8, 5, 5]
  written = engine.generate(range(4), max_tokens=4)
  assert [written[slot].token_ids.tolist() for slot in range(4)] == [
    [0],
    [1],
    [2],
    [3],
  ]


def test_length_cuts_and_scripts_run_out():
  engine = scripted.ScriptedEngine([[_ids(1, 2, 3)]], max_length=4)
  engine.extend({0: _ids(9, 9)})
  written = engine.generate([0], max_tokens=10)[0]
  assert written.token_ids.tolist() == [1, 2] and not written.stopped
  assert engine.remaining(0) == 0
  assert engine.generate([0], max_tokens=10)[0].token_ids.size == 0
  engine.reset()
  assert engine.remaining(0) == 4
  assert engine.generate([0], max_tokens=10)[0].token_ids.tolist() == [1, 2, 3]
