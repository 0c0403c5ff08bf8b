"""Files of strangers run no code; promises name tests that exist."""

import importlib
import json
import pathlib
import re
import shutil

import pytest

from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import model_files
from tests.training import runs

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_MODEL = _ROOT / 'assets' / 'quickstart'
_CODE = """
import pathlib

pathlib.Path({trace!r}).touch()


class Stranger:
  pass
"""


@pytest.fixture
def model(tmp_path):
  """Returns a copy of a model, which a stranger may have changed."""
  return pathlib.Path(shutil.copytree(_MODEL, tmp_path / 'model'))


def _edit(path, **changes):
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_code_of_a_model_directory_is_run(model, tmp_path):
  trace = tmp_path / 'trace'
  (model / 'stranger.py').write_text(_CODE.format(trace=str(trace)))
  (model / '__init__.py').write_text(_CODE.format(trace=str(trace)))
  names = ('AutoConfig', 'AutoModelForCausalLM')
  _edit(
    model / 'config.json',
    auto_map={name: 'stranger.Stranger' for name in names},
  )
  _edit(
    model / 'tokenizer_config.json',
    auto_map={'AutoTokenizer': [None, 'stranger.Stranger']},
    tokenizer_class='Stranger',
  )
  config = runs.config(model__path=str(model))
  model_files.check(config, model_files.load_tokenizer(model))
  assert not trace.exists()


@pytest.mark.parametrize(
  'template',
  [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__['os'].system('touch trace') }}",
    "{{ cycler.__init__.__globals__.os.listdir('/') }}",
    "{% include '/etc/passwd' %}",
    '{% for i in range(1000000000) %}x{% endfor %}',
  ],
)
def test_a_chat_template_stays_in_its_sandbox(
  model, tmp_path, monkeypatch, template
):
  monkeypatch.chdir(tmp_path)
  # The message comes first: otherwise the template would be refused for that.
  text = "{{ messages[0]['content'] }}" + template
  (model / 'chat_template.jinja').write_text(text)
  tokenizer = tokenizer_lib.Tokenizer.load(model)
  with pytest.raises(ValueError, match='^the chat template fails'):
    tokenizer.encode_prompt('What is the capital of France?')
  assert not pathlib.Path('trace').exists()


@pytest.mark.parametrize('page', ['SECURITY.md', 'docs/reliability.md'])
def test_every_promise_names_a_test_that_exists(page):
  text = (_ROOT / page).read_text('utf-8').partition('## Last measured')[0]
  rows = re.findall(r'^\| (.*) \| (.*) \|$', text, re.MULTILINE)
  promises = [row for row in rows if row[1] not in ('test', '---')]
  assert len(promises) > 10
  for promise, cell in promises:
    names = re.findall(
      r'`(tests/[\w/]+\.py)::(test_\w+)`( \*| \(in part \*\))?', cell
    )
    assert names, promise
    for file, test, slow in names:
      module = importlib.import_module(file[:-3].replace('/', '.'))
      found = getattr(module, test)
      # A page says which ones `make test` leaves out.
      if page != 'SECURITY.md':
        assert slow == _slow_cases(module, found), test


def _slow_cases(module, test):
  """Returns the sign of a test whose cases are slow, all or some; else ""."""
  of_file = getattr(module, 'pytestmark', [])
  marks = [
    *(of_file if isinstance(of_file, list) else [of_file]),
    *getattr(test, 'pytestmark', []),
  ]
  if any(mark.name == 'slow' for mark in marks):
    return ' *'
  parameters = [
    parameter
    for mark in marks
    if mark.name == 'parametrize'
    for parameter in mark.args[1]
  ]
  in_part = any(
    mark.name == 'slow'
    for parameter in parameters
    for mark in getattr(parameter, 'marks', ())
  )
  return ' (in part *)' if in_part else ''
