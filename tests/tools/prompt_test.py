"""`prompt` prints the tokens that a run has, and what they are."""

import re

import pytest

from stppo_jax import __main__
from tests.sampling import families
from tests.training import runs

_QUESTION = 'Who is the king of the lake?'
_TOOLS = {'env__name': 'tools', 'data__name': 'arithmetic'}
_LINE = re.compile(r" *(\d+) +(\d+)  (.{12,}?) '(.*)'")


def _shown(capsys, directory, *more, turns=(), **changes):
  """Returns the prompt as text, the sections of tokens, and the other lines."""
  flags = runs.flags(
    model__tokenizer_path=directory,
    env__max_turn_tokens=64,
    env__max_observation_tokens=64,
    env__max_length=2048,
    **changes,
  )
  flags += [f'--question={_QUESTION}', *(f'--turn={turn}' for turn in turns)]
  code = __main__.main(['prompt', *flags, *more])
  out, err = capsys.readouterr()
  assert code == 0, err
  text, *parts = out.split('\n-- ')
  sections = []
  for part in parts:
    title, *lines = part.splitlines()
    found = [_LINE.fullmatch(line) for line in lines]
    tokens = [match.groups() for match in found if match]
    sections.append((title, tokens))
  return text, sections, [x for x in out.splitlines() if not _LINE.fullmatch(x)]


@pytest.fixture
def qwen(tmp_path):
  families.save('Qwen3', tmp_path, added=families.TAGS)
  return tmp_path


def test_each_token_is_shown_with_what_it_is(qwen, capsys):
  search = '<think> a </think><search> the lake </search> more'
  changes = {'prompt__system': 'Be brief.', 'env__prompt_template': ''}
  text, sections, lines = _shown(
    capsys, qwen, turns=[search, 'I do not know'], **changes
  )
  assert text.startswith('<|im_start|>system\nBe brief.<|im_end|>\n')
  assert f'Question: {_QUESTION}\n<|im_end|>\n<|im_start|>assistant\n' in text
  titles = [re.sub(r'\d+ tokens', 'n tokens', title) for title, _ in sections]
  assert titles == [
    'prompt: n tokens',
    'turn 1: n tokens, action search',
    'observation: n tokens, not trained on',
    'turn 2: n tokens, action invalid',
    'observation: n tokens, not trained on',
    'the next turn begins here',
  ]
  rows = [row for _, tokens in sections for row in tokens]
  assert [int(row[0]) for row in rows] == list(range(len(rows)))
  fast = families.loaded(qwen)
  ids = [int(row[1]) for _, tokens in sections[:1] for row in tokens]
  assert ids == fast.encode(text, add_special_tokens=False)
  kinds = [
    {row[3]: row[2].strip() for row in tokens} for _, tokens in sections[:-1]
  ]
  assert kinds[0]['<|im_start|>'] == 'special'
  assert kinds[0]['<search>'] == kinds[1]['<search>'] == 'added tag'
  assert kinds[1]['</search>'] == 'added tag stop'
  assert sections[1][1][-1][3] == '</search>'  # what follows is not written
  assert kinds[2]['<information>'] == 'added tag'
  assert kinds[3]['<|endoftext|>'] == 'special end'
  assert 'stop strings: </search> </answer>' in lines
  (end,) = (line for line in lines if line.startswith('end tokens: '))
  assert end.endswith(' <|endoftext|>')


def test_the_default_turns_show_each_action(qwen, capsys):
  _, sections, lines = _shown(capsys, qwen)
  titles = ' '.join(title for title, _ in sections)
  assert 'action search' in titles and 'action answer' in titles
  assert lines[-3] == '-- the dialogue ends: completed'


@pytest.mark.parametrize(
  ('family', 'template', 'changes', 'note'),
  [
    ('Gemma 2', None, {'prompt__system': 'Be brief.'}, ["begins the user's"]),
    (
      'Qwen3',
      '{{ messages[0].content }}<think>\n',
      {},
      ['leaves <think> open'],
    ),
    ('Gemma 2', None, _TOOLS, ['no chat template describes the tools']),
    ('Qwen3', None, _TOOLS, []),
  ],
)
def test_what_is_easily_overlooked_is_said(
  family, template, changes, note, tmp_path, capsys
):
  families.save(family, tmp_path, template=template)
  _, _, lines = _shown(capsys, tmp_path, **changes)
  notes = [line for line in lines if line.startswith('note: ')]
  assert len(notes) == len(note) and all(x in y for x, y in zip(note, notes))


def test_a_turn_that_is_cut_has_no_stop(qwen, capsys):
  _, sections, _ = _shown(capsys, qwen, turns=['word ' * 200])
  assert sections[1][1][-1][2].strip() == 'cut'
