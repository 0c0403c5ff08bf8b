"""A few rows of every published data set, in the formats of their authors.

The words are made up; the fields and the forms of the values are the authors'.
"""

import contextlib
import functools
import http.server
import io
import json
import pathlib
import tarfile
import threading
import zipfile

NUM_ROWS = 24


def _lines(rows):
  return ''.join(json.dumps(row) + '\n' for row in rows).encode()


def _nq(first):
  return _lines(
    {'question': f'how deep is lake {n}', 'answer': [f'{n} metres', str(n)]}
    for n in range(first, first + NUM_ROWS)
  )


def _qed(first):
  return _lines(
    {
      'example_id': n,
      'title_text': f'Lake {n}',
      'question_text': f'how deep is lake {n}',
      'paragraph_text': f'Lake {n} , a lake , is {n} metres deep .',
      'original_nq_answers': [
        [{'string': f'{n} metres'}],
        [{'string': f'{n}'}, {'string': 'metres deep'}],
      ],
      'annotation': {'explanation_type': 'none' if n % 8 else 'multi_sentence'},
    }
    for n in range(first, first + NUM_ROWS)
  )


def _triviaqa(first):
  names = lambda n: [f'Lake {n}', f'The Lake {n}', f'Lake {n}']
  rows = [
    {
      'Answer': {'Aliases': names(n), 'Value': f'Lake {n}'},
      'EntityPages': [],
      'Question': f'Which lake is {n} metres deep?',
      'QuestionId': f'qf_{n}',
    }
    for n in range(first, first + NUM_ROWS)
  ]
  return json.dumps({'Data': rows, 'Domain': 'Web'}).encode()


def _popqa():
  rows = ['id\tsubj\tprop\tobj\tquestion\tpossible_answers']
  rows += [
    f"{4222362 + n}\tPoet {n}\toccupation\tpoet\tWhat is Poet {n}'s occupation?"
    '\t"[""poet"", ""writer"", ""poet""]"'
    for n in range(NUM_ROWS)
  ]
  return '\n'.join([*rows, '']).encode()


def _paragraphs(n):
  return [
    [f'River {n}', [f'River {n} flows into Lake {n}.', ' It is long.']],
    [f'Lake {n}', [f'Lake {n} is {n} metres deep.']],
    ['Hill', ['A hill is no lake.']],
  ]


def _hotpotqa(first):
  rows = [
    {
      '_id': f'5a{n:04d}',
      'answer': f'{n} metres',
      'question': f'How deep is the lake that river {n} flows into?',
      'supporting_facts': [[f'River {n}', 0], [f'Lake {n}', 0]],
      'context': _paragraphs(n),
      'level': 'hard',
    }
    for n in range(first, first + NUM_ROWS)
  ]
  return json.dumps(rows).encode()


def _musique(first):
  return _lines(
    {
      'id': f'2hop__{n}_{n + 1}',
      'paragraphs': [
        {'title': x, 'paragraph_text': ' '.join(text), 'is_supporting': i < 2}
        for i, (x, text) in enumerate(_paragraphs(n))
      ],
      'question': f'How deep is the lake that river {n} flows into?',
      'question_decomposition': [{'id': 1}, {'id': 2}],
      'answer': f'{n} metres',
      'answer_aliases': [f'{n} m'],
    }
    for n in range(first, first + NUM_ROWS)
  )


def _bamboogle():
  rows = [f'"Who, then, was king after king {n}?",King {n}' for n in range(9)]
  return '\r\n'.join(['\ufeffQuestion,Answer', *rows]).encode()


_TEXTS = ['aorta', 'liver', 'lung', 'skin']


def _medqa(first):
  return _lines(
    {
      'question': f'Case {n}: which organ?',
      'answer': _TEXTS[n % 4],
      'options': dict(zip('ABCD', _TEXTS)),
      'answer_idx': 'ABCD'[n % 4],
    }
    for n in range(first, first + NUM_ROWS)
  )


def _medmcqa(first):
  return _lines(
    {
      'question': f'Case {n}: which organ?',
      'exp': None,
      'cop': n % 4 + 1,
      **{f'op{letter}': text for letter, text in zip('abcd', _TEXTS)},
      'id': f'1ab-{n}',
    }
    for n in range(first, first + NUM_ROWS)
  )


