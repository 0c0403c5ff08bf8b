"""`lab` as users call it: four commands, their files, and every error."""

import json
import math
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.analysis import batch_file
from stppo_jax.analysis import saved_batch
from tests.analysis import batch_arrays
from tests.rl import batches
from tests.rl import loss_twin
from tests.training import runs

_TAU = 'correction.clipping_bias.tau'
_QUICKSTART = str(runs.REPO / 'configs' / 'quickstart.py')
_PAGE = (runs.REPO / 'docs' / 'lab.md').read_text(encoding='utf-8')


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  """A file of any origin."""
  arrays, *_ = batch_arrays.arrays()
  path = tmp_path_factory.mktemp('file') / 'F.npz'
  np.savez(path, notes=np.zeros(3), **arrays)
  return path


def _lab(*flags):
  return __main__.main(['lab', *map(str, flags)])


def _metrics(capsys, *flags):
  metrics, err = _told(capsys, *flags)
  assert err == ''
  return metrics


def _told(capsys, *flags):
  """What a command computes, and what it has to say about that."""
  code = _lab(*flags)
  out, err = capsys.readouterr()
  assert (code, out.count('\n')) == (0, 1), err

  def refuse(constant):
    raise AssertionError(constant)

  return json.loads(out, parse_constant=refuse), err


def _error(capsys, *flags):
  assert _lab(*flags) == 2
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1, err
  return err


def _arrays(path):
  with np.load(path, allow_pickle=False) as archive:
    return dict(archive)


def test_score_is_the_twin(file, tmp_path, capsys):
  _, batch, logprobs, entropy = batch_arrays.arrays()
  out = tmp_path / 'O.npz'
  metrics = _metrics(
    capsys, 'score', '--batch', file, '--algorithm=st_ppo', '--float64',
    '--set', f'{_TAU}=1.1', '--set=ratio.gradient=token',
    '--set', 'bounds.clip_low=0.1', f'--out={out}',
  )  # fmt: skip
  row = batches.row_of(
    'st_ppo',
    correction__clipping_bias__tau=1.1,
    ratio__gradient='token',
    bounds__clip_low=0.1,
  )
  twin = loss_twin.policy_loss(row, logprobs, entropy, batch, 0.0)
  assert metrics['loss'] == pytest.approx(twin.loss, rel=1e-12)
  found = _arrays(out)
  assert found.keys() == {
    'loss',
    'dloss_dlogprobs_BL',
    'ratio_BL',
    'weights_BL',
    'clipped_BL',
  }
  assert found['loss'] == metrics['loss']
  assert found['dloss_dlogprobs_BL'].dtype == np.float64
  np.testing.assert_array_equal(found['clipped_BL'], twin.cut)
  np.testing.assert_allclose(found['weights_BL'], twin.scales, rtol=1e-12)
  assert metrics['actor/entropy'] == pytest.approx(
    entropy[batch.loss_mask_BL].mean()
  )
  for level in ('token', 'turn', 'sentence', 'sequence'):
    assert metrics[f'ratio/{level}/ess'] <= 1
  assert {'stab/rho', 'actor/pg_clipfrac', 'mismatch/k3'} <= metrics.keys()


def test_an_infinite_tau_and_single_precision(file, tmp_path, capsys):
  corrected = _metrics(
    capsys, 'score', f'--batch={file}', '--algorithm=st_ppo',
    f'--set={_TAU}=inf', f'--out={tmp_path}/a',
  )  # fmt: skip
  plain = _metrics(
    capsys,
    'score',
    f'--batch={file}',
    '--algorithm=turn_ppo',
    f'--out={tmp_path}/b',
  )
  assert corrected == pytest.approx(plain, rel=1e-6, abs=1e-7)
  a, b = _arrays(tmp_path / 'a'), _arrays(tmp_path / 'b')
  assert a['dloss_dlogprobs_BL'].dtype == np.float32
  for name in a:
    np.testing.assert_allclose(a[name], b[name], rtol=1e-6)


