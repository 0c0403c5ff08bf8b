"""The remote engine against a real server; see `serving`."""

import asyncio
import dataclasses
import functools
import gc
import logging
import pathlib
import types as python_types

import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.configs import schema
from stppo_jax.envs import actions
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.http import server as http_server
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import sampler
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import dialects
from stppo_jax.sampling.remote import server as model_server
from stppo_jax.training import assembly
from tests.models import tiny
from tests.sampling.remote import fake_servers

_TURN = 9
_PROMPTS = ([0, 1, 2], [11, 4, 4, 12, 0], [3])


@pytest.fixture(scope='module')
def loop():
  with event_loop.EventLoop() as loop:
    yield loop


@pytest.fixture(scope='module')
def _module_server(loop, tmp_path_factory):
  root = tmp_path_factory.mktemp('weights')
  served = fake_servers.Served(loop, root)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('tempfile.tempdir', str(root))
    with http_server.EmbeddedServer(lambda: served.app) as server:
      served.url = server.url
      yield served


@pytest.fixture
def served(_module_server, monkeypatch):
  """One server for all tests; each finds it as it was."""
  monkeypatch.setattr(client_lib, '_BACKOFF', 0.01)
  server = _module_server
  server.faults.answers, server.faults.paths = [], []
  server.model.requests.clear()
  server.model._params, server.model._version = fake_servers.PARAMS, 'default'
  return server


@functools.cache
def _local():
  made = engine_lib.Engine(
    fake_servers.MODEL,
    mesh=mesh_lib.make_mesh(
      data=-1, fsdp=1, tensor=1, devices=jax.devices()[:1]
    ),
    automaton=fake_servers.AUTOMATON,
    slots=4,
    max_length=fake_servers.MAX_LENGTH,
    sampling=fake_servers.SAMPLING,
    extend_chunk=4,
    decode_chunk=4,
    lookahead=1,
    lanes=1,
    batch_rows=0,
    cache_blocks=2,
    early_exit=0.25,
    deterministic=True,
  )
  made.publish(fake_servers.PARAMS, 0)
  return made


def _keys(count, seed=0):
  return jax.random.split(jax.random.key(seed), count)


def _begin(engine, prompts=_PROMPTS, *, greedy=True, group_size=1, turn=_TURN):
  arrays = [p if p is None else np.array(p, np.int32) for p in prompts]
  engine.begin(
    arrays,
    _keys(len(prompts) * group_size),
    group_size=group_size,
    max_turn_tokens=turn,
    greedy=greedy,
  )


def _turns(engine):
  """What all rows that are at work write."""
  ended = {}
  while engine.busy:
    ended |= engine.poll()
  return ended


def _same(ours, theirs):
  assert ours.keys() == theirs.keys()
  for row, written in ours.items():
    np.testing.assert_array_equal(written.token_ids, theirs[row].token_ids)
    np.testing.assert_allclose(
      written.logprobs, theirs[row].logprobs, atol=1e-5
    )
    assert written.stopped == theirs[row].stopped


def test_greedy_dialogues_are_those_of_the_local_engine(served):
  ours, theirs = _local(), served.engine()
  for engine in (ours, theirs):
    _begin(engine)
  for observation in ([5, 6], [1], []):
    turns = _turns(ours)
    _same(turns, _turns(theirs))
    for row in list(turns):
      assert ours.remaining(row) == theirs.remaining(row)
      for engine in (ours, theirs):
        if engine.remaining(row) > len(observation):
          engine.resume(row, np.array(observation, np.int32))
        else:
          engine.close(row)


def test_a_turn_asks_for_the_whole_dialogue_in_ids(served):
  engine = served.engine()
  served.model.requests.clear()
  _begin(engine, [[0, 1]])
  (first,) = _turns(engine).values()
  engine.resume(0, np.array([7, 8], np.int32))
  _turns(engine)
  one, two = served.model.requests
  assert one['prompt'] == [0, 1]
  assert two['prompt'] == [0, 1, *first.token_ids, 7, 8]
  assert one['stop'] == list(fake_servers.STOPS) and one['stop_token_ids'] == [
    fake_servers.EOS
  ]
  assert one['max_tokens'] == _TURN and one['temperature'] == 1.3
  assert one['seed'] != two['seed']


def test_draws_depend_on_key_and_position_alone(served):
  played = []
  for concurrency in (8, 1):
    engine = served.engine(concurrency=concurrency)
    _begin(engine, _PROMPTS, greedy=False, group_size=2)
    played.append(_turns(engine))
  _same(*played)
  written = [tuple(turn.token_ids) for turn in played[0].values()]
  assert len(set(written)) > 3  # rows of a group differ


