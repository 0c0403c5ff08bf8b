"""A folder is the old or the new one, wherever the writer is interrupted."""

import os
import pathlib
import shutil

import pytest

from stppo_jax.models.hf import export


def _fill(folder, text, names=('weights', 'config')):
  folder.mkdir(parents=True, exist_ok=True)
  for name in names:
    (folder / name).write_text(text)


def _content(folder):
  return {path.name: path.read_text() for path in folder.iterdir()}


def _replace(target, text='new', names=('weights', 'config')):
  ours = {'weights', 'config', 'index'}.__contains__
  with export.replace_dir(target, ours=ours) as folder:
    _fill(folder, text, names)


_OLD, _NEW = (
  {name: text for name in ('weights', 'config')} for text in ('old', 'new')
)


def test_files_of_others_stay(tmp_path):
  target = tmp_path / 'policy'
  _fill(target, 'old', ('weights', 'index', 'notes'))
  _replace(target)
  assert _content(target) == _NEW | {'notes': 'old'}


@pytest.mark.parametrize('survived', range(6))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_folder(
  tmp_path, monkeypatch, survived
):
  target = tmp_path / 'policy'
  _fill(target, 'old', ('weights', 'config', 'notes'))
  left = [survived]

  def mortal(function):
    def called(*arguments, **options):
      left[0] -= 1
      if left[0] < 0:
        raise SystemExit  # and at every later change, so nothing is cleaned up
      return function(*arguments, **options)

    return called

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, 'rename', mortal(pathlib.Path.rename))
    patch.setattr(os, 'rename', mortal(os.rename))
    patch.setattr(shutil, 'rmtree', mortal(shutil.rmtree))
    try:
      _replace(target)
    except SystemExit:
      pass
  if target.exists():
    found = _content(target)
    found.pop('notes', None)
    assert found in (_OLD, _NEW)
  _replace(target, 'newer')
  assert _content(target) == dict.fromkeys(_NEW, 'newer') | {'notes': 'old'}
  assert os.listdir(tmp_path) == ['policy']


def test_a_failing_rename_keeps_the_old_folder(tmp_path, monkeypatch):
  target = tmp_path / 'policy'
  _fill(target, 'old')
  rename = pathlib.Path.rename

  def refused(path, new):
    if path.suffix == '.partial':
      raise OSError('refused')
    return rename(path, new)

  monkeypatch.setattr(pathlib.Path, 'rename', refused)
  with pytest.raises(OSError, match='refused'):
    _replace(target)
  assert _content(target) == _OLD
  assert os.listdir(tmp_path) == ['policy']