def test_an_entropy_bonus_is_in_the_loss(file, capsys):
  flags = 'score', f'--batch={file}', '--algorithm=st_ppo'
  without = _metrics(capsys, *flags)
  bonus = _metrics(capsys, *flags, '--entropy_coefficient', '0.25')
  lower = without['loss'] - 0.25 * without['actor/entropy']
  assert bonus['loss'] == pytest.approx(lower)


def test_a_block_brings_its_options(file, capsys):
  metrics = _metrics(
    capsys, 'score', f'--batch={file}', '--algorithm=token_ppo',
    '--set=bounds.positive_share=0.99', '--set=bounds.name=balanced',
    '--set=correction.names=("tis", "icepop")', '--set=kl.where=nowhere',
  )  # fmt: skip
  assert metrics['bounds/high'] == pytest.approx(3.0)


def test_advantages_by_hand(tmp_path, capsys):
  arrays = {
    'turn_ids_BL': np.array([[0, 1, 0, 3, 3, 0]]),  # turn 2 is empty
    'loss_mask_BL': np.array([[0, 1, 0, 1, 1, 0]]),
    'rewards_BL': np.array([[9.0, 0, 9, 0, 1, 9]]),
    'values_BL': np.array([[9.0, 0.5, np.nan, 0.25, 0, 9]]),
  }
  np.savez(tmp_path / 'F.npz', **arrays)
  metrics = _metrics(
    capsys, 'advantages', f'--batch={tmp_path}/F.npz', '--estimator', 'gae',
    '--set', 'gamma=1', '--set', 'lambda_=0.5', '--set', 'whiten=none',
    '--out', tmp_path / 'A.npz', '--float64',
  )  # fmt: skip
  # delta = 0.25 - 0.5, 0 - 0.25, 1 - 0
  third, second = 1.0, -0.25 + 0.5 * 1.0
  first = -0.25 + 0.5 * second
  found = _arrays(tmp_path / 'A.npz')
  assert found.keys() == {'advantages_BL', 'returns_BL', 'value_mask_BL'}
  assert found['advantages_BL'].tolist() == [[0, first, 0, second, third, 0]]
  returns = [0, first + 0.5, 0, second + 0.25, third, 0]
  assert found['returns_BL'].tolist() == [returns]
  assert metrics['advantages/max'] == 1 and metrics['returns/min'] == 0.375
  spread = np.std([first, second, third], ddof=1)
  assert metrics['advantages/std'] == pytest.approx(spread)


def test_compare_as_a_table_and_as_json(file, capsys):
  names = ['turn_ppo', 'st_ppo']
  rows = '--algorithms=turn_ppo,st_ppo,turn_ppo'
  found = _metrics(capsys, 'compare', f'--batch={file}', rows, '--json')
  assert list(found['rows']) == names
  for a in names:
    assert found['rows'][a].keys() >= {'loss', 'actor/grad_norm', 'stab/rho'}
    assert 0 <= found['rows'][a]['silenced'] < 1
    for b in names:  # the scale of all terms turns nothing
      assert found['cosines'][a][b] == pytest.approx(1, abs=1e-6)
  assert _lab('compare', f'--batch={file}', rows) == 0
  out, err = capsys.readouterr()
  assert err == ''
  assert [line.split()[0] for line in out.splitlines()[1:3]] == names
  assert f'{found["rows"]["st_ppo"]["silenced"]:.2%}' in out


