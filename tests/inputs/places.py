"""The runs, files and folders, sound or not, that `inputs.tsv` names.

A name in braces stands for a path; `{newline}` and `{escape}` for characters.
"""

import pathlib
import shutil

import numpy as np

from stppo_jax import __main__
from tests.commands import lab_calls
from tests.tools.lab import batch_arrays
from tests.training import runs

_QUESTION = '{"question": "Who?", "answers": ["Ada"]}\n'
_PASSAGE = '{"id": "1", "contents": "\\"Ada\\"\\nShe wrote programs."}\n'
# Name to content of small files.
_FILES = {
  'text': 'hello\n',
  'void': '',
  'questions.jsonl': _QUESTION * 3,
  'broken.jsonl': f'{_QUESTION}{{"question": "Who\n',
  'other.jsonl': '{"colour": "blue"}\n',
  'corpus.jsonl': _PASSAGE + _PASSAGE.replace('"1"', '"2"'),
  'twins.jsonl': _PASSAGE * 2,
  'list.jsonl': '[1, 2]\n',
  'table.csv': 'a,b\n1,2\n',
  'mine.py': lab_calls.CONFIG,
  'syntax.py': 'def get_config(:\n',
  'raising.py': 'def get_config(algorithm=""):\n  raise KeyError("oops")\n',
  'nothing.py': 'x = 1\n',
  'number.py': 'def get_config(algorithm=""):\n  return 7\n',
}


def make(root: pathlib.Path, finished: pathlib.Path) -> dict[str, str]:
  """Makes the files below a folder; returns name to path, or to characters."""
  for name, text in _FILES.items():
    (root / name).write_text(text, encoding='utf-8')
  (root / 'binary').write_bytes(np.random.default_rng(0).bytes(999))
  for name in ('run', 'done', 'damaged', 'cut', 'lines'):
    shutil.copytree(finished, root / name, symlinks=True)
  for path in (root / 'damaged' / 'checkpoints').rglob('*'):
    if path.is_file():
      path.write_bytes(path.read_bytes()[:-1] + b'?')
  (root / 'cut' / 'config.json').write_text('{"seed": ', encoding='utf-8')
  with (root / 'lines' / 'metrics.jsonl').open('a', encoding='utf-8') as file:
    file.write('{"step": 4, "critic')
  (root / 'foreign').mkdir()
  (root / 'foreign' / 'config.json').write_text('{}', encoding='utf-8')
  (root / 'foreign' / 'metrics.jsonl').write_text('7\n', encoding='utf-8')
  (root / 'imitated').mkdir()
  record = '{"command": "sft", "run_id": "1", "config_digest": "2"}'
  (root / 'imitated' / 'run.json').write_text(record, encoding='utf-8')
  for name in ('empty', 'two words', 'ünïcode'):
    (root / name).mkdir()
  arrays, *_ = batch_arrays.arrays()
  np.savez(root / 'batch.npz', **arrays)
  # Its groups have rows of unequal reward: pairs.
  batch = runs.packed()
  np.savez(
    root / 'pairs.npz',
    group_ids_B=np.arange(16) // 2,
    **{
      name: np.asarray(getattr(batch, name))
      for name in ('tokens_BL', 'loss_mask_BL', 'rewards_BL')
    },
  )
  whole = (root / 'batch.npz').read_bytes()
  (root / 'half.npz').write_bytes(whole[: len(whole) // 2])
  np.savez(root / 'bare.npz', notes=np.zeros(3))
  command = ['index', f'--corpus={root}/corpus.jsonl', f'--out={root}/index']
  assert __main__.main(command) == 0
  (dialogues,) = sorted((root / 'run').glob('trajectories-*.jsonl'))[:1]
  names = [
    *_FILES,
    'binary',
    'run',
    'done',
    'damaged',
    'cut',
    'lines',
    'foreign',
    'imitated',
  ]
  names += ['empty', 'two words', 'ünïcode', 'batch.npz', 'half.npz']
  names += ['bare.npz', 'pairs.npz', 'index', 'absent']
  return {
    **{name.partition('.')[0]: f'{root}/{name}' for name in names},
    'dialogues': str(dialogues),
    'configs': f'{runs.REPO}/configs',
    'studies': f'{runs.REPO}/studies',
    'model': f'{runs.REPO}/assets/quickstart',
    # Even the superuser cannot read the one and write below the other.
    'unreadable': '/proc/self/mem',
    'readonly': '/proc',
    'newline': '\n',
    'escape': '\x1b[31m',
    'long': 'x' * 5000,
    'tiny': ' '.join(runs.flags()),
    'pairwise': ' '.join(runs.flags(num_steps=None)),
  }
