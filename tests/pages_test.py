"""The pages that add something, followed to the letter in a copy."""

import re
import shlex

import pytest

from tests import pages

_PAGES = (
  *('adding_an_algorithm', 'adding_an_environment'),
  'adding_a_model_family',
)
_STEPS = [step for page in _PAGES for step in pages.steps(page)]
# They look at tables that the pages extend: at their names, at what is recorded
# and generated of them, and at the files themselves.
_TESTS = (
  *('configs', 'envs', 'commands', 'algorithm_pages_test.py'),
  *('additions_test.py', 'pages_test.py', 'layers_test.py', 'hygiene_test.py'),
  *('docs_test.py', 'install_test.py'),
)


def _followed(page, root):
  """Follows a page; returns command to output."""
  for step in pages.steps(page):
    step.apply(root)
  outputs = {}
  for words in pages.commands(page):
    done = pages.run(words, root)
    assert done.returncode == 0, f'{words}\n{done.stdout}{done.stderr}'
    outputs[shlex.join(words)] = done.stdout
  return outputs


@pytest.mark.parametrize('page', _PAGES)
def test_every_block_of_code_is_a_step(page):
  blocks = re.findall(r'```(?:python|text|json)\n', pages.text(page))
  assert len(pages.steps(page)) == len(blocks) > 0


@pytest.mark.parametrize('step', _STEPS, ids=lambda s: f'{s.path}:{s.line}')
def test_every_place_is_there_once(step, request):
  if step.line:
    text = (request.config.rootpath / step.path).read_text(encoding='utf-8')
    assert [x.strip() for x in text.splitlines()].count(step.line) == 1


# Their tests compile for a minute. In `make test`, `additions_test.py` takes
# the same steps, makes the documents and builds what was added.
@pytest.mark.slow
def test_who_follows_both_pages_has_what_they_add_and_no_failing_test(tmp_path):
  pages.copy(tmp_path)
  document = tmp_path / 'docs' / 'algorithms.md'
  before = document.read_text(encoding='utf-8')
  outputs = _followed('adding_an_algorithm', tmp_path)
  after = document.read_text(encoding='utf-8')
  assert '### `log_ppo`' in after and '### `log_ppo`' not in before
  choices = (tmp_path / 'docs' / 'choices' / 'bounds.md').read_text('utf-8')
  assert '`width=0.2`' in choices
  tests = next(x for words, x in outputs.items() if ' pytest ' in words)
  # The tests of bounds, the page's three, those of every algorithm and those
  # of the generated pages.
  passed = re.search(r'(\d+) passed', tests)
  assert passed and int(passed[1]) >= 35, tests
  config = next(x for words, x in outputs.items() if ' config ' in words)
  assert 'algorithm.bounds.width = 0.1' in config.splitlines()
  assert "algorithm.bounds.name = 'logarithmic'" in config.splitlines()
  misspelt = 'python -m stppo_jax config --config.algorithm.bounds.widht=0.1'
  config = '--config=configs/quickstart.py:log_ppo'
  done = pages.run([*misspelt.split(), config], tmp_path)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert 'widht' in line and 'did you mean width?' in line

  _followed('adding_an_environment', tmp_path)
  metrics = (tmp_path / 'runs' / 'guess' / 'metrics.jsonl').read_text('utf-8')
  assert 'env/number_of_guesses' in metrics and 'score/guessed' in metrics

  tests = [f'tests/{name}' for name in _TESTS]
  pytest_words = 'python -m pytest -q -n 2 --dist worksteal'.split()
  done = pages.run([*pytest_words, '-m', 'not slow', *tests], tmp_path)
  assert done.returncode == 0, done.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_who_adds_a_family_has_models_that_agree_with_transformers(tmp_path):
  pytest.importorskip('torch', exc_type=ImportError)
  pages.copy(tmp_path)
  (output,) = _followed('adding_a_model_family', tmp_path).values()
  passed = re.search(r'(\d+) passed', output)
  # Two cases in rows of three lengths, from a cache, and exported.
  assert passed and int(passed[1]) == 10, output
