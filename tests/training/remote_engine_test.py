"""A run whose turns a server writes."""

import contextlib
import shutil

import pytest

from stppo_jax.http import server as http_server
from stppo_jax.models import functional
from stppo_jax.training import components
from stppo_jax.training import model_files
from tests.models import tiny
from tests.sampling.remote import model_server
from tests.training import runs


@contextlib.contextmanager
def _served():
  """Serves a model of a run's shape."""
  settings = runs.config()
  questions = components.build_questions(settings)
  tokenizer = model_files.build_tokenizer(settings, questions)
  policy = functional.Model(runs.shape(settings), 'vocabulary')
  model = model_server.ModelServer(
    policy,
    tiny.params(policy),
    token_bytes=tokenizer.token_bytes(),
    max_length=settings.env.max_length,
  )
  with http_server.EmbeddedServer(model.app) as server:
    yield {
      'rollout__engine': 'remote',
      'rollout__remote__url': server.url,
      'rollout__remote__model': 'tiny',
    }


@pytest.mark.slow
def test_weights_that_cannot_be_published_end_a_saved_run(
  tmp_path, monkeypatch, capsys
):
  temporary, workdir = tmp_path / 'temporary', tmp_path / 'run'
  temporary.mkdir()
  monkeypatch.setattr('tempfile.tempdir', str(temporary))

  def act(moment):
    if moment == ('updated', 2):
      # The folder of the weights is gone, and cannot be made again.
      (folder,) = temporary.iterdir()
      shutil.rmtree(folder)
      folder.touch()

  with _served() as changes:
    changes |= {'checkpoint__every': 100, 'evaluate__every': 0}
    assert runs.train(workdir, act, **changes) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'{temporary}/stppo_jax-weights-')
    assert 'step 2 is saved' in line
    for left in temporary.iterdir():
      left.unlink()
    assert runs.train(workdir, **changes) == 0
  assert [line['step'] for line in runs.metrics(workdir)] == [1, 2, 3]