def test_settings_side_by_side(file, capsys):
  tight = f'st_ppo:{_TAU}=1.1:ratio.gradient=token'
  several = 'st_ppo:correction.names=[tis,clipping_bias]'
  rows = f'--algorithms=st_ppo,{tight},{several},{tight}'
  found = _metrics(capsys, 'compare', f'--batch={file}', rows, '--json')
  assert list(found['rows']) == ['st_ppo', tight, several]
  alone = _metrics(
    capsys, 'score', f'--batch={file}', '--algorithm=st_ppo',
    f'--set={_TAU}=1.1', '--set=ratio.gradient=token',
  )  # fmt: skip
  del found['rows'][tight]['silenced']
  assert found['rows'][tight] == alone
  losses = {metrics['loss'] for metrics in found['rows'].values()}
  assert len(losses) == 3
  assert _lab('compare', f'--batch={file}', rows) == 0
  out, _ = capsys.readouterr()
  assert [line.split()[0] for line in out.splitlines()[1:4]] == [
    'st_ppo', tight, several
  ]  # fmt: skip
  flag = '--algorithms=token_ppo,st_ppo:ratio.level=trun'
  line = _error(capsys, 'compare', f'--batch={file}', flag)
  assert line.startswith(
    '--algorithms=st_ppo:ratio.level=trun: must be one of token'
  )


_CONFIG = """
from stppo_jax.configs import base
def get_config(algorithm='st_ppo'):
  config = base.get_config(algorithm)
  config.algorithm.correction.clipping_bias.tau = 1.1
  config.algorithm.bounds.clip_low = 0.05
  if row == 'st_ppo':
    config.algorithm.advantage.lambda_ = 0.5
  return config
"""


@pytest.fixture
def config(tmp_path):
  """A file that gives its rows other options than the table."""
  (tmp_path / 'mine.py').write_text(_CONFIG, encoding='utf-8')
  return tmp_path / 'mine.py'


def test_a_row_has_the_options_of_a_run(file, config, capsys):
  flags = 'score', f'--batch={file}', '--float64'
  changes = '--set=bounds.clip_low=0.05', f'--set={_TAU}=1.1'
  table = _metrics(capsys, *flags, '--algorithm=st_ppo', *changes)
  assert table != _metrics(capsys, *flags, '--algorithm=st_ppo')
  flag = f'--config={config}'
  assert _metrics(capsys, *flags, '--algorithm=st_ppo', flag) == table
  assert _metrics(capsys, *flags, f'{flag}:st_ppo') == table
  # A row that is named goes before the one of the file, a setting before both.
  assert _metrics(capsys, *flags, '--algorithm=st_ppo', f'{flag}:gspo') == table
  other = _metrics(capsys, *flags, f'{flag}:st_ppo', f'--set={_TAU}=inf')
  assert other['stab/scale'] == 1 > table['stab/scale']

  rows = f'--algorithms=st_ppo,st_ppo:{_TAU}=inf'
  found = _metrics(
    capsys, 'compare', f'--batch={file}', '--float64', '--json', rows, flag
  )['rows']
  for metrics, expected in zip(found.values(), (table, other), strict=True):
    del metrics['silenced']
    assert metrics == expected


def test_a_config_that_cannot_be_is_one_line_and_2(file, config, capsys):
  flags = 'score', f'--batch={file}', f'--config={config}:st_ppo'
  for old, new, expected in (
    ('tau = 1.1', "tau = 'high'", f'--config={config}:st_ppo: fails with Type'),
    (
      'tau = 1.1',
      'tau = -1.0',
      '--algorithm=st_ppo: algorithm.correction.clipping_',
    ),
    ('return config', 'return config.optimizer', 'fails with AttributeError'),
    ('return config', 'return config.sft', 'has no algorithm.advantage.name'),
  ):
    config.write_text(_CONFIG.replace(old, new), encoding='utf-8')
    assert expected in _error(capsys, *flags)


def test_an_estimator_has_the_options_of_a_run(file, config, capsys):
  flags = 'advantages', f'--batch={file}'
  expected = _metrics(capsys, *flags, '--estimator=gae', '--set=lambda_=0.5')
  assert expected != _metrics(capsys, *flags, '--estimator=gae')
  for its in (f'{config}', f'{config}:st_ppo'):
    assert _metrics(capsys, *flags, f'--config={its}') == expected
    both = _metrics(capsys, *flags, f'--config={its}', '--estimator=gae')
    assert both == expected
  turn = _metrics(capsys, *flags, f'--config={config}:turn_ppo')
  assert turn == _metrics(capsys, *flags, '--estimator=gae')


