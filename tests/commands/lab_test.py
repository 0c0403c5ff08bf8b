"""The flags of all `lab` commands, and the page that describes them."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from stppo_jax import __main__
from stppo_jax.commands.flags import lab_flags
from stppo_jax.tools.lab import saved_batch
from tests.commands import lab_calls
from tests.training import runs

_QUICKSTART = str(runs.REPO / 'configs' / 'quickstart.py')


_PAGE = (runs.REPO / 'docs' / 'lab.md').read_text(encoding='utf-8')


@pytest.mark.parametrize(
  ('flags', 'expected'),
  [
    ([], 'lab: no command; choices: collect, score, advantages, compare'),
    (['scor'], 'lab scor: unknown command; did you mean score? choices: '),
    (['score', '--algorithm=st_ppo'], '--batch: missing'),
    (['score', '--batch=F'], '--algorithm: missing'),
    (['score', '--batch=F', '--algorithm='], '--algorithm: missing'),
    (
      ['score', '--batch=F', '--algorithm=st_pp'],
      '--algorithm=st_pp: unknown algorithm; did yo',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--sett=a'],
      '--sett=a: unknown f',
    ),
    (['score', '--batch=F', '--algorithm=st_ppo', 'x'], 'x: not a flag'),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--set'],
      '--set: has no value',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--float64=x'],
      '--float64=x: must be true or false',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--entropy_coefficient=nan'],
      '--entropy_coefficient=nan: must be a number',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--out=absent/O.npz'],
      '--out=absent/O.npz: no such folder: absent',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--out=./F'],
      '--out=./F: is the file of --batch',
    ),
    (
      ['score', '--bach', 'F', '--algorithm=st_ppo'],
      '--bach: unknown flag; did you ',
    ),
    (
      ['score', '--bach=F', '--algorithm=st_ppo'],
      '--bach=F: unknown flag; did you m',
    ),
    (
      ['score', '--batch=F', '--algorithm=a', '--entropy_coefficient=inf'],
      '--entropy_coefficient=inf: must be a finite number',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--advantages=A', '--out=A'],
      '--out=A: is the file of --advantages',
    ),
    (
      ['score', '--batch=F', f'--config={_QUICKSTART}'],
      '--algorithm: missing',
    ),
    (
      ['score', '--batch=F', f'--config={_QUICKSTART}', '--algorithm=st_pp'],
      f'--config={_QUICKSTART}:st_pp: unknown algorithm',
    ),
    (
      ['score', '--batch=F', '--config=absent.py:st_ppo'],
      '--config=absent.py:st_ppo: no such file',
    ),
    (['advantages', '--batch=F', '--estimator=gea'], 'did you mean gae? choic'),
    (['advantages', '--batch=F'], '--estimator: missing'),
    (
      [
        'advantages',
        '--batch=F',
        '--estimator=gigpo',
        f'--config={_QUICKSTART}:grpo',
      ],
      f'=gigpo: the algorithm of --config={_QUICKSTART}:grpo has gro',
    ),  # fmt: skip
    (
      ['advantages', '--batch=F', '--estimator=gae', '--kl_coefficient=1'],
      '--kl_coefficient: goes with --kl only',
    ),
    (
      [
        'advantages',
        '--batch=F',
        '--estimator=gae',
        '--kl=k1',
        '--kl_coefficient=x',
      ],
      '--kl_coefficient=x: must be a number',
    ),  # fmt: skip
    (
      ['compare', '--batch=F', '--algorithms=st_ppo,st_pp'],
      '--algorithms=st_pp: unknown a',
    ),
    (
      ['compare', '--batch=F', '--algorithms=st_ppo:tau'],
      '--algorithms=st_ppo:tau: expected KEY=VALUE',
    ),
    (
      ['compare', '--batch=F', '--algorithms=st_ppo:ratio.levl=turn'],
      "=st_ppo:ratio.levl=turn: no key 'levl' in config.algorithm.ratio;",
    ),
    (['compare', '--batch=F'], '--algorithms: missing'),
    (
      ['compare', '--batch=F', '--algorithms=st_ppo,'],
      '--algorithms=: unknown algorithm; choic',
    ),
    (['collect', '--out=F'], '--config: missing'),
    (['collect', *runs.flags()], '--out: missing'),
    (
      ['collect', *runs.flags(), '--out=F', '--updates=-1'],
      '--updates=-1: mus',
    ),
    (
      ['collect', *runs.flags(), '--out=F', '--updates=x'],
      '--updates=x: must ',
    ),
    (
      ['collect', *runs.flags(), '--out=F', '--workdir=absent'],
      '--workdir=absent: no such folder',
    ),
    (['collect', *runs.flags('st_pp'), '--out=F'], 'unknown algorithm'),
  ],
)
def test_a_wrong_flag_is_one_line_and_2(capsys, flags, expected):
  assert expected in lab_calls.error(capsys, *flags)


def test_a_file_that_cannot_be_read_is_one_line_and_2(tmp_path, capsys):
  (tmp_path / 'text').write_text('no archive', encoding='utf-8')
  for path, expected in (
    (tmp_path / 'absent', 'No such file or directory'),
    (tmp_path, 'Is a directory'),
    (tmp_path / 'text', 'not an npz file\n'),
  ):
    for flags in (
      ('score', '--algorithm=st_ppo'),
      ('advantages', '--estimator=gae'),
      ('compare', '--algorithms=st_ppo'),
    ):
      line = lab_calls.error(capsys, *flags, f'--batch={path}')
      assert line.startswith(f'--batch={path}: {expected}')


def test_help_names_every_subcommand(capsys):
  assert lab_calls.lab('score', '--help') == 0
  out, _ = capsys.readouterr()
  for name in ('collect', 'score', 'advantages', 'compare', 'levels'):
    assert f'python -m stppo_jax lab {name} --' in out


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'configs').symlink_to(runs.REPO / 'configs')
  block, pictures = re.findall(r'```text\n(.*?)```', _PAGE, re.DOTALL)
  lines = [shlex.split(line) for line in block.splitlines()]
  # The last of equal flags counts.
  small = {
    'collect': runs.flags()[1:],
    'score': [],
    'advantages': [],
    'compare': ['--algorithms=st_ppo'],  # whose program is there already
    'levels': ['--algorithms=st_ppo'],
  }
  kinds = ['collect', 'score', 'advantages', 'compare', 'compare', 'levels']
  assert [words[4] for words in lines] == kinds
  for words in lines:
    assert words[:4] == ['python', '-m', 'stppo_jax', 'lab']
    assert __main__.main([*words[3:], *small[words[4]]]) == 0
    out, err = capsys.readouterr()
    # A busy machine may compile for long.
    lines = err.splitlines()
    progress = [line for line in lines if not line.startswith('compil')]
    if words[4] != 'collect':
      assert not progress
    else:
      assert progress == [
        'collecting 16 trajectories with the policy after step 0',
        'annotating them',
        'update 1',
        'update 2',
      ]
      mask = lab_calls.arrays('F.npz')['loss_mask_BL']
      assert re.fullmatch(
        rf'F.npz: 16 rows, \d+ tokens, {mask.sum()} policy tokens\n', out
      )
    if words[4] == 'score':
      assert 0.5 < json.loads(out)['ratio/token/min'] < 1
  # The pictures of the page are of a larger batch.
  for words in map(shlex.split, pictures.splitlines()[1:]):
    out = '--plot=' + pathlib.Path(words[-1]).name
    assert __main__.main([*words[3:], '--batch=F.npz', out]) == 0
    capsys.readouterr()
  (example,) = re.findall(r'```python\n(.*?)```', _PAGE, re.DOTALL)
  done = subprocess.run(
    [sys.executable, '-c', example], capture_output=True, text=True
  )
  assert done.stderr == '' and done.stdout.startswith('turn 1: ')
  table = re.findall(r'^\| `(\w+_BL?|kl_\w+)` \| ', _PAGE, re.MULTILINE)
  assert sorted(table) == sorted(saved_batch.ARRAY_KINDS)


def test_the_size_behind_an_algorithm_is_not_compared():
  flags = lab_flags.of_batch(algorithms='')
  words = ['--batch=F', '--config=configs/nq.py:st_ppo,7b']
  lab_flags.parse(flags, words, required=('algorithms',))
  options = lab_flags.algorithms(flags.algorithms, config=flags.config)
  assert list(options) == ['st_ppo']
