"""A run reads back the versions of turns that it has recorded."""

import pytest

from stppo_jax.records import turn_versions


def test_each_host_reads_what_it_has_written_last(tmp_path):
  first, other = (turn_versions.TurnVersions(tmp_path, n) for n in (0, 3))
  assert first.read(11) is None
  first.write(11, [[[0, 1], []]])
  first.write(11, [[[1, 1], [2]], [[2]]])
  other.write(11, [[[0]]])
  assert first.read(11) == [[[1, 1], [2]], [[2]]]
  assert other.read(11) == [[[0]]] and first.read(12) is None
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ['versions-000012-host3.json', 'versions-000012.json']


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, caplog):
  turn_versions.TurnVersions(tmp_path / 'absent', 0).write(0, [[[0]]])
  assert 'cannot be repeated' in caplog.text


def test_a_damaged_file_is_named(tmp_path):
  versions = turn_versions.TurnVersions(tmp_path, 0)
  (tmp_path / 'versions-000001.json').write_text('[[')
  with pytest.raises(ValueError, match='versions-000001.json: no JSON'):
    versions.read(0)
