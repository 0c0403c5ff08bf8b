"""`chat` answers lines of the input by searching, and shows what it found."""

import io
import json

import pytest

from stppo_jax import __main__
from stppo_jax.records import dialogues
from tests.training import question_files
from tests.training import runs

_QUICKSTART = runs.REPO / 'assets' / 'quickstart'
_COUNT = 8


@pytest.mark.slow
def test_questions_are_answered_with_what_was_found(
  tmp_path, monkeypatch, capsys
):
  question_files.write(tmp_path, _COUNT)
  lines = (tmp_path / 'questions.jsonl').read_text().splitlines()
  one_hop = [json.loads(line) for line in lines[:_COUNT]]
  asked = [row['question'] for row in one_hop]
  # An empty line is no question. The last one is too long for the model.
  text = '\n\n'.join(asked) + '\n' + 'why ' * 5000 + '\n'
  monkeypatch.setattr('sys.stdin', io.StringIO(text))
  code = __main__.main(
    [
      'chat',
      f'--checkpoint={_QUICKSTART}',
      f'--config={runs.REPO}/configs/quickstart.py',
      '--config.data.name=jsonl',
      f'--config.data.root={tmp_path}',
      '--config.data.train=questions.jsonl',
      '--config.data.evaluation=questions.jsonl',
      '--config.data.corpus=corpus.jsonl',
      '--config.model.scan_unroll=1',
    ]
  )
  out, err = capsys.readouterr()
  assert code == 0 and 'for example: ' in err
  *replies, too_long, end = out.split('\n\n')
  assert len(replies) == _COUNT and not end
  assert too_long == '= no answer: truncated_length'
  found = 0
  for row, reply in zip(one_hop, replies):
    marks = [line[:1] for line in reply.splitlines()]
    assert marks[0] == '>' and marks[-1] == '='
    assert set(marks) <= set('><=')
    found += any(reply.endswith(f'= {x}') for x in row['answers'])
    assert '<search>' in reply and '\n< ' in reply
  # Greedy, this model answers some four in five.
  assert found > _COUNT // 2


def test_a_reply_shows_the_escapes_of_what_is_no_text():
  turn = {'text': 'a\x1b[2Jb', 'observation': 'c\u202ed\nEOF'}
  record = {'turns': [turn], 'answer': 'e\rf', 'status': 'completed'}
  assert dialogues.render_reply(record, colour=False).splitlines() == [
    r'> a\x1b[2Jb',
    r'< c\u202ed',
    '< EOF',
    r'= e\rf',
  ]
  coloured = dialogues.render_reply(record, colour=True)
  assert '\x1b[' in coloured and '\x1b[2J' not in coloured
  record = {'turns': [], 'answer': None, 'status': 'truncated_turns'}
  reply = dialogues.render_reply(record, colour=False)
  assert reply == '= no answer: truncated_turns\n'
