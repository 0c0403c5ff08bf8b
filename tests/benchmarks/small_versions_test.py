"""Small versions of benchmarks: each runs, and prints what it measures."""

import re

import pytest

from benchmarks import checkpoints
from benchmarks import chromium
from benchmarks import commands
from benchmarks import first_comparison
from benchmarks import report
from benchmarks import retrieval
from benchmarks import side_by_side
from benchmarks import update
from tests.training import runs


@pytest.mark.slow
def test_checkpoints_are_timed(tmp_path):
  fingerprints = checkpoints.report_fingerprints(
    runs.config(), length=128, repeats=7
  )
  pattern = r'the fing.* MiB take (\S+) .* step (\S+) .* ms: (\S+) .*goal 0.02'
  part, whole, share = map(float, re.match(pattern, fingerprints).groups())
  assert share == pytest.approx(part / whole, abs=0.1)
  saves = checkpoints.report(tmp_path, megabytes=4, repeats=2)
  pattern = r'4 MiB: a save takes (\S+) s, .* for (\S+) s .*: (\S+) '
  whole, beside, share = map(float, re.match(pattern, saves).groups())
  assert share == pytest.approx(beside / whole, abs=0.1)


@pytest.mark.slow
def test_commands_are_timed(tmp_path):
  text = commands.report(tmp_path, bad=['num_steps=ten'], runs=2, repeats=1)
  rows = re.findall(r'^\| (\w[^|]*?) +\| \d+\.\d\d ', text, re.M)
  assert rows == ['train --config.num_steps=ten', 'status of 2 runs', 'config']


@pytest.mark.slow
def test_the_seconds_until_the_differences_are_seen(tmp_path):
  flags = ['--seeds=1', '--config.num_steps=1', '--config.evaluate.every=0']
  try:
    text = first_comparison.report(tmp_path, cores=2, arguments=flags)
  except chromium.Missing as missing:
    pytest.skip(str(missing))
  found = dict(re.findall(r'^\| ([\w ]+?) +\| (\d+) ', text, re.M))
  seconds = {name: int(value) for name, value in found.items()}
  seen = seconds['the comparison is seen']
  assert 0 < seconds['the report is written'] <= seen
  assert 0 < seconds['CPU'] <= 2 * seen
  assert text.splitlines()[-1].split('\t')[:3] == ['turn_ppo', 'token_ppo', '1']


@pytest.mark.slow
def test_a_page_is_written_and_measured():
  first, second = report.pages(steps=4, dialogues=3, tokens=4)
  assert first.startswith('4 steps, 12 dialogues, 4 tokens a turn: report in ')
  assert re.search(r'\d+\.\d MB', first)
  assert re.match(r'dialogues shown after \d+\.\d+ s|not opened: needs', second)


@pytest.mark.slow
def test_every_part_of_retrieval_prints_its_figure(capsys):
  flags = '--passages=300 --large=400 --queries=40 --workers=1 --repeats=7'
  retrieval.main([*flags.split(), '--only', 'search', 'index'])
  output = capsys.readouterr().out
  assert re.search(r'bm25s / ours: \d', output) and 'http' not in output
  # The last line is that of the index; the verdict of the search precedes it.
  *_, verdict, index = output.rstrip().splitlines()
  assert verdict.startswith(('undist', 'NOT A RESULT'))
  assert re.match(r'index: 400 passages in [\d.]+ s', index)


@pytest.mark.slow
def test_the_hosts_that_learn_hardly_wait(capsys):
  code = side_by_side.main(['--scale=0.05', '--steps=8'])
  print(table := capsys.readouterr().out)
  assert code == 0 and table.count('%') == len(side_by_side.CASES)


def test_games_are_solved_and_counted():
  pytest.importorskip('textworld')
  from benchmarks import text_games

  line = text_games.report(1, 2, 1, 3)
  assert line.startswith('1 rooms, 2 objects, quests of 1: ')
  assert re.search(r'\d+ steps per CPU second, .*3 of 3 solved$', line)


def test_another_loss_is_not_parity():
  metrics = [
    {'actor/pg_loss': x, 'actor/entropy': 1.0, 'critic/vf_loss': 1.0}
    for x in (1.0, 1.0 + 1e-8, 1.1)
  ]
  update.assert_parity(metrics[:2])
  with pytest.raises(AssertionError, match='actor/pg_loss'):
    update.assert_parity(metrics)


@pytest.mark.slow
def test_levels_start_equal_and_are_timed():
  text = update.run(runs.config(), length=128, repeats=2)
  rows = re.findall(r'^\| (\w+_ppo) +\| (\w+) +\|', text, re.M)
  assert rows == list(update.CASES)
  pattern = r'^turn_ppo / token_ppo: \d\.\d+ .*at most 1.01$'
  assert re.search(pattern, text, re.M)
  assert re.search(r'^second / first: \d\.\d+ ', text, re.M)
