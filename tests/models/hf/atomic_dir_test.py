"""A folder is the old or the new one, wherever the writer is interrupted."""

import os
import pathlib
import shutil

import pytest

from stppo_jax.models.hf import export

_FILES = ('weights', 'config', 'index')
_OLD = dict.fromkeys(_FILES, 'old')
_NEW = dict.fromkeys(('weights', 'config'), 'new')


def _fill(folder, text, names):
  folder.mkdir(parents=True, exist_ok=True)
  for name in names:
    (folder / name).write_text(text)


def _content(folder):
  return {path.name: path.read_text() for path in folder.iterdir()}


def _replace(target, text='new'):
  with export.replace_dir(target, ours=_FILES.__contains__) as folder:
    _fill(folder, text, ('weights', 'config'))


@pytest.mark.parametrize('survived', range(6))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_folder(
  tmp_path, monkeypatch, survived
):
  target = tmp_path / 'policy'
  _fill(target, 'old', (*_FILES, 'notes'))
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
  # Files of others stay.
  assert _content(target) == dict.fromkeys(_NEW, 'newer') | {'notes': 'old'}
  assert os.listdir(tmp_path) == ['policy']


def test_a_failing_rename_keeps_the_old_folder(tmp_path, monkeypatch):
  target = tmp_path / 'policy'
  _fill(target, 'old', _FILES)
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