def test_advantages_of_another_estimator(file, tmp_path, capsys):
  out = tmp_path / 'A.npz'
  _metrics(
    capsys, 'advantages', f'--batch={file}', '--estimator=gae', f'--out={out}'
  )
  given = batch_file.load(out)['advantages_BL']
  arrays, *_ = batch_arrays.arrays()
  np.savez(tmp_path / 'F.npz', **(arrays | {'advantages_BL': given}))
  del arrays['advantages_BL']
  np.savez(tmp_path / 'G.npz', **arrays)
  expected = _metrics(
    capsys, 'score', f'--batch={tmp_path}/F.npz', '--algorithm=turn_ppo'
  )
  for batch in (file, tmp_path / 'G.npz'):
    flags = f'--batch={batch}', f'--advantages={out}'
    assert _metrics(capsys, 'score', *flags, '--algorithm=turn_ppo') == expected
  found = _metrics(
    capsys, 'compare', *flags, '--algorithms=turn_ppo', '--json'
  )['rows']['turn_ppo']
  assert found['loss'] == expected['loss']
  np.savez(out, advantages_BL=given[:, 1:])
  line = _error(capsys, 'score', *flags, '--algorithm=turn_ppo')
  assert line.startswith(f'--advantages={out}: advantages_BL has shape (6, 15)')
  line = _error(
    capsys, 'score', *flags, f'--advantages={out}s', '--algorithm=turn_ppo'
  )
  assert line == f'--advantages={out}s: No such file or directory\n'


