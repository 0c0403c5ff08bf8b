"""The flags of all `lab` commands, and the page that describes them."""

import json
import pathlib
import re
import shlex

import pytest

from stppo_jax import __main__
from stppo_jax.commands.flags import lab_flags
from stppo_jax.tools.lab import saved_batch
from tests import processes
from tests.commands import lab_calls
from tests.training import runs

_PAGE = (runs.REPO / 'docs' / 'lab.md').read_text(encoding='utf-8')


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'configs').symlink_to(runs.REPO / 'configs')
  blocks = re.findall(r'```text\n(.*?)```', _PAGE, re.DOTALL)
  block, pictures, sampled = blocks
  lines = [shlex.split(line) for line in block.splitlines()]
  # The last of equal flags counts.
  small = {
    'collect': runs.flags()[1:],
    'score': [],
    'advantages': [],
    'compare': ['--algorithms=st_ppo'],  # whose program is there already
    'levels': ['--algorithms=st_ppo'],
  }
  kinds = ['collect', 'score', 'advantages', *3 * ['compare'], 'levels']
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
  collect, values = map(shlex.split, sampled.splitlines())
  small = [*runs.flags()[1:], '--config.rollout.slots=8', '--continuations=2']
  assert __main__.main([*collect[3:], *small]) == 0
  assert __main__.main(values[3:]) == 0
  assert 'ceiling' in capsys.readouterr().out
  (example,) = re.findall(r'```python\n(.*?)```', _PAGE, re.DOTALL)
  done = processes.python('-c', example, cwd='.')
  assert done.stderr == '' and done.stdout.startswith('turn 1: ')
  table = re.findall(r'^\| `(\w+_BL?|kl_\w+)` \| ', _PAGE, re.MULTILINE)
  assert sorted(table) == sorted(saved_batch.ARRAY_KINDS)


def test_the_size_behind_an_algorithm_is_not_compared():
  flags = lab_flags.of_batch(config='', algorithms='')
  words = ['--batch=F', '--config=configs/nq.py:st_ppo,7b']
  lab_flags.parse(flags, words, required='algorithms')
  options = lab_flags.algorithms(flags.algorithms, config=flags.config)
  assert list(options) == ['st_ppo']
