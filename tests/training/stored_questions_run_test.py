"""Runs of `train` on files of others, and on data sets that were built."""

import pytest

from launch import sweep
from stppo_jax import __main__
from stppo_jax import buckets
from tests.data import public_files
from tests.training import runs

# The tokenizer and the prompt of other tests, whose programs have its shapes.
_TOKENIZER = {
  'num_steps': 1,
  'evaluate__every': 1,
  'evaluate__num_questions': 4,
  'model__tokenizer_path': runs.REPO / 'assets' / 'quickstart',
  'model__scan_unroll': 1,
  'env__prompt_template': runs.REPO / 'configs' / 'prompts' / 'quickstart.txt',
  'rollout__trajectories_per_step': 16,
}


_NQ_SWEEP = f'{runs.REPO}/configs/sweeps/nq_2x2.py'


def _train(config, workdir, changes):
  """Runs `train` with a packaged config and the sizes of other tests."""
  flags = [
    f'--config={runs.REPO}/configs/{config}.py',
    *runs.flags(**changes)[1:],
    f'--workdir={workdir}',
  ]
  return __main__.main(['train', *flags])


@pytest.mark.slow
def test_a_step_on_questions_in_a_bucket(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  rows = ''.join(
    f'{{"question": "how deep is lake {n}", "answers": ["{n} metres"]}}\n'
    for n in range(20)
  )
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'lakes.jsonl').write_text(rows)
  line = '{"pid": "p", "title": "Lake 3", "text": "Lake 3 is deep."}\n'
  (tmp_path / 'data' / 'corpus.jsonl').write_text(line)
  changes = {
    'data__name': 'jsonl',
    'data__root': f'file://{tmp_path}/data',
    'data__train': 'lakes.jsonl',
    'data__evaluation': 'lakes.jsonl limit=4',
    'data__corpus': 'corpus.jsonl',
    **_TOKENIZER,
  }
  assert _train('base', tmp_path / 'run', changes) == 0
  assert 'val/em/lakes' in runs.metrics(tmp_path / 'run')[-1]
  # Nothing but the bucket was read, and its content defines the run.
  buckets.local_folder.cache_clear()  # as in another process
  (tmp_path / 'data' / 'lakes.jsonl').write_text(rows.replace('3', '4'))
  assert _train('base', tmp_path / 'run', changes) == 2


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Returns a folder with the data sets of the packaged configs."""
  root = tmp_path_factory.mktemp('built')
  for name, folder in public_files.write(root / 'originals').items():
    arguments = [name, f'--root={root}', f'--from_files={folder}']
    assert __main__.main(['data', 'build', *arguments]) == 0
  return root


_MEDICAL = {'medqa', 'medmcqa', 'pubmedqa'}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('config', 'trained', 'evaluated'),
  [
    ('nq_hotpotqa', {'nq', 'hotpotqa'}, {'nq', 'hotpotqa'}),
    ('medical', _MEDICAL, _MEDICAL | {'mmlu-med'}),
  ],
)
def test_a_step_of_each_packaged_config(
  config, trained, evaluated, root, tmp_path
):
  changes = {'data__root': root, 'data__corpus': 'hotpotqa.corpus.jsonl'}
  assert _train(config, tmp_path / 'run', changes | _TOKENIZER) == 0
  metrics = runs.metrics(tmp_path / 'run')[-1]
  names = {key.rpartition('/')[2] for key in metrics if 'train/em/' in key}
  assert names <= trained and (names or config == 'medical')
  names = {key.rpartition('/')[2] for key in metrics if 'val/em/' in key}
  assert names == evaluated


@pytest.mark.slow
def test_one_command_makes_what_the_nq_config_reads(tmp_path, capsys):
  originals = public_files.write(tmp_path / 'web')['qed']
  data = tmp_path / 'DATA'
  sweep_flags = [f'--config={_NQ_SWEEP}', f'--out={tmp_path}/sweep']
  sweep_flags += ['--dry_run', f'--config.data.root={data}']
  data.mkdir()
  assert sweep.main(sweep_flags) == 2
  build = f'data build qed --root={data}'
  assert f'python -m stppo_jax {build}' in capsys.readouterr().err
  with public_files.served(originals) as address:
    assert __main__.main([*build.split(), f'--mirror={address}']) == 0
  assert sweep.main(sweep_flags) == 0
  changes = {'data__root': data, 'sft__before_training': False}
  assert _train('nq', tmp_path / 'run', changes | _TOKENIZER) == 0
  # The passages are served too, and searches find them.
  metrics = runs.metrics(tmp_path / 'run')[-1]
  assert 'train/substring_match/qed' in metrics
  assert 'val/substring_match/qed' in metrics