def test_a_truncated_draw_has_no_known_distribution(served):
  engine = served.engine(sampling=sampler.Sampling(1.3, top_k=3))
  _begin(engine, greedy=False)
  assert all(
    turn.truncated_logprobs is None for turn in _turns(engine).values()
  )
  engine = served.engine()
  _begin(engine, greedy=False)
  for turn in _turns(engine).values():
    np.testing.assert_array_equal(turn.truncated_logprobs, turn.logprobs)


def test_what_the_server_writes_beyond_a_stop_is_cut(served):
  def beyond(reply):
    (choice,) = reply['choices']
    choice['token_ids'] = [0, 3, 4, 5, 1, 2]  # a</search>bc
    choice['logprobs']['token_logprobs'] = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]

  engine = served.engine()
  served.faults.answers = [beyond]
  _begin(engine, [[0]])
  (turn,) = _turns(engine).values()
  assert turn.token_ids.tolist() == [0, 3, 4, 5] and turn.stopped
  assert turn.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
  assert engine.remaining(0) == fake_servers.MAX_LENGTH - 5


def _choice(**changes):
  def fault(reply):
    reply['choices'][0] |= changes

  return fault


def _no_choices(reply):
  reply['choices'] = []


def _other_weights(reply):
  reply['weight_version'] = 'another'


_FAULTS = {
  # Passing: asked again.
  '500': ((500, {}), 2, 'status 500: so sorry'),
  '502': ((502, {}), 2, 'status 502'),
  '429': ((429, {'Retry-After': '0'}), 2, 'status 429'),
  '408': ((408, {}), 2, 'status 408'),
  'garbage': ('garbage', 2, 'not JSON'),
  'nothing': (_no_choices, 2, 'no one choice'),
  'aborted': (_choice(finish_reason='abort'), 2, "finish_reason='abort'"),
  'too short': (
    _choice(token_ids=[0], logprobs={'token_logprobs': [-1.0]}),
    2,
    'ended after 1 of 9 tokens',
  ),
  # Standing: not.
  '400': ((400, {}), 1, 'status 400'),
  '302': ((302, {'Location': '/health'}), 1, 'status 302'),
  'other prompt': (_choice(prompt_token_ids=[9]), 1, 'other token ids'),
  'no prompt': (_choice(prompt_token_ids=None), 1, 'without its token ids'),
  'no ids': (_choice(token_ids=None), 1, 'no token ids'),
  'text': (_choice(token_ids=['a']), 1, 'no token ids'),
  'no logprobs': (_choice(logprobs=None), 1, 'no log-probabilities'),
  'fewer': (_choice(logprobs={'token_logprobs': []}), 1, '0 log-prob'),
  'null': (
    _choice(token_ids=[fake_servers.EOS], logprobs={'token_logprobs': [None]}),
    1,
    'no number up to 0',
  ),
  'positive': (
    _choice(token_ids=[fake_servers.EOS], logprobs={'token_logprobs': [0.5]}),
    1,
    'no number up to 0',
  ),
  'foreign': (
    _choice(
      token_ids=[99] * _TURN, logprobs={'token_logprobs': [-1.0] * _TURN}
    ),
    1,
    'id 99 is not of the model',
  ),
  'too long': (
    _choice(token_ids=[0] * 10, logprobs={'token_logprobs': [-1.0] * 10}),
    1,
    '10 tokens, 9 were asked for',
  ),
}


@pytest.mark.parametrize('name', _FAULTS)
def test_a_fault_is_asked_again_or_fails_its_row(served, name, caplog):
  fault, attempts, line = _FAULTS[name]
  engine = served.engine(retries=1)
  _begin(engine, [[0]])
  (healthy,) = _turns(engine).values()
  engine.statistics()

  # Once: an attempt later it is as if nothing had been, or the row failed.
  served.faults.answers = [fault]
  _begin(engine, [[0]])
  (turn,) = _turns(engine).values()
  if attempts == 1:
    assert turn is None
  else:
    _same({0: turn}, {0: healthy})
    assert engine.statistics()['engine/retries'] == 1
  # For ever: the row fails, after as many attempts as it is worth.
  served.faults.answers = [fault] * attempts
  engine.statistics()
  caplog.clear()
  _begin(engine, [[0]])
  assert _turns(engine) == {0: None}
  assert engine.statistics() == {
    'engine/ok': 0.0,
    'engine/failures': 1.0,
    'engine/retries': float(attempts - 1),
  }
  assert not served.faults.answers
  (record,) = caplog.records
  assert line in record.getMessage() and record.levelno == logging.WARNING
  assert '\n' not in record.getMessage()


