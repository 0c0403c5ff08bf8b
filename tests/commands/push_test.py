"""`export --push_to_hub`: what would be pushed, and what is."""

import pytest
import safetensors.numpy

from stppo_jax import __main__
from stppo_jax.models.hf import load
from tests.storage import hub as stand_in
from tests.training import runs

_NAME = 'me/small'
pytestmark = [
  pytest.mark.slow,
  # Of the library, whose client means to rename an argument.
  pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@pytest.fixture(scope='module')
def base(finished, tmp_path_factory):
  """A folder with a model whose card tells its licence."""
  folder = tmp_path_factory.mktemp('base')
  for path in (finished / 'policy').iterdir():
    (folder / path.name).write_bytes(path.read_bytes())
  (folder / 'LICENSE').write_text('Do what you like.\n')
  # No UTF-8, as some cards on the Hub.
  (folder / 'README.md').write_bytes(
    b'---\nlanguage: en\nlicense: other\nlicense_name: liberal\n---\n'
    b'# B\xe4se\nlicense: none of the head\n'
  )
  return folder


def _export(workdir, out, *flags):
  return __main__.main(
    ['export', f'--workdir={workdir}', f'--out={out}', *flags]
  )


def test_a_policy_is_pushed_with_a_card_of_its_run(
  hub, base, tmp_path, capsys, monkeypatch
):
  """First what would be pushed is shown, and nothing is sent."""
  monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
  commit = hub.add('org/base', base)
  run, out = tmp_path / 'run', tmp_path / 'out'
  changes = {'model__path': 'org/base', 'num_steps': 2}
  assert runs.train(run, **changes, retrieval__topk=2) == 0
  asked = len(hub.requests)
  capsys.readouterr()
  assert _export(run, out, f'--push_to_hub={_NAME}') == 0
  shown = capsys.readouterr().out
  assert f'would push model.safetensors: {1:,}'[:-1] in shown
  assert f'to {hub.address}/{_NAME} (if this repository is new, it' in shown
  assert len(hub.requests) == asked
  card = (out / 'README.md').read_text()
  head, _, text = card.removeprefix('---\n').partition('\n---\n')
  assert head.splitlines() == [
    'license: other',
    'license_name: liberal',
    'base_model: org/base',
    'base_model_relation: finetune',
    'library_name: transformers',
    'pipeline_tag: text-generation',
    'tags:',
    '- stppo_jax',
  ]
  assert f'[org/base](https://huggingface.co/org/base) at {commit}' in text
  assert '![Learning curve](learning_curve.png)' in text
  assert '| data.name | synthetic\\_wiki |' in text
  assert '| retrieval.topk | 2 |' in text
  assert 'The score of the evaluation after step 2 is 0.000.' in text
  assert str(tmp_path) not in text
  (out / 'README.md').write_text(card + 'By me.\n')
  assert _export(run, out, f'--push_to_hub={_NAME}', '--yes') == 0
  shown = capsys.readouterr().out
  assert f'pushed: {hub.address}/{_NAME}/commit/' in shown
  (created,) = hub.created
  assert created['visibility'] == 'private'
  model = hub.models[_NAME]
  files = model.commits[model.refs['main']]
  assert files.keys() - {'.gitattributes'} == {
    x.name for x in out.iterdir() if x.name != 'export.json'
  }
  assert {'LICENSE', 'learning_curve.png', 'tokenizer.json'} <= files.keys()
  assert files['README.md'].endswith(b'By me.\n')
  # It is a model of the Hub like any other.
  shape = load.read_config(_NAME)
  ours = safetensors.numpy.load_file(out / 'model.safetensors')
  theirs = load.read_params(_NAME, shape)
  assert (ours['model.embed_tokens.weight'] == theirs['embedding']).all()


def test_weights_of_an_earlier_push_do_not_stay(
  hub, finished, tmp_path, monkeypatch
):
  monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
  hub.models[_NAME] = stand_in.Repository()
  index = 'model.safetensors.index.json'
  hub.models[_NAME].commit({index: b'{}', 'notes.md': b'Mine.'})
  flags = f'--push_to_hub={_NAME}', '--yes'
  assert _export(finished, tmp_path / 'out', *flags) == 0
  model = hub.models[_NAME]
  files = model.commits[model.refs['main']]
  assert index not in files
  assert files['notes.md'] == b'Mine.'
  card = files['README.md'].decode()
  assert 'license' not in card.partition('\n---\n')[0]
  assert not hub.created


def test_a_push_that_is_refused_leaves_the_export(
  hub, finished, tmp_path, capsys, monkeypatch
):
  monkeypatch.delenv('HF_TOKEN', raising=False)
  out = tmp_path / 'out'
  assert _export(finished, out, f'--push_to_hub={_NAME}', '--yes') == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line == (
    f'{_NAME}: {hub.address} refuses: log in with `hf auth login` or set '
    'HF_TOKEN'
  )
  assert (out / 'model.safetensors').is_file()
