"""A command writes only to folders that are new, empty or its own."""

import json

import pytest

from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder


def _problems(folder, command='train', reads=None, **options):
  return run_folder.problems(
    folder, flag='--workdir', command=command, reads=reads or {}, **options
  )


def _run(command, **changes):
  return run_folder.Run(command, 'id', 'digest', **changes)


def test_a_folder_that_is_new_or_empty_may_be_written(tmp_path):
  assert not _problems(tmp_path) and not _problems(tmp_path / 'new')
  # What a killed start leaves is nothing.
  (tmp_path / lock.NAME).touch()
  (tmp_path / 'run.json.new').touch()
  run_folder.make_aside(tmp_path)
  assert not _problems(tmp_path)


@pytest.mark.parametrize('relation', ['is', 'holds', 'lies in'])
def test_a_folder_that_is_read_is_never_written(tmp_path, relation):
  source = tmp_path / 'source'
  (source / 'inside').mkdir(parents=True)
  folder = {
    'is': source,
    'holds': tmp_path,
    'lies in': source / 'inside' / 'new',
  }[relation]
  link = tmp_path / 'link'
  link.symlink_to(source)
  # Even if the same command wrote it.
  if folder.is_dir():
    run_folder.write(folder, _run('train'))
  for read in (source, link):
    (line,) = _problems(folder, reads={'model.path': read})
    assert f'--workdir={folder}: {relation} {read}' in line
  inside = _problems(folder, reads={'x': link}, may_lie_inside=True)
  assert bool(inside) == (relation != 'lies in')


def test_a_command_writes_where_it_wrote_before(tmp_path):
  run_folder.write(tmp_path, _run('train'))
  (tmp_path / 'notes.txt').touch()  # the user's, in a run
  assert not _problems(tmp_path)
  (line,) = _problems(tmp_path, 'sft')
  assert 'was written by train, not by sft' in line


def test_a_run_of_an_earlier_version_is_known_by_its_config(tmp_path):
  record = {'algorithm': {}, 'model': {}, 'rollout': {}}
  (tmp_path / 'config.json').write_text(json.dumps(record))
  assert not _problems(tmp_path) and _problems(tmp_path, 'prefer')
  record['batch_sha256'] = ''
  (tmp_path / 'config.json').write_text(json.dumps(record))
  assert _problems(tmp_path) and not _problems(tmp_path, 'prefer')


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('config.json', '{"model_type": "qwen2"}'),
    ('config.json', '[]'),
    ('run.json', '{"of": "another program"}'),
    ('export.json.bak', ''),
    ('lock.txt', ''),
  ],
)
def test_files_of_others_are_left_alone(tmp_path, name, text):
  (tmp_path / name).write_text(text)
  (line,) = _problems(tmp_path)
  assert 'is not empty and was not written by train' in line
  assert f'it holds {name};' in line


def test_an_export_is_replaced_by_exports_only(tmp_path):
  run_folder.mark_export(tmp_path)
  assert not _problems(tmp_path, run_folder.EXPORT)
  assert 'was written by export' in _problems(tmp_path)[0]
  # A workdir of `sft` is an exported policy too, and stays that of sft.
  run_folder.write(tmp_path, _run('sft'))
  assert _problems(tmp_path, run_folder.EXPORT)
  assert not _problems(tmp_path, 'sft')


def test_a_name_that_no_folder_has_is_one_line(tmp_path):
  (tmp_path / 'file').touch()
  assert 'exists and is not a folder' in _problems(tmp_path / 'file')[0]
  assert 'File name too long' in _problems('x' * 300)[0]


def test_the_identity_is_kept_in_a_file(tmp_path):
  assert run_folder.read(tmp_path) is None
  run = _run('prefer', has_older_checkpoints=True)
  run_folder.write(tmp_path, run)
  assert run_folder.read(tmp_path) == run
  assert [path.name for path in tmp_path.iterdir()] == ['run.json']


def test_what_a_run_left_is_moved_and_never_replaced(tmp_path):
  assert run_folder.move_all_aside(tmp_path) is None
  for number in (1, 2):
    run_folder.write(tmp_path, _run('train'))
    (tmp_path / lock.NAME).touch()
    (tmp_path / 'metrics.jsonl').write_text(str(number))
    aside = run_folder.move_all_aside(tmp_path)
    assert aside == tmp_path / f'aside-{number}'
    assert (aside / 'metrics.jsonl').read_text() == str(number)
    assert {p.name for p in aside.iterdir()} == {'run.json', 'metrics.jsonl'}
  left = {path.name for path in tmp_path.iterdir()}
  assert left == {lock.NAME, 'aside-1', 'aside-2'}