def test_a_slow_turn_is_given_up_and_asked_again(served):
  engine = served.engine(timeout=0.5, retries=1)
  _begin(engine, [[0]])
  (healthy,) = _turns(engine).values()
  served.faults.answers = ['slow']
  _begin(engine, [[0]])
  _same(_turns(engine), {0: healthy})
  served.faults.answers = ['slow', 'slow']
  _begin(engine, [[0]])
  assert _turns(engine) == {0: None}


def test_retry_after_is_honoured(served, monkeypatch):
  engine = served.engine()
  pauses = []
  sleep = asyncio.sleep

  async def nap(seconds):
    pauses.append(seconds)
    await sleep(0)

  monkeypatch.setattr(client_lib.asyncio, 'sleep', nap)
  served.faults.answers = [(429, {'Retry-After': '7'}), (503, {})]
  _begin(engine, [[0]])
  assert None not in _turns(engine).values()
  assert pauses[0] == 7.0 and 0 < pauses[1] < 0.1


def test_weights_that_are_published_play(served):
  engine = served.engine()
  other = tiny.params(fake_servers.MODEL, seed=1)
  played = []
  for version, params in ((3, other), (4, fake_servers.PARAMS)):
    engine.publish(params, version)
    _begin(engine)
    played.append(_turns(engine))
    assert engine.version == version
    assert served.model._version.startswith(f'{version}-')
  ours = _local()
  _begin(ours)
  _same(_turns(ours), played[1])
  assert any(
    played[0][row].token_ids.tolist() != played[1][row].token_ids.tolist()
    for row in played[0]
  )


def test_weights_are_sent_to_those_who_do_not_hold_them(served):
  engine = served.engine()
  engine.publish(fake_servers.PARAMS, 1)

  def sent():
    _begin(engine, [[0]])
    _turns(engine)
    return served.faults.paths.count('/update_weights_from_disk')

  assert sent() == sent() == 1
  served.model._version = 'default'  # as after a restart
  assert sent() == sent() == 2


def test_engines_that_share_a_server_each_play_their_own(served):
  mine, another = served.engine(), served.engine()
  mine.publish(fake_servers.PARAMS, 1)
  another.publish(tiny.params(fake_servers.MODEL, seed=1), 1)
  _begin(mine)
  first = _turns(mine)
  _begin(another)
  _turns(another)
  _begin(mine)
  _same(_turns(mine), first)


def test_turns_of_other_weights_fail(served):
  engine = served.engine()
  engine.publish(fake_servers.PARAMS, 1)
  served.faults.answers = [None, _other_weights]
  _begin(engine, [[0], [1]])
  turns = _turns(engine)
  assert sorted(turn is None for turn in turns.values()) == [False, True]


def test_weights_that_are_not_taken_end_the_run(served, tmp_path, monkeypatch):
  engine = served.engine(retries=0)
  monkeypatch.setattr(served.model, '_weights_root', tmp_path)
  engine.publish(fake_servers.PARAMS, 1)
  with pytest.raises(
    client_lib.EngineUnreachable, match='not below weights_root'
  ):
    _begin(engine)


@pytest.mark.parametrize(
  ('changes', 'line'),
  [
    ({'model': 'large'}, "serves tiny, not 'large'"),
    ({'max_length': 41}, 'holds 40 tokens, fewer than max_length=41'),
  ],
)
def test_a_server_that_does_not_suit_is_refused(served, changes, line):
  with pytest.raises(client_lib.EngineUnsuited, match=line) as caught:
    served.engine(**changes)
  assert caught.value.exit_code == 2 and '\n' not in str(caught.value)


def test_a_server_without_ids_is_refused_at_the_start(served):
  served.faults.answers = [_choice(token_ids=None)]
  with pytest.raises(client_lib.EngineUnsuited, match='no token ids'):
    served.engine()


def _card(served, monkeypatch, kind):
  monkeypatch.setattr(model_server, 'KIND', kind)


def test_a_stranger_is_refused(served, monkeypatch):
  _card(served, monkeypatch, 'llamacpp')
  with pytest.raises(
    client_lib.EngineUnsuited, match='sglang, stppo_jax, vllm'
  ):
    served.engine()


def test_a_server_that_does_not_tell_its_weights_is_refused(
  served, monkeypatch
):
  dialect = dialects.DIALECTS['stppo_jax']
  silent = dataclasses.replace(dialect, version_path='/get_model_info')
  monkeypatch.setitem(dialects.DIALECTS, 'stppo_jax', silent)
  with pytest.raises(client_lib.EngineUnsuited, match='status 404'):
    served.engine()


