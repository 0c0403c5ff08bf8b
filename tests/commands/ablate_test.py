"""`ablate` trains each arm with each seed once, and compares what has ended."""

import re
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from docs import make_collapse
from launch import study as launcher
from stppo_jax import __main__
from stppo_jax.commands.flags import ablation_flags
from stppo_jax.tools.ablation import figures
from stppo_jax.tools.ablation import results
from stppo_jax.workdir import run_folder
from studies import collapse
from tests.storage import emulator
from tests.tools.report import conftest as pages
from tests.training import runs

_CONFIG = f'{runs.REPO}/studies/collapse.py'
_STUDIES = """
from studies import collapse

get_config = collapse.get_config

def studies():
  return {
    'pair': {
      'seeds': 2,
      'arms': {'': {'token_ppo': {}, 'mine': {'algorithm': 'turn_ppo'}}},
    },
    'started': {
      'title': 'Two starts',
      'seeds': 1,
      'arms': {
        'a': {'token_ppo': {'start': 'one'}},
        'b': {'token_ppo': {'start': 'two', 'num_steps': 7}},
      },
      'starts': {
        'one': {'sft.num_steps': 1}, 'two': {'sft.num_steps': 2}
      },
    },
    'copy': {
      'seeds': 1, 'arms': {'': {'base': {'algorithm': 'token_ppo'}, 'gspo': {}}}
    },
    'equal': {
      'seeds': 2,
      'arms': {
        'a': {'token_ppo': {}},
        'b': {'base': {'algorithm': 'token_ppo'}, 'gspo': {}},
      },
    },
    'empty': {'seeds': 1, 'arms': {}},
    'typo': {'seeds': 1, 'arm': {}},
    'listed': {'seeds': 1, 'arms': {'a, b': {'token_ppo': {}}}},
    'none': {'seeds': 0, 'arms': {'': {'token_ppo': {}}}},
    'wrong': {'seeds': 1, 'arms': {'': {'token_ppo': {'num_step': 1}}}},
    'nothing': {'seeds': 1, 'arms': {'': {'token_ppo': {'start': 'one'}}}},
  }
"""
# In place of Python: leaves the folder of a run that has learned and then, if
# it is that of token_ppo, collapsed. While the file `hold` exists, it waits for
# its end or for a signal.
_FAKE = f"""#!{sys.executable}
import json, os, pathlib, signal, socket, sys, time
command = sys.argv[3]
flags = dict(w.split('=', 1) for w in sys.argv[4:])
workdir = pathlib.Path(flags['--workdir'])
workdir.mkdir(parents=True, exist_ok=True)
with open(workdir.parent / 'starts', 'a') as file:
  file.write(command + ' ' + workdir.name + '\\n')
config = dict.fromkeys(('algorithm', 'model', 'rollout'), {{}})
config |= {{'num_steps': 30, 'command': command, 'sft': {{'num_steps': 30}}}}
name = flags['--config'].split(':')[1]
config |= {{'title': name, 'algorithm': {{'name': name}}}}
config |= {{'env': {{'name': 'search'}}, 'seed': flags.get('--config.seed')}}
(workdir / 'config.json').write_text(json.dumps(config))
started = pathlib.Path('/proc/self/stat').read_text().split(')')[-1].split()[19]
lock = {{'host': socket.gethostname(), 'pid': os.getpid(), 'started': started}}
(workdir / 'lock').write_text(json.dumps(lock | {{'since': 'now'}}))
def beat(exit_code):
  (workdir / 'lock').unlink()
  beat = {{'time': time.time(), 'step': 30, 'exit_code': exit_code}}
  (workdir / 'heartbeat.json').write_text(json.dumps(beat))
def end(*_):
  beat(75)
  sys.exit(75)
signal.signal(signal.SIGTERM, end)
(workdir.parent / (workdir.name + '.waits')).touch()
while (workdir.parent / 'hold').exists():
  time.sleep(0.01)
fails = workdir.parent / 'fail'
if fails.exists() and workdir.name.endswith(fails.read_text()):
  beat(70)
  sys.exit(70)
seed = int(flags.get('--config.seed', 0))
lines = [{{'step': 0, 'val/em/one_hop': 0.25, 'val/em/two_hop': 0.75}}]
for step in range(1, 31):
  falls = 'token_ppo' in flags['--config'] and step > 15
  success = 0.0 if falls else 0.6 + seed / 10
  line = {{'step': step, 'critic/score/mean': success}}
  for level in ('token', 'turn', 'sequence'):
    line |= {{f'clipfrac/{{level}}/low': 0.1, f'clipfrac/{{level}}/high': 0.02}}
    line[f'ratio/{{level}}/max'] = step
  line |= {{'alarm/kl': float(step > 12), 'alarm/entropy': 0.0}}
  lines.append(line | {{'actor/entropy': 1 / 3, 'critic/kl': None}})
lines[-1]['val/em/one_hop'] = lines[-1]['val/em/two_hop'] = 0.125
text = ''.join(json.dumps(line) + '\\n' for line in lines)
(workdir / 'metrics.jsonl').write_text(text)
beat(0)
"""
_RUNS = ['token_ppo-seed0', 'mine-seed0', 'token_ppo-seed1', 'mine-seed1']


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The folder of a study whose runs are those of the Python above."""
  (tmp_path / 'studies.py').write_text(_STUDIES)
  python = tmp_path / 'python'
  python.write_text(_FAKE)
  python.chmod(0o755)
  monkeypatch.setenv('PYTHON', str(python))
  yield tmp_path / 'study'
  (tmp_path / 'study' / 'hold').unlink(missing_ok=True)  # after a failed test


def _flags(folder, study='pair', *more):
  config = folder.parent / 'studies.py'
  return [f'--config={config}:{study}', f'--workdir={folder}', *more]


def _plan(argv):
  return ablation_flags.parse(argv)[0]


def _ablate(folder, *more, study='pair'):
  return __main__.main(['ablate', *_flags(folder, study, *more)])


def _starts(folder):
  lines = (folder / 'starts').read_text().splitlines()
  return [line.split()[1] for line in lines]


def _planned(command):
  """Returns the name of the run that a command of a dry run makes."""
  return re.search(r'--workdir=(\S+)', command)[1].rpartition('/')[2]


def test_each_run_is_made_once_and_the_arms_are_compared(
  folder, capsys, refused, monkeypatch
):
  assert _ablate(folder, '--dry_run') == 0
  assert not folder.exists()
  planned = capsys.readouterr().out.splitlines()
  assert list(map(_planned, planned)) == _RUNS
  assert '--config.seed=1' in planned[-1] and ':turn_ppo' in planned[-1]
  assert planned[-1].split()[:3] == ['python', '-m', 'stppo_jax']
  # Those of the second seed fail, and are made again.
  folder.mkdir()
  run_folder.write(folder, run_folder.Run('ablate', 'x', 'y'))
  (folder / 'fail').write_text('seed1')
  assert _ablate(folder, '--jobs=1') == 70
  out, err = capsys.readouterr()
  assert 'token_ppo-seed1: ended with exit code 70' in out
  assert 'not finished: token_ppo-seed1, mine-seed1' in err
  assert 'Paired differences' in out
  (folder / 'fail').unlink()
  assert _ablate(folder, '--jobs=1') == 0
  assert _starts(folder) == [*_RUNS, *_RUNS[2:]]
  runs_of_table = results.read(folder / 'pair.csv')
  assert [(run.arm, run.seed) for run in runs_of_table] == [
    (name.rpartition('-')[0], int(name[-1])) for name in _RUNS
  ]
  fallen = runs_of_table[2]
  np.testing.assert_allclose(fallen.per_step('success')[14:16], [0.7, 0])
  np.testing.assert_allclose(fallen.per_step('clip_turn'), 0.12)
  np.testing.assert_allclose(fallen.per_step('entropy'), 0.33333)
  assert np.isnan(fallen.columns['kl_reference']).all()
  np.testing.assert_allclose(fallen.columns['greedy'][[0, -1]], [0.5, 0.125])
  page = (folder / 'pair.md').read_text()
  rows = [line.split(' | ') for line in page.splitlines() if '| ' in line]
  outcome = {row[0].strip('| '): row for row in reversed(rows[2:])}
  # The first mean under half of the best is that of steps 14 to 18.
  assert outcome['token_ppo'][2:] == [
    '0.50 (0.50..0.50)',
    '0.32 (0.30..0.35)',
    '0.65 (0.60..0.70)',
    '0.00 (0.00..0.00)',
    '0.12 (0.12..0.12)',
    '2/2 (0.34..1.00)',
    '18 |',
  ]
  assert outcome['mine'][7].startswith('0/2')
  assert re.search(r'\| mine \| token_ppo \| 2 \| \+0\.32 .* \| 2/2 \|', page)
  # From step 13 on, five before step 18, and in 18 of 30 steps of the others.
  assert '| kl | 2/2 | 5 | 2/2 | 60% |' in page
  assert '| entropy | 0/2 |  | 0/2 | 0% |' in page
  assert '| repetition |' not in page  # it was not measured
  names = [f'pair_{x}' for x in ('inside', 'success')]
  assert sorted(path.name for path in (folder / 'figures').iterdir()) == [
    f'{name}.{suffix}' for name in names for suffix in ('png', 'svg')
  ]
  # The page has the runs, and the tables of the study.
  data = pages.data(folder / 'report.html')
  assert [run['name'] for run in data['runs']] == [
    _RUNS[place] for place in (0, 2, 1, 3)
  ]
  assert data['groups'] == ['token_ppo', 'turn_ppo']
  paired = data['tables']['Paired differences']
  assert paired[1][:4] == ['mine', 'token_ppo', '2', '+0.32 (+0.30..+0.35)']
  out = capsys.readouterr().out
  assert 'Paired differences' in out and '2/2 (0.34..1.00)' in out
  assert '\nruns made: 2 in 0 minutes, 1 at once\n' in out
  assert _ablate(folder, '--dry_run') == 0
  assert not capsys.readouterr().out

  # Finished runs that the table lacks are added, and were not made now. The
  # figures take long, and have been looked at.
  monkeypatch.setattr(figures, 'draw', lambda *_: [])
  (folder / 'pair.csv').unlink()
  assert _ablate(folder) == 0
  out = capsys.readouterr().out
  assert 'Paired differences' in out and 'runs made' not in out

  # Another folder goes on with its table.
  table, another = folder / 'pair.csv', folder.parent / 'another'
  before, flags = table.read_text(), [f'--table={folder}/pair.csv']
  assert _ablate(another, *flags, '--seeds=0,2', '--jobs=2') == 0
  assert sorted(_starts(another)) == ['mine-seed2', 'token_ppo-seed2']
  assert table.read_text().startswith(before)
  # Other settings cannot be compared with it.
  refuse = lambda folder, *more, study='pair': refused(
    'ablate', *_flags(folder, study, *more)
  )
  new, other = folder.parent / 'new', '--config.num_steps=7'
  line = refuse(new, *flags, other)
  assert 'pair.csv: its runs of ' in line and 'cannot be compared' in line
  assert _ablate(another, other) == 2  # a line for each arm
  err = capsys.readouterr().err
  assert err.count('had other settings; use another --workdir') == 2
  line = refuse(another, study='started')
  assert "holds the study 'pair', not 'started'" in line
  table.write_text(before.replace(',0.6,', ',x,', 1))
  assert 'pair.csv, line 3: damaged' in refuse(another, *flags)
  table.write_text('a,b\n')
  assert 'not a table of ablate' in refuse(another, *flags)
  assert str(folder.parent) in refuse(new, f'--table={folder.parent}')


@pytest.mark.slow
def test_runs_that_have_ended_in_a_bucket_are_compared(
  folder, monkeypatch, capsys
):
  assert _ablate(folder, '--jobs=1') == 0
  expected = capsys.readouterr().out
  with emulator.served() as storage:
    for name, value in storage.environment.items():
      monkeypatch.setenv(name, value)
    for run in _RUNS:
      for path in (folder / run).iterdir():
        name = path.name
        name += '/000000-000000000000' * (name == 'metrics.jsonl')
        storage.put(f'study/{run}/{name}', path.read_bytes())
    here = folder.with_name('here')
    address = f'--out=gs://{emulator.BUCKET}/study'
    slices = ['--project=the-lab', '--zone=us-west4-a', '--accelerator=v4-16']
    words = ['--on=tpu', address, *slices]
    # Nothing is submitted, because nothing is left to do.
    assert launcher.main([*_flags(here), *words]) == 0
  tables = lambda text: text.partition('Paired differences')[2]
  found = tables(capsys.readouterr().out)
  assert found.replace(str(here), str(folder)) == tables(expected)
  assert results.read(here / 'pair.csv') and (here / 'report.html').exists()


def test_a_study_for_machines_asks_for_nothing_that_only_they_have(
  folder, capsys
):
  words = ['--on=slurm', '--partition=gpu', '--config.model.path=/shared/qwen']
  words += ['--out=/shared/pair', '--dry_run']
  assert launcher.main([*_flags(folder), *words]) == 0
  out = capsys.readouterr().out
  assert '--config.model.path=/shared/qwen' in out and 'sbatch' not in out


@pytest.mark.slow
def test_the_commands_of_a_dry_run_run_in_a_shell(folder, monkeypatch, capsys):
  # A space and a quote in a path, and a start before the run that needs it.
  folder = folder.parent / "the author's study"
  monkeypatch.setenv('PATH', str(folder.parent), prepend=':')
  assert _ablate(folder, '--dry_run', study='started') == 0
  pasted = capsys.readouterr().out
  subprocess.run(['sh', '-ec', pasted], check=True)
  made = ['start-one', 'start-two', 'a-token_ppo-seed0', 'b-token_ppo-seed0']
  assert _starts(folder) == made
  for path in folder.iterdir():
    if path.is_file():  # only the Python of this test leaves any
      path.unlink()
  # The same command without --dry_run compares these runs, and makes none.
  assert _ablate(folder, study='started') == 0
  assert not (folder / 'starts').exists()
  assert 'Success' in (folder / 'started.md').read_text()
  # A folder with anything else is still refused.
  other = folder.parent / 'other'
  (other / 'a-token_ppo-seed0').mkdir(parents=True)
  (other / 'notes.txt').touch()
  capsys.readouterr()
  assert _ablate(other, study='started') == 2
  assert 'it holds notes.txt' in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_run_is_named_and_the_others_compared(folder, capsys):
  assert _ablate(folder, '--seeds=1') == 0
  (folder / 'pair.csv').unlink()
  capsys.readouterr()
  with open(folder / 'mine-seed0' / 'metrics.jsonl', 'a') as file:
    file.write('{"step"')
  assert _ablate(folder, '--seeds=1') == 2
  out, err = capsys.readouterr()
  assert f'{folder}/mine-seed0/metrics.jsonl' in err and err.count('\n') == 1
  assert 'token_ppo' in out
  assert [run.arm for run in results.read(folder / 'pair.csv')] == ['token_ppo']
  # What is not finished decides the exit code: the same command goes on.
  (folder / 'fail').write_text('seed1')
  assert _ablate(folder, '--jobs=1') == 70
  assert (
    f'{folder}/mine-seed0/metrics.jsonl: damaged' in capsys.readouterr().err
  )


@pytest.mark.slow
def test_equal_runs_of_another_study_are_not_made_again(folder, capsys):
  assert _ablate(folder, '--seeds=1') == 0
  capsys.readouterr()
  another = folder.parent / 'another'
  flags = [f'--reuse={folder}/pair.csv']
  assert _ablate(another, *flags, '--dry_run', study='copy') == 0
  (planned,) = capsys.readouterr().out.splitlines()
  assert _planned(planned) == 'gspo-seed0'
  assert _ablate(another, *flags, study='copy') == 0
  assert _starts(another) == ['gspo-seed0']
  made, _ = results.read(folder / 'pair.csv')
  copied, _ = results.read(another / 'copy.csv')
  assert (copied.arm, copied.settings) == ('base', made.settings)
  for name, column in copied.columns.items():
    np.testing.assert_array_equal(column, made.columns[name])


@pytest.mark.slow
def test_equal_runs_of_a_study_are_made_once(folder, capsys):
  assert _ablate(folder, '--dry_run', study='equal') == 0
  planned = list(map(_planned, capsys.readouterr().out.splitlines()))
  assert _ablate(folder, study='equal') == 0
  made = {
    f'{name}-seed{seed}'
    for name in ('a-token_ppo', 'b-gspo')
    for seed in (0, 1)
  }
  assert set(planned) == set(_starts(folder)) == made
  assert len(planned) == len(_starts(folder)) == 4
  assert 'runs made: 4 ' in capsys.readouterr().out
  runs_by_key = {
    (*run.key, run.seed): run for run in results.read(folder / 'equal.csv')
  }
  assert len(runs_by_key) == 6
  for seed in (0, 1):
    one, other = (
      runs_by_key['a', 'token_ppo', seed],
      runs_by_key['b', 'base', seed],
    )
    for name, column in one.columns.items():
      np.testing.assert_array_equal(column, other.columns[name])
  # An equal run is made in the place of a damaged one.
  (folder / 'equal.csv').unlink()
  (folder / 'a-token_ppo-seed0' / 'metrics.jsonl').write_text('null\n' * 2)
  assert _ablate(folder, study='equal') == 0
  assert _starts(folder)[4:] == ['b-base-seed0']
  assert len(results.read(folder / 'equal.csv')) == 6


@pytest.mark.slow
def test_a_run_outlives_the_study_that_started_it(folder, capsys):
  folder.mkdir()
  hold = folder / 'hold'
  hold.touch()
  run_folder.write(folder, run_folder.Run('ablate', 'x', 'y'))
  process = runs.start('ablate', *_flags(folder, 'pair', '--jobs=1'))
  runs.wait(lambda: (folder / 'token_ppo-seed0.waits').exists())
  process.kill()
  process.communicate()
  threading.Timer(2, hold.unlink).start()
  assert _ablate(folder, '--jobs=1') == 0
  first, *_ = capsys.readouterr().out.splitlines()
  assert re.fullmatch(r'token_ppo-seed0: already running, process \d+', first)
  assert _starts(folder) == _RUNS
  # It counts as the only job.
  ended, began = (
    (folder / name).stat().st_mtime_ns
    for name in ('token_ppo-seed0/metrics.jsonl', 'mine-seed0.waits')
  )
  assert ended < began


def test_starts_are_made_before_the_runs_that_need_them(folder, capsys):
  steps = '--config.num_steps=3'
  assert _ablate(folder, '--dry_run', steps, study='started') == 0
  lines = capsys.readouterr().out.splitlines()
  words = [line.split() for line in lines]
  assert [(_planned(line), line.split()[3]) for line in lines] == [
    ('start-one', 'sft'),
    ('start-two', 'sft'),
    ('a-token_ppo-seed0', 'train'),
    ('b-token_ppo-seed0', 'train'),
  ]
  assert '--config.model.path=' in words[0]
  assert '--config.sft.num_steps=1' in words[0]
  assert [steps in line for line in words] == [False, False, True, True]
  assert f'--config.model.path={folder}/start-two/policy' in words[3]
  flags = ['--groups=b', '--dry_run']
  assert _ablate(folder, *flags, study='started') == 0
  assert 'start-one' not in capsys.readouterr().out


def test_a_start_may_go_on_from_a_policy_wherever_it_lies(folder, capsys):
  studies = folder.parent / 'studies.py'
  digests = []
  # Python notices a changed file by its size, or by its time in seconds.
  for path in ('/one/policy', '/second/policy', '/second/other'):
    text = _STUDIES.replace("'sft.num_steps': 1", f"'model.path': '{path}'")
    studies.write_text(text)
    assert _ablate(folder, '--dry_run', study='started') == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert ' sft ' in first and f'--config.model.path={path}' in first
    digests.append(_plan(_flags(folder, 'started')).digests)
  one, moved, other = digests
  assert one == moved
  changed = [key for key in one if one[key] != other[key]]
  assert changed == [('a', 'token_ppo')]


@pytest.mark.parametrize(
  ('study', 'flags', 'expected'),
  [
    ('pairs', [], "unknown study 'pairs'; did you mean pair? choices: pair"),
    ('empty', [], 'study empty: arms must be a dict of groups'),
    ('typo', [], "study typo: unknown key 'arm'; did you mean arms?"),
    ('listed', [], "study listed: group 'a, b': must have no comma"),
    ('none', [], 'study none: seeds=0: must be a whole number'),
    ('wrong', [], "--config.num_step=1: no key 'num_step'"),
    ('nothing', [], "study nothing: arm token_ppo: unknown start 'one'"),
    ('pair', ['--groups=a'], 'a: no group of study pair'),
    (
      'started',
      [f'--config.model.path={runs.REPO}/assets/quickstart'],
      'assets/quickstart: not allowed, because study started names the starts',
    ),
  ],
)
def test_wrong_input_is_one_line(folder, study, flags, expected, refused):
  assert expected in refused('ablate', *_flags(folder, study, *flags))
  assert not folder.exists()


_FAST = ['collapse.py:levels', 'bounds.py:bounds', 'real_text.py:real_text']
_SLOW = """
  collapse.py:turn_length collapse.py:correction collapse.py:correction_seeds
  collapse.py:controls collapse.py:staleness collapse.py:groups
  collapse.py:start collapse.py:calculator dead_critic.py:dead_critic
  gpu.py:gpu sizes.py:sizes narrow_bounds.py:narrow_bounds
  steps_ahead.py:steps_ahead long_turns.py:long_turns long_turns.py:pilot
