"""A run from a model of the Hugging Face Hub."""

import json

import pytest

from stppo_jax import hub as hub_lib
from tests.training import runs


@pytest.mark.slow
def test_a_resumed_run_has_the_commit_that_it_began_with(
  hub, finished, tmp_path
):
  """Also if the branch has moved to weights that fit no run."""
  commit = hub.add('org/tiny', finished / 'policy')
  changes = {'model__path': 'org/tiny', 'model__reference_path': 'org/tiny'}
  workdir = tmp_path / 'run'
  assert runs.train(workdir, num_steps=1, **changes) == 0
  hub.models['org/tiny'].commit({'config.json': b'{}'})
  for cached in hub_lib.CACHED:
    cached.cache_clear()  # as in another process
  asked = len(hub.requests)
  assert runs.train(workdir, num_steps=2, **changes) == 0
  assert len(hub.requests) == asked  # the cache has all of it
  record = json.loads((workdir / 'config.json').read_text())
  assert record['model']['path'] == f'org/tiny@{commit}'
  assert record['model']['reference_path'] == f'org/tiny@{commit}'
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(lines[-1])['step'] == 2