def test_log_probs_of_another_temperature_are_refused(served, monkeypatch):
  _card(served, monkeypatch, 'vllm')
  with pytest.raises(client_lib.EngineUnsuited, match='temperature=1.3'):
    served.engine()
  served.engine(sampling=sampler.Sampling(1.0))


def test_sglang_plays_the_same_dialogues(served, monkeypatch):
  _card(served, monkeypatch, 'sglang')
  engine = served.engine()
  engine.publish(tiny.params(fake_servers.MODEL, seed=1), 1)
  engine.publish(fake_servers.PARAMS, 2)
  theirs = _collect(engine, served.loop)
  _same_trajectories(_collect(_local(), served.loop), theirs)
  assert all(trajectory.version == 2 for trajectory in theirs)
  assert not served.model.requests  # none by way of the completions API


def test_vllm_reloads_before_every_collection(served, monkeypatch):
  _card(served, monkeypatch, 'vllm')
  engine = served.engine(sampling=sampler.Sampling(1.0))
  served.noted.clear()
  engine.publish(fake_servers.PARAMS, 1)
  for _ in range(2):
    _begin(engine)
    _turns(engine)
  reload, flush = served.noted[:2]
  assert reload[0] == '/collective_rpc'
  assert reload[1]['method'] == 'reload_weights'
  folder = pathlib.Path(reload[1]['kwargs']['weights_path'])
  assert (folder / 'model.safetensors').is_file()
  flag = '?reset_running_requests=true'
  assert flush == (f'/reset_prefix_cache{flag}', {})
  assert served.noted[2:] == served.noted[:2]


def test_folders_of_old_weights_are_removed(served):
  engine = served.engine()
  for version in range(3):
    engine.publish(fake_servers.PARAMS, version)
  root = engine._root
  assert [path.name.split('-')[0] for path in root.iterdir()] == ['2']
  del engine
  gc.collect()
  assert not root.exists()


def test_nobody_there_is_try_again(loop):
  with pytest.raises(client_lib.EngineUnreachable) as caught:
    fake_servers.Served(loop, '/nowhere').engine(
      url='http://127.0.0.1:9', timeout=0.3
    )
  assert caught.value.exit_code == 75 and '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'url',
  [
    '',
    'ftp://host',
    'http://',
    'http://u:p@host',
    'http://h?x=1',
    'http://h h',
  ],
)
def test_bad_urls_are_refused(loop, url):
  with pytest.raises(ValueError):
    client_lib.Client(loop, url, timeout=1.0, retries=0)


def test_a_token_of_the_environment_is_sent(served, monkeypatch):
  monkeypatch.setenv(client_lib.TOKEN_VARIABLE, 'secret')
  client = client_lib.Client(
    served.loop, served.url + '/v1/', timeout=5.0, retries=0
  )
  assert client.url == served.url
  assert client._session.headers['Authorization'] == 'Bearer secret'
  assert b'tiny' in served.loop.run(client.get('/v1/models'))


def test_only_rows_between_turns_go_on(served):
  engine = served.engine()
  _begin(engine, [None, [0]])
  with pytest.raises(ValueError, match='row 1 is not between two turns'):
    engine.resume(1, np.zeros(1, np.int32))
  assert _turns(engine).keys() == {1}
  with pytest.raises(ValueError, match='leave no room'):
    engine.resume(1, np.zeros(engine.remaining(1), np.int32))
  for prompt in ([], [0] * fake_servers.MAX_LENGTH):
    with pytest.raises(ValueError, match='needs at least one, and room'):
      _begin(engine, [prompt])


def test_a_new_collection_forgets_the_one_before(served):
  engine = served.engine()
  served.faults.answers = ['slow', 'slow']
  _begin(engine, [[0], [1]])
  engine.poll()
  asked = list(engine._in_flight.values())
  assert len(asked) == 2
  served.faults.answers = []
  _begin(engine, [[2]])
  assert all(future.cancelled() for future in asked)
  assert _turns(engine).keys() == {0}


class _Talk:
  """An environment that answers twice and then ends the dialogue."""

  stop_strings = actions.STOP_STRINGS

  def prompt(self, question):
    return question.text

  async def step(self, question, turn_index, text):
    if turn_index == 2:
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    observation = protocol.Observation('[', 'cab' * (turn_index + 1), ']')
    return protocol.Step('search', observation, None)

  def rewards(self, question, prompt, texts, status):
    return {'right': float(len(texts))}, {'em': 1.0}


