"""Turns of the remote engine, from a real server."""

import numpy as np
import pytest

from stppo_jax.sampling import sampler
from tests.sampling.remote import fake_servers


def test_greedy_dialogues_are_those_of_the_local_engine(served):
  ours, theirs = fake_servers.local_engine(), served.engine()
  for engine in (ours, theirs):
    fake_servers.begin(engine)
  for observation in ([5, 6], [1], []):
    turns = fake_servers.turns(ours)
    fake_servers.assert_same_turns(turns, fake_servers.turns(theirs))
    for row in list(turns):
      assert ours.remaining(row) == theirs.remaining(row)
      for engine in (ours, theirs):
        if engine.remaining(row) > len(observation):
          engine.resume(row, np.array(observation, np.int32))
        else:
          engine.close(row)


def test_a_request_has_the_ids_of_the_whole_dialogue(served):
  engine = served.engine()
  served.model.requests.clear()  # the trial turn
  fake_servers.begin(engine, [[0, 1]])
  (first,) = fake_servers.turns(engine).values()
  engine.resume(0, np.array([7, 8], np.int32))
  fake_servers.turns(engine)
  one, two = served.model.requests
  assert one.prompt_ids == [0, 1]
  assert two.prompt_ids == [0, 1, *first.token_ids, 7, 8]
  assert one.stop_strings == list(fake_servers.STOPS)
  assert one.stop_ids == [fake_servers.EOS]
  assert one.max_tokens == fake_servers.TURN
  assert one.sampling.temperature == 1.3
  assert one.seed != two.seed


def test_draws_depend_on_key_and_position_alone(served):
  sampled = []
  for concurrency in (8, 1):
    engine = served.engine(concurrency=concurrency)
    fake_servers.begin(engine, fake_servers.PROMPTS, greedy=False, group_size=2)
    sampled.append(fake_servers.turns(engine))
  fake_servers.assert_same_turns(*sampled)
  written = [tuple(turn.token_ids) for turn in sampled[0].values()]
  assert len(set(written)) > 3  # rows of a group differ


def test_a_truncated_draw_has_no_known_distribution(served):
  engine = served.engine(sampling=sampler.Sampling(1.3, top_k=3))
  fake_servers.begin(engine, greedy=False)
  assert all(
    turn.truncated_logprobs is None
    for turn in fake_servers.turns(engine).values()
  )
  engine = served.engine()
  fake_servers.begin(engine, greedy=False)
  for turn in fake_servers.turns(engine).values():
    np.testing.assert_array_equal(turn.truncated_logprobs, turn.logprobs)


def test_tokens_beyond_a_stop_are_cut_off(served):
  def beyond(reply):
    (choice,) = reply['choices']
    choice['token_ids'] = [0, 3, 4, 5, 1, 2]  # a</search>bc
    choice['logprobs']['token_logprobs'] = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]

  engine = served.vllm_engine()
  served.faults.answers = [beyond]
  fake_servers.begin(engine, [[0]])
  (turn,) = fake_servers.turns(engine).values()
  assert turn.token_ids.tolist() == [0, 3, 4, 5] and turn.stopped
  assert turn.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
  assert engine.remaining(0) == fake_servers.MAX_LENGTH - 5


def test_only_rows_between_turns_go_on(served):
  engine = served.engine()
  fake_servers.begin(engine, [None, [0]])
  with pytest.raises(ValueError, match='the last turn of row 1 has not ended'):
    engine.resume(1, np.zeros(1, np.int32))
  assert fake_servers.turns(engine).keys() == {1}


def test_a_new_collection_cancels_the_one_before(served):
  engine = served.engine()
  served.faults.answers = ['slow', 'slow']
  fake_servers.begin(engine, [[0], [1]])
  engine.poll()
  served.faults.answers = []
  fake_servers.begin(engine, [[2]])
  turns = fake_servers.turns(engine)
  assert turns.keys() == {0} and not engine.busy
  again = served.engine()
  fake_servers.begin(again, [[2]])
  fake_servers.assert_same_turns(turns, fake_servers.turns(again))
  assert engine.statistics()['engine/ok'] == 1
