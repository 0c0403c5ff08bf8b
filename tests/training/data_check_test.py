"""Data that a run cannot use is refused or named before anything is written."""

import json

import pytest

from stppo_jax.training import components
from tests.training import runs

_FILES = {
  'data__name': 'jsonl',
  'data__train': 'train.jsonl',
  'data__corpus': 'corpus.jsonl',
  'data__tokenizer_vocab_size': 300,
  'env__max_length': 1200,
  'env__max_turn_tokens': 8,
  'evaluate__every': 0,
  'rollout__length_bucket': 1200,
}
_QUESTION = {'dataset': 'own', 'kind': 'open', 'answers': ['x']}


def _write(folder, questions, name='train.jsonl'):
  lines = [
    json.dumps({**_QUESTION, 'id': str(n), **question})
    for n, question in enumerate(questions)
  ]
  folder.mkdir(exist_ok=True)
  (folder / name).write_text('\n'.join(lines), encoding='utf-8')
  passage = {'id': '1', 'title': 'A', 'text': 'text'}
  (folder / 'corpus.jsonl').write_text(json.dumps(passage), encoding='utf-8')


def _train(folder, **changes):
  return runs.train(
    folder / 'run', **{**_FILES, 'data__root': str(folder / 'data'), **changes}
  )


@pytest.mark.parametrize('name', ['train', 'evaluation'])
def test_prompts_that_are_all_too_long_are_refused(tmp_path, capsys, name):
  _write(tmp_path / 'data', [{'question': 'q?'}] * 16)
  long = 'why ' * 300
  _write(
    tmp_path / 'data',
    [{'question': f'{long}{n}?'} for n in range(16)],
    f'{name}.jsonl',
  )
  changes = {f'data__{name}': f'{name}.jsonl'}
  assert _train(tmp_path, **changes) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'data.{name}')
  count = 16 if name == 'train' else 8  # evaluate.num_questions
  assert f'{count} of {count} prompts fill the context, env.max_length=' in line
  assert not (tmp_path / 'run').exists()


def test_prompts_that_are_too_long_and_empty_answers_are_named(tmp_path):
  questions = [{'question': 'q?'}] * 14 + [{'question': 'why ' * 300}] * 2
  questions[3] = {'question': 'q?', 'answers': ['the']}
  _write(tmp_path / 'data', questions)
  config = runs.config(**_FILES, data__root=str(tmp_path / 'data'))
  empty, long = components.build(config).notes
  assert empty.startswith(f'{tmp_path}/data/train.jsonl:4: nothing is left of')
  assert long.startswith('data.train: 2 of 16 prompts fill the context')
