"""Pictures of a study that is not finished show each arm as later ones will."""

import re

import numpy as np
import pytest

from stppo_jax.records import plots
from stppo_jax.tools.ablation import figures
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import study as study_lib


def _run(group, arm, seed):
  columns = {name: np.linspace(0.1, 0.9, 9) for name in results.COLUMNS}
  return results.Run(group, arm, seed, 'x', columns)


@pytest.mark.slow
def test_the_legend_has_the_arms_of_all_groups(tmp_path):
  arms = [
    study_lib.Arm(g, a, 'st_ppo', '', {}) for g in 'xy' for a in ('one', 'two')
  ]
  study = study_lib.Study('pair', 'A pair', 2, arms, {})
  runs = [_run('x', 'one', 0), _run('x', 'one', 1), _run('y', 'two', 0)]
  path, _ = figures.draw(study, runs, tmp_path, formats=('svg',))
  picture = path.read_text()
  assert '>one, 2 seeds<' in picture and '>two, 1 seed<' in picture
  # The second arm has its colour where the first one has no run yet.
  assert plots.COLOURS[1].lower() in picture.lower()
  runs += [_run('y', 'one', 0)]
  path, _ = figures.draw(study, runs, tmp_path, formats=('svg',))
  assert '>one, 1 to 2 seeds<' in path.read_text()


@pytest.mark.slow
def test_a_group_has_a_line_of_its_own_and_ticks_are_plain_numbers(tmp_path):
  arms = [study_lib.Arm(f'rate {n}', 'one', 'st_ppo', '', {}) for n in (1, 2)]
  study = study_lib.Study('rates', 'Rates', 1, arms, {})
  runs = [_run(arm.group, arm.name, 0) for arm in arms]
  for run in runs:
    run.columns['ratio_max_turn'][1:] = np.geomspace(1.05, 1.29, 8)
  success, inside = figures.draw(study, runs, tmp_path, formats=('svg',))
  texts = [
    ''.join(re.findall(r'>([^<>]+)<', text))
    for text in re.findall(r'<text .*?</text>', inside.read_text(), re.DOTALL)
  ]
  assert '1.2' in texts
  assert not any('×' in text or '^' in text for text in texts)
  texts = re.findall(r'<(?:text|tspan) [^>]*>([^<]+)<', success.read_text())
  assert texts.count('rate 1') == texts.count('rate 2') == 1
  assert texts.count('Success') == 2


@pytest.mark.slow
def test_arms_of_other_names_have_other_colours(tmp_path):
  keys = [('x', 'one'), ('x', 'two'), ('y', 'three'), ('y', 'two')]
  arms = [study_lib.Arm(g, a, 'st_ppo', '', {}) for g, a in keys]
  study = study_lib.Study('pair', 'A pair', 1, arms, {})
  path, _ = figures.draw(
    study, [_run(*key, 0) for key in keys], tmp_path, formats=('svg',)
  )
  picture = path.read_text().lower()
  assert all(colour.lower() in picture for colour in plots.COLOURS[:3])
  assert plots.COLOURS[3].lower() not in picture