def _collect(engine, loop):
  collector = collect.Collector(
    engine=engine,
    environment=_Talk(),
    tokenizer=fake_servers.Tokens(),
    loop=loop,
    max_turn_tokens=_TURN,
    max_observation_tokens=6,
    group_size=2,
  )
  questions = [
    types.Question(str(n), text, ('x',), 'd')
    for n, text in enumerate(('abc', '[sea</]', 'b'))
  ]
  return collector.collect(questions, _keys(6), greedy=True)


def _same_trajectories(ours, theirs):
  for our, their in zip(ours, theirs, strict=True):
    assert our.status == their.status and len(our.turns) == len(their.turns)
    for a, b in zip(our.turns, their.turns):
      np.testing.assert_array_equal(a.token_ids, b.token_ids)
      np.testing.assert_array_equal(a.observation_ids, b.observation_ids)
      np.testing.assert_allclose(
        a.sampler_logprobs, b.sampler_logprobs, atol=1e-5
      )


def test_collected_dialogues_are_those_of_the_local_engine(served):
  ours = _collect(_local(), served.loop)
  theirs = _collect(served.engine(), served.loop)
  _same_trajectories(ours, theirs)
  assert max(len(trajectory.turns) for trajectory in ours) == 3


def test_ids_are_never_made_from_text(served):
  def written(reply):
    logprobs = {'token_logprobs': [-1.0, -2.0, -3.0]}
    reply['choices'][0] |= {'token_ids': [6, 7, 8], 'logprobs': logprobs}

  tokens = fake_servers.Tokens()
  engine = served.engine(concurrency=1)
  served.model.requests.clear()
  served.faults.answers = [written]
  first, *_ = _collect(engine, served.loop)
  turn = first.turns[0]
  assert turn.token_ids.tolist() == [6, 7, 8]
  assert tokens.decode([6, 7, 8]) == '</search>x'
  assert tokens.encode_text('</search>x'[:9]).tolist() == [10]
  prompt, told = first.prompt_ids.tolist(), turn.observation_ids.tolist()
  asked = [request['prompt'] for request in served.model.requests]
  assert [*prompt, 6, 7, 8, *told] in asked


def test_a_failed_turn_is_an_infra_error_of_its_row_alone(served):
  healthy = _collect(_local(), served.loop)
  prompt = healthy[2].prompt_ids.tolist()

  def fault(reply):
    (choice,) = reply['choices']
    asked = choice['prompt_token_ids']
    if asked[: len(prompt)] == prompt and len(asked) > len(prompt):
      choice['logprobs'] = None

  engine = served.engine()
  served.faults.answers = [fault] * 20
  trajectories = _collect(engine, served.loop)
  for n in (2, 3):  # the group's first turns were fine
    assert trajectories[n].status is types.TrajectoryStatus.INFRA_ERROR
    assert len(trajectories[n].turns) == 1
  for n in (0, 1, 4, 5):
    _same_trajectories([trajectories[n]], [healthy[n]])
  assert engine.statistics()['engine/failures'] == 2


def test_a_config_plays_on_a_server(loop, tmp_path, monkeypatch):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  tokenizer = tokenizer_lib.phrase_tokenizer(prompts.phrases(['b', 'c']))
  policy = tiny.model(vocab_size=tokenizer.vocab_size)
  model = model_server.ModelServer(
    'tiny',
    policy,
    tiny.params(policy),
    token_bytes=tokenizer.token_bytes(),
    max_length=64,
    weights_root=tmp_path,
  )
  config = base.get_config()
  config.rollout.engine = 'remote'
  (line,) = schema.check(config)
  assert 'rollout.remote.url and .model must be set' in line
  config.rollout.remote.model = 'tiny'
  config.env.max_length, config.env.max_turn_tokens = 64, 9
  services = python_types.SimpleNamespace(environment=_Talk(), loop=loop)
  with http_server.EmbeddedServer(model.app) as server:
    config.rollout.remote.url = server.url
    assert not schema.check(config)
    collector, engine = assembly.build_collector(
      config, services, tokenizer, policy, slots=1
    )
    engine.publish(tiny.params(policy, seed=1), 7)
    question = types.Question('q', 'abc', ('x',), 'd')
    (trajectory,) = collector.collect([question], _keys(1))
  assert trajectory.version == 7 and len(trajectory.turns) == 3
  assert trajectory.status is types.TrajectoryStatus.COMPLETED
  asked = model.requests[-1]
  assert asked['stop'] == ['</search>', '</answer>']
  assert asked['stop_token_ids'] == [tokenizer.eos_id]