""".split()


@pytest.mark.parametrize(
  'study', _FAST + [pytest.param(x, marks=pytest.mark.slow) for x in _SLOW]
)
def test_the_shipped_studies_have_valid_configs_and_those_of_their_tables(
  study, tmp_path, monkeypatch, capsys
):
  # A study may begin with data or with the policy of a run that is made before.
  for start in ('critic/start/policy', 'real_start/policy'):
    shutil.copytree(
      f'{runs.REPO}/tests/models/published/qwen2_5_1_5b',
      tmp_path / 'runs' / start,
    )
  data = tmp_path / 'runs/real/data'
  data.mkdir(parents=True)
  for file in ('train', 'test', 'corpus'):
    (data / f'{file}.jsonl').touch()
  monkeypatch.chdir(tmp_path)
  folder = f'{runs.REPO}/studies'
  flags = [f'--config={folder}/{study}', f'--workdir={tmp_path}/study']
  assert __main__.main(['ablate', *flags, '--dry_run']) == 0
  lines = capsys.readouterr().out.splitlines()
  trained = [line for line in lines if ' train ' in line]
  assert len(trained) >= 8
  # Seeds are paired: every arm has each.
  seeds = [re.findall(r'--config\.seed=(\d+)', line)[0] for line in trained]
  assert len({seeds.count(seed) for seed in seeds}) == 1
  # A table whose runs had other settings could not be gone on with.
  name = study.partition(':')[2]
  path = make_collapse.TABLES / f'{name}.csv.gz'
  made = results.read(path)
  assert made or name == 'pilot'
  results.check(made, _plan(flags).digests, path)


def test_only_settings_that_change_the_numbers_of_a_run_count(tmp_path):
  def digests(*keys):
    flags = [f'--config={_CONFIG}:groups', f'--workdir={tmp_path}/study']
    return _plan([*flags, *(f'--config.{key}' for key in keys)]).digests

  def differ(one, other):
    return all(one[key] != other[key] for key in one)

  # The number of skipped updates decides when a run ends.
  assert collapse.get_config().updates.max_skipped == 0
  assert digests('updates.max_skipped=8') == digests()
  # A run to start from may lie anywhere.
  warm = digests('init_from=/one/warm')
  assert warm == digests('init_from=/second/warm')
  assert differ(warm, digests('init_from=/second/other'))
  # What a microbatch holds counts where a correction is over it.
  longer = 'updates.row_length=4096'
  assert digests(longer) == digests()
  scope = 'algorithm.correction.clipping_bias.scope=microbatch'
  assert differ(digests(scope), digests(scope, longer))


@pytest.mark.slow
def test_a_study_of_runs_is_killed_and_goes_on(tmp_path):
  (tmp_path / 'studies.py').write_text(_STUDIES)
  folder = tmp_path / 'study'
  table = folder / 'pair.csv'
  sizes = runs.flags(num_steps=5, evaluate__every=5)[1:]
  flags = _flags(folder, 'pair', '--jobs=1', '--seeds=1', *sizes)
  process = runs.start('ablate', *flags)
  runs.wait(lambda: table.exists() or process.poll() is not None, seconds=600)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=600)
  assert process.returncode == 75, out + err
  (done,) = results.read(table)
  assert done.arm == 'token_ppo'
  files = {
    path: path.stat().st_mtime_ns for path in folder.glob('token_ppo-seed0/*')
  }
  process = runs.start('ablate', *flags)
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, out + err
  found = results.read(table)
  assert [run.arm for run in found] == ['token_ppo', 'mine']
  assert '| mine | token_ppo | 1 |' in (folder / 'pair.md').read_text()
  assert files and files == {path: path.stat().st_mtime_ns for path in files}
  for run in found:
    assert len(run.per_step('success')) == 5
    for column in ('success', 'clip_token', 'clip_turn', 'entropy', 'rho'):
      assert np.isfinite(run.per_step(column)).all(), column
    assert np.isfinite(run.columns['greedy'][[0, 5]]).all()


@pytest.mark.slow
def test_the_study_for_a_gpu_runs_in_a_small_form(tmp_path):
  sizes = runs.flags(num_steps=2, loss__value_warmup_steps=1, model__path=None)[
    1:
  ]
  flags = [f'--config={runs.REPO}/studies/gpu.py', f'--workdir={tmp_path}/gpu']
  process = runs.start('ablate', *flags, '--jobs=2', '--seeds=1', *sizes)
  out, err = process.communicate(timeout=1200)
  assert process.returncode == 0, out + err
  found = results.read(tmp_path / 'gpu' / 'gpu.csv')
  assert [run.arm for run in found] == 'token_ppo s_ppo turn_ppo st_ppo'.split()
  for run in found:
    # The policy is frozen in the first step.
    first, second = run.per_step('ratio_max_token')
    assert first < second
