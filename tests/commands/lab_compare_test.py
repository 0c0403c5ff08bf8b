"""`lab compare` as users call it: tables, pictures and errors."""

import numpy as np
import pytest

from stppo_jax.records import plots
from tests.commands import lab_calls
from tests.tools.lab import batch_arrays


@pytest.fixture
def page(monkeypatch):
  """Returns the pages that were saved."""
  saved, save = [], plots.save

  def save_and_keep(page, path, **options):
    saved.append(page)
    save(page, path, **options)

  monkeypatch.setattr(plots, 'save', save_and_keep)
  return saved


def test_compare_prints_a_table_or_json_and_draws(
  file, tmp_path, page, capsys, printed
):
  names = ['turn_ppo', 'st_ppo', 'turn_ppo:bounds.clip_high=0.01']
  words = ('compare', f'--batch={file}', f'--algorithms={",".join(names * 2)}')
  out = tmp_path / 'P.png'
  found = printed(*words, '--json', f'--plot={out}')
  assert list(found['rows']) == names
  for row in found['rows'].values():
    assert row.keys() >= {'loss', 'actor/grad_norm', 'stab/rho'}
    assert 0 <= row['silenced'] < 1
  turn, common, narrow = found['cosines']['turn_ppo'].values()
  # A common factor changes no direction.
  assert turn == pytest.approx(1) and common == pytest.approx(1, abs=1e-6)
  assert narrow < 0.99
  assert out.read_bytes().startswith(b'\x89PNG')
  *panels, cosines = page[0].get_axes()
  assert len(panels) == 9
  for axes in panels:
    assert len(axes.get_lines()) == 3
    for line in axes.get_lines():
      shares = np.asarray(line.get_ydata(), float)
      shares = shares[~np.isnan(shares)]
      assert len(shares) and ((shares >= 0) & (shares <= 1)).all()
  shown = cosines.get_images()[0].get_array()
  assert shown[0].tolist() == pytest.approx([turn, common, narrow])
  assert lab_calls.lab(*words[:2], '--algorithms=turn_ppo,st_ppo') == 0
  out, err = capsys.readouterr()
  assert err == ''
  assert [line.split()[0] for line in out.splitlines()[1:3]] == names[:2]
  assert f'{found["rows"]["st_ppo"]["silenced"]:.2%}' in out


@pytest.mark.slow
def test_levels_draws_bounds_where_they_hold(file, tmp_path, page, capsys):
  chosen = '--algorithms=token_ppo,turn_ppo'
  words = ('levels', f'--batch={file}', chosen, f'--plot={tmp_path}/P.png')
  assert lab_calls.lab(*words) == 0
  assert 'turn_ppo' in capsys.readouterr().out
  bounds = [
    [line.get_xdata()[0] for line in axes.get_lines()]
    for axes in page[0].get_axes()
  ]
  # Neither algorithm has a ratio of sentences or sequences.
  both = pytest.approx(np.log([0.8, 1.2]), rel=1e-5)
  assert bounds == [both, both, [], []]


@pytest.mark.slow
def test_one_algorithm_is_compared_with_several_settings(
  file, capsys, printed, refused
):
  tight = f'st_ppo:{lab_calls.TAU}=1.1:ratio.gradient=token'
  several = 'st_ppo:correction.names=[tis,clipping_bias]'
  chosen = f'--algorithms=st_ppo,{tight},{several},{tight}'
  found = printed('compare', f'--batch={file}', chosen, '--json')
  assert list(found['rows']) == ['st_ppo', tight, several]
  alone = printed(
    'score', f'--batch={file}', '--algorithm=st_ppo',
    f'--set={lab_calls.TAU}=1.1', '--set=ratio.gradient=token',
  )  # fmt: skip
  del found['rows'][tight]['silenced']
  assert found['rows'][tight] == alone
  losses = {metrics['loss'] for metrics in found['rows'].values()}
  assert len(losses) == 3
  assert lab_calls.lab('compare', f'--batch={file}', chosen) == 0
  out, _ = capsys.readouterr()
  assert [line.split()[0] for line in out.splitlines()[1:4]] == [
    'st_ppo', tight, several
  ]  # fmt: skip
  flag = '--algorithms=token_ppo,st_ppo:ratio.level=trun'
  line = refused('lab', 'compare', f'--batch={file}', flag)
  assert line.startswith('--algorithms=st_ppo:ratio.level=trun: must be one of')


