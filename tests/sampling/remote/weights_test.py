"""Weights that are published to a server."""

import gc
import pathlib

import pytest

from stppo_jax.sampling.remote import client as client_lib
from tests.models import tiny
from tests.sampling.remote import fake_servers


def _other_weights(reply):
  reply['meta_info']['weight_version'] = 'another'


def test_engines_that_share_a_server_sample_with_their_own_weights(served):
  mine, another = served.engine(), served.engine()
  mine.publish(fake_servers.PARAMS, 3)
  another.publish(tiny.params(fake_servers.MODEL, seed=1), 4)
  written = []
  for engine in (mine, another, mine):
    fake_servers.begin(engine)
    written.append(fake_servers.turns(engine))
    label = f'{engine.version}-'
    assert served.model.weight_version.startswith(label)
  assert (mine.version, another.version) == (3, 4)
  ours = fake_servers.local_engine()
  fake_servers.begin(ours)
  first, other, again = written
  fake_servers.assert_same_turns(fake_servers.turns(ours), first)
  fake_servers.assert_same_turns(again, first)
  ids = [
    [x.token_ids.tolist() for x in turns.values()] for turns in (first, other)
  ]
  assert ids[0] != ids[1]


def test_weights_are_sent_to_a_server_that_has_others(served):
  engine = served.engine()
  engine.publish(fake_servers.PARAMS, 1)

  def sent():
    fake_servers.begin(engine, [[0]])
    fake_servers.turns(engine)
    return served.faults.paths.count('/update_weights_from_disk')

  assert sent() == sent() == 1
  served.model.set_weights(fake_servers.PARAMS, 'default')  # after a restart
  assert sent() == sent() == 2


def test_turns_of_other_weights_fail(served):
  engine = served.engine()
  engine.publish(fake_servers.PARAMS, 1)
  served.faults.answers = [None, _other_weights]
  fake_servers.begin(engine, [[0], [1]])
  turns = fake_servers.turns(engine)
  assert sorted(turn is None for turn in turns.values()) == [False, True]


def test_weights_that_are_not_loaded_end_the_run(served):
  served.faults.missing = '/update_weights_from_disk'
  engine = served.engine(retries=0)
  engine.publish(fake_servers.PARAMS, 1)
  with pytest.raises(client_lib.EngineUnreachable, match='status 404'):
    fake_servers.begin(engine)


def test_vllm_reloads_before_every_collection(served):
  engine = served.vllm_engine()
  engine.publish(fake_servers.PARAMS, 1)
  for _ in range(2):
    fake_servers.begin(engine)
    fake_servers.turns(engine)
  reload, flush, *again = served.model.weight_requests
  assert reload[0] == '/collective_rpc'
  assert reload[1]['method'] == 'reload_weights'
  folder = pathlib.Path(reload[1]['kwargs']['weights_path'])
  assert (folder / 'model.safetensors').is_file()
  flag = '?reset_running_requests=true'
  assert flush == (f'/reset_prefix_cache{flag}', {})
  assert again == [reload, flush]


def test_folders_of_old_weights_are_removed(served, tmp_path, monkeypatch):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  engine = served.engine()
  for version in range(3):
    engine.publish(fake_servers.PARAMS, version)
  (root,) = tmp_path.iterdir()
  names = {path.name.split('-')[0] for path in root.iterdir()}
  assert names == {'lock', '2'} and root.stat().st_mode & 0o77 == 0
  del engine
  gc.collect()
  assert not root.exists()
