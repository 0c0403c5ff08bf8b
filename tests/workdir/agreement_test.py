"""Hosts compare the files that their config names, and what they compute."""

import numpy as np
import pytest

from stppo_jax import exits
from stppo_jax.data import layout
from stppo_jax.workdir import agreement
from tests.training import runs
from tests.workdir import two_hosts


def _check(config, change):
  """Compares a host with one that has the files as they are after a change."""
  before = two_hosts.TwoHosts()
  agreement.check(before, config)
  change()
  ((_, facts, _),) = before.heard
  agreement.check(two_hosts.TwoHosts(facts=facts), config)


@pytest.mark.parametrize('key', ['reward_function', 'gymnasium__make'])
def test_functions_of_the_user_are_compared(tmp_path, monkeypatch, key):
  monkeypatch.syspath_prepend(tmp_path)
  module = f'functions_of_{key}'
  source = tmp_path / f'{module}.py'
  source.write_text('def f(question, texts, scores):\n  return 1.0\n')
  config = runs.config(**{f'env__{key}': f'{module}:f'})
  with pytest.raises(exits.Misconfigured) as error:
    _check(config, lambda: source.write_text('f = 2.0\n'))
  assert str(error.value).startswith(
    f'the source of env.{key.replace("__", ".")}={module}:f '
    'differs between hosts: '
  )
  with pytest.raises(exits.Misconfigured, match='no such .* on host 0'):
    _check(config, source.unlink)


@pytest.mark.parametrize('name, changed', [('jsonl', 'b.jsonl'), ('tfds', 'b')])
def test_each_data_set_of_a_mixture_is_compared(tmp_path, name, changed):
  files = {}
  for element in ('a', 'b'):
    files[element] = layout.folder(tmp_path, element) / 'metadata.json'
    files[f'{element}.jsonl'] = tmp_path / f'{element}.jsonl'
  for file in files.values():
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{}')
    (file.parent / 'dataset_info.json').touch()
  suffix = '.jsonl' if name == 'jsonl' else ''
  config = runs.config(
    data__name=name,
    data__root=str(tmp_path),
    retrieval__url='http://127.0.0.1:1',
    data__train=f'a{suffix} weight=1, b{suffix} weight=2',
  )
  with pytest.raises(exits.Misconfigured) as error:
    _check(config, lambda: files[changed].write_text('[]'))
  assert str(error.value).startswith(
    f'data.train: {changed} differs between hosts: '
  )


def test_hosts_come_to_the_same_program():
  batch = {'tokens_BL': np.zeros((8, 256), np.int32), 'sentence_ids_BL': None}

  def check(ours, theirs):
    hosts = two_hosts.TwoHosts()
    agreement.check_program(hosts, *theirs)
    ((_, program, _),) = hosts.heard
    agreement.check_program(two_hosts.TwoHosts(program=program), *ours)

  check(('update', 1, batch), ('update', 1, batch))
  other = {
    'tokens_BL': np.zeros((8, 128), np.int32),
    'sentence_ids_BL': np.zeros((8, 128), np.int8),
  }
  with pytest.raises(agreement.HostsDiffer) as error:
    check(('update', 1, batch), ('annotate', 2, other))
  program, step, tokens, sentences = str(error.value).splitlines()
  assert 'update on host 0 (a); annotate on host 1 (b)' in program
  assert '1 on host 0 (a); 2 on host 1 (b)' in step
  assert 'tokens_BL' in tokens and 'int32[8, 128] on host 1 (b)' in tokens
  assert 'sentence_ids_BL' in sentences and '(absent) on host 0' in sentences