def test_the_penalty_of_a_run(tmp_path, capsys):
  mask = np.ones((1, 3), int)
  arrays = {
    'turn_ids_BL': mask,
    'loss_mask_BL': mask,
    'rewards_BL': np.array([[0.0, 0.0, 1.0]]),
    'old_logprobs_BL': np.array([[-1.0, -2.0, -3.0]]),
    'ref_logprobs_BL': np.array([[-1.5, -2.0, -2.0]]),
    'kl_coefficient': np.asarray(0.1),
  }
  np.savez(tmp_path / 'F.npz', **arrays)
  flags = (
    'advantages', f'--batch={tmp_path}/F.npz', '--estimator=monte_carlo',
    '--set=whiten=none', f'--out={tmp_path}/A.npz', '--float64',
  )  # fmt: skip
  for more, expected in (
    ((), [1, 1, 1]),
    (('--kl=k1',), [1.05, 1.1, 1.1]),
    (('--kl=k1', '--kl_coefficient=1'), [1.5, 2, 2]),
    (('--kl=k2', '--kl_coefficient=1'), [1 - 0.625, 0.5, 0.5]),
    (('--kl=k2', '--kl_coefficient=0'), [1, 1, 1]),
  ):
    _metrics(capsys, *flags, *more)
    found = _arrays(tmp_path / 'A.npz')['advantages_BL']
    np.testing.assert_allclose(found, [expected], rtol=1e-12)
  assert '--kl=k4: must be one of k1, k2, k3' in _error(
    capsys, *flags, '--kl=k4'
  )
  del arrays['kl_coefficient']
  np.savez(tmp_path / 'F.npz', **arrays)
  line = _error(capsys, *flags, '--kl=k1')
  assert 'lacks kl_coefficient, which --kl without --kl_coefficient r' in line
  _metrics(capsys, *flags, '--kl=k1', '--kl_coefficient=1')
  del arrays['ref_logprobs_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  line = _error(capsys, *flags, '--kl=k1', '--kl_coefficient=1')
  assert 'lacks ref_logprobs_BL, which --kl reads' in line


def test_what_the_row_does_not_read_is_left_out(tmp_path, capsys):
  arrays, *_ = batch_arrays.arrays()
  flags = 'score', f'--batch={tmp_path}/F.npz', '--algorithm=turn_ppo'
  np.savez(tmp_path / 'F.npz', **arrays)
  whole = _metrics(capsys, *flags)
  arrays['sampler_logprobs_BL'][:] = np.nan
  arrays['sentence_ids_BL'][:] = 0
  arrays['state_ids_BL'] = np.array(['a'])
  np.savez(tmp_path / 'F.npz', **arrays)
  found, err = _told(capsys, *flags)
  first, second = err.splitlines()
  assert first.startswith(f'--batch={tmp_path}/F.npz: sentence_ids_BL: must be')
  assert 'sampler_logprobs_BL: not finite in float32' in second
  assert first.endswith('; left out') and second.endswith('; left out')
  gone = set(whole) - set(found)
  assert gone and all(
    x.partition('/')[0] == 'mismatch' or 'sentence' in x for x in gone
  )
  assert found == pytest.approx({n: whole[n] for n in found}, rel=1e-6)
  row = '--algorithm=sspo'
  assert 'sentence_ids_BL: must be in 1..' in _error(capsys, *flags, row)


def test_a_diagnostic_that_is_too_large_is_left_out(tmp_path, capsys):
  arrays, batch, *_ = batch_arrays.arrays()
  arrays['advantages_BL'] = arrays['advantages_BL'] * 1e30
  # Far from its sampler, over a row too long for any product.
  arrays['sampler_logprobs_BL'] = arrays['old_logprobs_BL'] - 70
  np.savez(tmp_path / 'F.npz', **arrays)
  flags = 'score', f'--batch={tmp_path}/F.npz', '--algorithm=turn_ppo'
  found, err = _told(capsys, *flags)
  assert err == (
    'stab/rho, stab/norm_clipped, stab/norm_unclipped: not finite in float32; '
    'left out\n'
  )
  assert 'stab/rho' not in found and found['actor/grad_norm'] > 1e27
  longest = batch.loss_mask_BL.sum(axis=1).max()
  key = 'mismatch/sequence_log_weight_raw_max'
  assert found[key] == pytest.approx(70 * longest, rel=1e-5)
  rows = '--algorithms=turn_ppo,token_ppo'
  _, err = _told(capsys, 'compare', flags[1], rows, '--json')
  assert err.startswith('turn_ppo: stab/rho, ') and err.count('\n') == 2
  assert _lab('compare', flags[1], rows) == 0
  assert capsys.readouterr().err == ''
  line = _error(capsys, 'compare', flags[1], '--algorithms=turn_ppo,st_ppo')
  assert line.startswith('--algorithms: st_ppo: stab/norm_clipped, ')


def test_what_the_page_says_is_true(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'configs').symlink_to(runs.REPO / 'configs')
  (block,) = re.findall(r'```text\n(.*?)```', _PAGE, re.DOTALL)
  lines = [shlex.split(line) for line in block.splitlines()]
  # The last of equal flags counts.
  small = {
    'collect': runs.flags()[1:],
    'score': [],
    'advantages': [],
    'compare': ['--algorithms=st_ppo'],  # whose program is there already
  }
  assert [words[4] for words in lines] == [*small, 'compare']
  for words in lines:
    assert words[:4] == ['python', '-m', 'stppo_jax', 'lab']
    assert __main__.main([*words[3:], *small[words[4]]]) == 0
    out, err = capsys.readouterr()
    assert err == ''
    if words[4] == 'collect':
      mask = _arrays('F.npz')['loss_mask_BL']
      assert re.fullmatch(
        rf'F.npz: 16 rows, \d+ tokens, {mask.sum()} policy tokens\n', out
      )
    if words[4] == 'score':
      assert 0.5 < json.loads(out)['ratio/token/min'] < 1
  (example,) = re.findall(r'```python\n(.*?)```', _PAGE, re.DOTALL)
  done = subprocess.run(
    [sys.executable, '-c', example], capture_output=True, text=True
  )
  assert done.stderr == '' and done.stdout.startswith('turn 1: ')
  table = re.findall(r'^\| `(\w+_BL?|kl_\w+)` \| ', _PAGE, re.MULTILINE)
  assert sorted(table) == sorted(saved_batch.ARRAY_KINDS)


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
      ['score', '--batch=F', '--algorithm=st_ppo', '--float64=1'],
      '--float64=1: takes no value',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--entropy_coefficient=nan'],
      '--entropy_coefficient=nan: must be a finite number',
    ),
    (
      ['score', '--batch=F', '--algorithm=st_ppo', '--out=absent/O.npz'],
      '--out=absent/O.npz: a folder, or in a folder that does not exist',
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
      ['score', '-batch', 'F', '--algorithm=st_ppo'],
      '-batch: not a flag; flags sta',
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
      '--kl_coefficient=x: must be a finite number',
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
  assert expected in _error(capsys, *flags)


@pytest.mark.parametrize(
  ('change', 'expected'),
  [
    ('correction.clipping_bias.tauu=5', "no key 'tauu' in config.algorithm.co"),
    ('tau=5', "no key 'tau' in config.algorithm; "),
    ('correction.clipping_bias.tau=high', 'expected a number (float)'),
    ('correction.clipping_bias.tau=nan', 'expected a number (float)'),
    ('correction.clipping_bias.tau=0', 'tau=0: must be a number > 0'),
    ('correction.names=("tiss",)', 'must be a tuple of any of clipping_bias'),
    ('correction.names=mis,tiss', 'geo_rs; did you mean tis'),
    ('correction=tis', 'a section, not a value; set one of its keys: '),
    ('ratio.level=word', 'level=word: must be one of token, turn, sentence'),
    ('ratio.level=trun', 'sequence; did you mean turn?'),
    ('bounds.name=adaptive', 'name=adaptive: must be one of fixed, entropy_'),
    ('bounds.name=balancd', '; did you mean balanced?'),
    ('bounds.low=0.6', "no key 'low' in config.algorithm.bounds; "),
    ('objective.c=2', "no key 'c' in config.algorithm.objective; choices: na"),
    ('ratio.level', '--set ratio.level: expected KEY=VALUE'),
    ('correction.clipping_bias.applies_to=x', 'at least 1 of policy, value'),
  ],
)
def test_a_wrong_option_is_one_line_and_2(file, capsys, change, expected):
  flags = 'score', f'--batch={file}', '--algorithm=st_ppo'
  line = _error(capsys, *flags, '--set', change)
  assert line.startswith(f'--set {change}: ') and expected in line
  assert _error(capsys, *flags, f'--set={change}') == line


@pytest.mark.parametrize(
  ('change', 'expected'),
  [
    ('gama=1', "no key 'gama' in config.algorithm.advantage; did you mean gam"),
    ('gamma=2', 'gamma=2: must be a finite number >= 0 and <= 1'),
    ('whiten=some', 'whiten=some: must be one of none, policy'),
    ('steps=trun', 'steps=trun: must be one of token, turn, bilevel; did you '),
  ],
)
def test_a_wrong_option_of_an_estimator_too(file, capsys, change, expected):
  line = _error(
    capsys, 'advantages', f'--batch={file}', '--estimator=gae', '--set', change
  )
  assert line.startswith(f'--set {change}: ') and expected in line


def _without(name):
  return lambda arrays: arrays.pop(name)


def _broken(name, value, number=0):
  def change(arrays):
    slot = tuple(np.argwhere(arrays['loss_mask_BL'])[number])
    arrays[name][slot] = value

  return change


def _short(arrays):
  arrays['advantages_BL'] = arrays['advantages_BL'][:, :-1]


@pytest.mark.parametrize(
  ('flags', 'change', 'expected'),
  [
    (
      ['--algorithm=st_ppo'],
      _without('logprobs_BL'),
      'lacks logprobs_BL, which st',
    ),
    (
      ['--algorithm=sspo'],
      _without('entropy_BL'),
      'lacks entropy_BL, which sspo re',
    ),
    (
      ['--algorithm=minirl'],
      _without('sampler_logprobs_BL'),
      'lacks sampler_logpro',
    ),
    (
      ['--algorithm=st_ppo', '--set=kl.where=loss'],
      _without('ref_logprobs_BL'),
      'lacks ref_logprobs_BL, which st_ppo reads',
    ),
    (
      ['--algorithm=st_ppo'],
      _short,
      'advantages_BL has shape (6, 15), expected (6',
    ),
    (
      ['--algorithm=st_ppo'],
      _broken('advantages_BL', math.nan),
      'advantages_BL: not finite in float32; 1 entries, the first at [0, ',
    ),
    (
      ['--algorithm=st_ppo'],
      _broken('turn_ids_BL', 0),
      'turn_ids_BL: must be in 1..',
    ),
    (
      ['--algorithm=st_ppo'],
      _broken('advantages_BL', 3e38),
      'stab/rho: not finite in float32, the numbers are too large',
    ),
  ],
)
def test_a_wrong_file_is_one_line_and_2(
  tmp_path, capsys, flags, change, expected
):
  arrays, *_ = batch_arrays.arrays()
  change(arrays)
  np.savez(tmp_path / 'F.npz', **arrays)
  line = _error(capsys, 'score', f'--batch={tmp_path}/F.npz', *flags)
  assert expected in line
  assert f'--batch={tmp_path}/F.npz: ' in line or 'float32, the' in line


def test_compare_names_the_row_that_lacks_an_array(tmp_path, capsys):
  arrays, *_ = batch_arrays.arrays()
  del arrays['sentence_ids_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  rows = '--algorithms=token_ppo,sspo'
  line = _error(capsys, 'compare', f'--batch={tmp_path}/F.npz', rows)
  assert 'lacks sentence_ids_BL, which sspo reads' in line
  del arrays['logprobs_BL'], arrays['entropy_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  rows = '--algorithms=token_ppo,turn_ppo'
  line = _error(capsys, 'compare', f'--batch={tmp_path}/F.npz', rows)
  assert 'lacks logprobs_BL, which token_ppo reads' in line  # the first


@pytest.mark.parametrize(
  ('name', 'lacks'),
  [
    ('gae', 'old_values_BL'),
    ('group_centered', 'group_ids_B'),
    ('gigpo', 'state_ids_BL'),
    ('monte_carlo', 'rewards_BL'),
  ],
)
def test_an_estimator_names_what_it_lacks(tmp_path, capsys, name, lacks):
  arrays, *_ = batch_arrays.arrays()
  np.savez(
    tmp_path / 'F.npz', **{n: x for n, x in arrays.items() if n != lacks}
  )
  line = _error(
    capsys, 'advantages', f'--batch={tmp_path}/F.npz', f'--estimator={name}'
  )
  assert f'lacks {lacks}, which {name} reads' in line


def test_what_is_no_file_is_one_line_and_2(tmp_path, capsys):
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
      line = _error(capsys, *flags, f'--batch={path}')
      assert line.startswith(f'--batch={path}: {expected}')


def test_it_computes_on_cpu_and_says_how(tmp_path):
  environment = {'JAX_PLATFORMS': 'tpu', 'PATH': ''}
  arrays, *_ = batch_arrays.arrays()
  np.savez(tmp_path / 'F.npz', **arrays)
  done = subprocess.run(
    [
      sys.executable, '-m', 'stppo_jax', 'lab', 'score',
      f'--batch={tmp_path}/F.npz', '--algorithm', 'token_ppo',
    ],
    env=environment, cwd=runs.REPO, capture_output=True, text=True,
  )  # fmt: skip
  assert (done.returncode, done.stderr) == (0, '')
  assert math.isfinite(json.loads(done.stdout)['loss'])


def test_help_names_every_command_and_row_of_flags(capsys):
  assert _lab('score', '--help') == 0
  out, _ = capsys.readouterr()
  for name in ('collect', 'score', 'advantages', 'compare'):
    assert f'python -m stppo_jax lab {name} --' in out
