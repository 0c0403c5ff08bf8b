"""Hosts compare the files that their config names."""

import pytest

from stppo_jax.data import layout
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.training import assembly
from stppo_jax.training import host_check
from tests.training import runs


class _TwoHosts(hosts_lib.Hosts):
  """The first of two hosts; the second has `facts`, or else the same."""

  def __init__(self, facts):
    super().__init__(0, ['a', 'b'])
    self.facts = facts

  def exchange(self, what, value, *, timeout=None):
    del timeout
    assert what == 'facts'
    theirs = self.facts or value
    self.facts = value
    return [value, theirs]


def _check(config, change):
  """Compares a host with one that has the files as they are after a change."""
  before = _TwoHosts(None)
  host_check.check(before, config)
  change()
  host_check.check(_TwoHosts(before.facts), config)


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
  with pytest.raises(assembly.Misconfigured) as error:
    _check(config, lambda: files[changed].write_text('[]'))
  assert str(error.value).startswith(
    f'data.train: {changed} differs between hosts: '
  )