@pytest.mark.slow
def test_a_metric_that_is_too_large_is_left_out(tmp_path, capsys, refused):
  arrays, batch, *_ = batch_arrays.arrays()
  arrays['advantages_BL'] = arrays['advantages_BL'] * 1e30
  # Far from its sampler, over a row too long for any product.
  arrays['sampler_logprobs_BL'] = arrays['old_logprobs_BL'] - 70
  np.savez(tmp_path / 'F.npz', **arrays)
  flags = 'score', f'--batch={tmp_path}/F.npz', '--algorithm=turn_ppo'
  found, err = lab_calls.metrics_and_warnings(capsys, *flags)
  assert err.startswith('stab/rho, stab/norm_clipped, stab/norm_unclipped: ')
  assert 'stab/rho' not in found and found['actor/grad_norm'] > 1e27
  longest = batch.loss_mask_BL.sum(axis=1).max()
  key = 'mismatch/sequence_log_weight_raw_max'
  assert found[key] == pytest.approx(70 * longest, rel=1e-5)
  chosen = '--algorithms=turn_ppo,token_ppo'
  _, err = lab_calls.metrics_and_warnings(
    capsys, 'compare', flags[1], chosen, '--json'
  )
  assert err.startswith('turn_ppo: stab/rho, ') and err.count('\n') == 2
  assert lab_calls.lab('compare', flags[1], chosen) == 0
  assert capsys.readouterr().err == ''
  line = refused('lab', 'compare', flags[1], '--algorithms=turn_ppo,st_ppo')
  assert line.startswith('--algorithms: st_ppo: stab/norm_clipped, ')


@pytest.mark.slow
def test_each_algorithm_may_have_its_own_advantages(
  tmp_path, capsys, printed, refused
):
  arrays, *_ = batch_arrays.arrays()
  arrays['group_ids_B'] = np.array([0, 0, 1, 1, 0, 1])
  np.savez(tmp_path / 'F.npz', **arrays)
  batch, own = f'--batch={tmp_path}/F.npz', '--advantages=own'
  chosen = '--algorithms=token_ppo,dapo'
  found = printed('compare', batch, chosen, own, '--json')
  for name, estimator in (
    ('token_ppo', ('--estimator=gae', '--kl=k1', '--kl_coefficient=0.001')),
    ('dapo', ('--estimator=group_normalized',)),
  ):
    path = tmp_path / f'{name}.npz'
    lab_calls.lab('advantages', batch, *estimator, f'--out={path}')
    capsys.readouterr()
    flags = 'score', batch, f'--algorithm={name}'
    expected = printed(*flags, f'--advantages={path}')
    assert printed(*flags, own) == expected
    del found['rows'][name]['silenced']
    assert found['rows'][name] == expected
    assert expected != printed(*flags)  # those of the batch
  assert abs(found['cosines']['token_ppo']['dapo']) < 0.9
  assert lab_calls.lab('compare', batch, chosen, own) == 0
  assert 'advantages of its own estimator' in capsys.readouterr().out
  del arrays['old_values_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  line = refused('lab', 'compare', batch, chosen, own)
  assert 'lacks old_values_BL, which the estimator of token_ppo reads' in line


def test_compare_names_the_algorithm_that_lacks_an_array(tmp_path, refused):
  arrays, *_ = batch_arrays.arrays()
  del arrays['sentence_ids_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  chosen = '--algorithms=token_ppo,sspo'
  line = refused('lab', 'compare', f'--batch={tmp_path}/F.npz', chosen)
  assert 'lacks sentence_ids_BL, which sspo reads' in line
  del arrays['logprobs_BL'], arrays['entropy_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  chosen = '--algorithms=token_ppo,turn_ppo'
  line = refused('lab', 'compare', f'--batch={tmp_path}/F.npz', chosen)
  assert 'lacks logprobs_BL, which token_ppo reads' in line  # the first
