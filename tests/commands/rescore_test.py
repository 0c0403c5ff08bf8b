"""`rescore` shows where two scorers differ, on dialogues saved by hand."""

import json
import os

import pytest

from stppo_jax import __main__

_ONE = 'e.g. <answer> Oslo </answer>. Question: q'
_TWO = 'inside <answer> and </answer>, ' + _ONE


def _dialogue(identity, prompt, text, em, **more):
  return {
    'id': identity,
    'question': 'q',
    'golden_answers': ['Oslo'],
    'data_set': 'nq',
    'prompt': prompt,
    'turns': [
      {'text': text, 'observation': '', 'action': 'answer', 'reward': 0.0}
    ],
    'rewards': {'exact_match': em},
    'scores': {'em': em, 'f1': em},
    'status': 'completed',
    **more,
  }


_DIALOGUES = [
  _dialogue('right', _ONE, '<answer>Oslo</answer>', 1.0),
  _dialogue('bare', 'q', '<answer>Oslo</answer>', 1.0),
  _dialogue('silent', _TWO, 'hm', 0.0),
  _dialogue('failed', _ONE, '', 0.0, status='infra_error'),
  _dialogue(
    'choice',
    _ONE,
    '<answer>B</answer>',
    1.0,
    options={'A': 'Rome', 'B': 'Oslo'},
  ),
]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / 'dialogues.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n\n' for row in _DIALOGUES))
  return path


def _rescore(capsys, file, *flags):
  arguments = ['rescore', f'--trajectories={file}', *flags]
  code = __main__.main(arguments)
  out, err = capsys.readouterr()
  return code, out, err


def test_the_scorer_of_search_r1_differs_where_it_has_its_faults(file, capsys):
  code, out, err = _rescore(capsys, file, '--scope=search_r1')
  assert (code, err) == (0, '')
  assert 'saved      em 0.7500' in out and 'search_r1  em 0.7500' in out
  first, second = out.splitlines()[-2:]
  assert first.startswith(f'{file}:3: bare: saved 1, search_r1 0')
  assert second.startswith(f'{file}:5: silent: saved 0, search_r1 1')
  _, out, _ = _rescore(capsys, file, '--scope=search_r1', '--shown=1')
  assert len(out.splitlines()) == 5


def test_the_scorer_that_saved_them_agrees(file, capsys):
  code, out, _ = _rescore(capsys, file, '--scope=response')
  assert code == 0 and out.count('em 0.7500') == 2
  assert '\n0 dialogues differ' in out


def test_a_line_that_is_too_long_is_named(tmp_path, capsys):
  path = tmp_path / 'f.jsonl'
  path.write_text('\n')
  os.truncate(path, 33 << 20)
  code, _, err = _rescore(capsys, path, '--scope=response')
  assert code == 2 and err.count('\n') == 1
  assert err.startswith(f'{path}:2: longer than 33554432 characters')


def test_an_empty_answer_is_not_the_band_the_the(tmp_path, capsys):
  rows = [
    _dialogue(name, _ONE, f'<answer>{answer}</answer>', em)
    | {'golden_answers': ['The The']}
    for name, answer, em in (('empty', '', 0.0), ('band', 'the the', 1.0))
  ]
  path = tmp_path / 'dialogues.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  code, out, _ = _rescore(capsys, path, '--scope=response')
  assert code == 0 and '\n0 dialogues differ' in out
