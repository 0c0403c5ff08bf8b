"""No command replaces data, and an address may need a package.

`tests/inputs` has the models that are replaced by none.
"""

import sys

from tests.training import runs


def test_an_address_may_need_a_package(monkeypatch, refused):
  monkeypatch.setitem(sys.modules, 's3fs', None)
  for command in ('status', 'report', 'view', 'alarms'):
    line = refused(command, 's3://mine/run')
    assert line.startswith('s3://mine/run: needs a package for s3://: pip ')


def test_the_folder_of_the_data_is_no_workdir(tmp_path, refused):
  data = tmp_path / 'data' / 'nq'
  data.mkdir(parents=True)
  line = '{"id": "1", "dataset": "d", "kind": "open", '
  (data / 'q.jsonl').write_text(line + '"question": "?", "answers": ["a"]}\n')
  flags = runs.flags(
    data__name='jsonl',
    data__root=tmp_path / 'data',
    data__train='nq/q.jsonl',
    retrieval__url='http://127.0.0.1:9',
  )
  for folder, relation in (
    (data, 'is'),
    (data.parent, 'holds'),
    (data / 'runs' / '1', 'lies in'),
  ):
    line = refused('train', *flags, f'--workdir={folder}')
    assert f': {relation} {data}, the folder of data.train; ' in line