def _pubmedqa():
  decisions = ('yes', 'no', 'maybe')
  return json.dumps(
    {
      f'{21645374 + n}': {
        'QUESTION': f'Does drug {n} help?',
        'CONTEXTS': [f'We gave drug {n}.', f'{n} of 99 were better.'],
        'LABELS': ['BACKGROUND', 'RESULTS'],
        'YEAR': '2011',
        'final_decision': decisions[n % 3],
      }
      for n in range(NUM_ROWS)
    },
    indent=4,
  ).encode()


def _mmlu(subject):
  return ''.join(
    f'"{subject} {n}, which?",{",".join(_TEXTS)},{letter}\n'
    for n, letter in enumerate('ABCD')
  ).encode()


_SUBJECTS = (
  'anatomy clinical_knowledge college_biology college_medicine '
  'medical_genetics professional_medicine'
).split()


def _mmlu_files():
  return {
    f'data/{folder}/{subject}_{folder}.csv': _mmlu(subject)
    for folder in ('dev', 'val', 'test')
    for subject in [*_SUBJECTS, 'astronomy']
  }


def _both(rows, train, held_out):
  """Returns the files of the two splits of a data set, by name."""
  return {train: rows(100), held_out: rows(500)}


def write(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Writes what the authors serve; returns the folder of each data set.

  The folders hold files and archives under the names that they have on the web.
  """
  files = {
    'nq': _both(_nq, 'NQ-open.train.jsonl', 'NQ-open.dev.jsonl'),
    'qed': _both(_qed, 'qed-train.jsonlines', 'qed-dev.jsonlines'),
    'triviaqa': {
      'triviaqa-unfiltered.tar.gz': {
        **_both(
          _triviaqa,
          'triviaqa-unfiltered/unfiltered-web-train.json',
          'triviaqa-unfiltered/unfiltered-web-dev.json',
        ),
        'triviaqa-unfiltered/._unfiltered-web-dev.json': b'\0',
      }
    },
    'popqa': {'popQA.tsv': _popqa()},
    'hotpotqa': _both(
      _hotpotqa, 'hotpot_train_v1.1.json', 'hotpot_dev_distractor_v1.json'
    ),
    '2wikimultihopqa': {
      'data_ids_april7.zip': _both(
        _hotpotqa, 'data_ids_april7/train.json', 'data_ids_april7/dev.json'
      )
    },
    'musique': _both(
      _musique, 'musique_ans_v1.0_train.jsonl', 'musique_ans_v1.0_dev.jsonl'
    ),
    'bamboogle': {'bamboogle.csv': _bamboogle()},
    'medqa': _both(
      _medqa, 'phrases_no_exclude_train.jsonl', 'phrases_no_exclude_test.jsonl'
    ),
    'medmcqa': _both(_medmcqa, 'train.json', 'dev.json'),
    'pubmedqa': {
      'ori_pqal.json': _pubmedqa(),
      'test_ground_truth.json': json.dumps(
        {f'{21645374 + n}': 'yes' for n in range(0, NUM_ROWS, 2)}
      ).encode(),
    },
    'mmlu-med': {'data.tar': _mmlu_files()},
  }
  for name, served in files.items():
    (folder / name).mkdir(parents=True)
    for file, content in served.items():
      _write(folder / name / file, content)
  return {name: folder / name for name in files}


class _Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, format, *args):
    pass


@contextlib.contextmanager
def served(folder: pathlib.Path):
  """Yields the address of a server of a folder."""
  handler = functools.partial(_Quiet, directory=str(folder))
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_port}'
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def _write(path, content):
  if isinstance(content, bytes):
    path.write_bytes(content)
  elif path.suffix == '.zip':
    with zipfile.ZipFile(path, 'w') as archive:
      for name, data in content.items():
        archive.writestr(name, data)
  else:
    mode = 'w:gz' if path.suffix == '.gz' else 'w'
    with tarfile.open(path, mode) as archive:
      for name, data in content.items():
        info = tarfile.TarInfo(name)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
