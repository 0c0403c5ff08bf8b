"""`evaluate` on a directory of weights and on a run, continued and repeated."""

import json
import os
import shutil
from typing import Any

import pytest

from stppo_jax import __main__
from stppo_jax import types
from stppo_jax.envs import rewards
from stppo_jax.envs import tools
from stppo_jax.rollout import steps
from stppo_jax.tools import evaluation
from tests.rollout import dialogues
from tests.training import question_files
from tests.training import runs

_COUNT = 8  # questions of each number of hops
_QUICKSTART = runs.REPO / 'assets' / 'quickstart'


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """Returns a folder with questions and their passages."""
  folder = tmp_path_factory.mktemp('data')
  question_files.write(folder, _COUNT)
  return folder


def _evaluate(*flags):
  return __main__.main(['evaluate', *map(str, flags)])


def _flags(data, **changes):
  """Returns the flags that evaluate the model of the quickstart."""
  changes = {
    'data.root': data,
    'data.corpus': 'corpus.jsonl',
    'rollout.slots': 8,
    'model.scan_unroll': 1,
    **changes,
  }
  return [
    f'--checkpoint={_QUICKSTART}',
    f'--config={runs.REPO}/configs/quickstart.py',
    f'--sets={data}/questions.jsonl',
    *(f'--config.{key}={value}' for key, value in changes.items()),
  ]


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope='module')
def evaluated(data, tmp_path_factory):
  """Returns the results of the model of the quickstart, decoded greedily."""
  out = tmp_path_factory.mktemp('results')
  assert _evaluate(*_flags(data), f'--out={out}') == 0
  return out


def test_a_directory_that_no_run_of_this_folder_trained(evaluated):
  results = json.loads((evaluated / 'results.json').read_text())['sets']
  rows = _lines(evaluated / 'dialogues.jsonl')
  assert len(rows) == 2 * _COUNT
  for name, hops in (('one_hop', 1), ('two_hop', 2)):
    report = results[name]
    own = [row for row in rows if row['data_set'] == name]
    assert report['questions'] == len(own) == _COUNT
    # Greedy, this model answers some four in five; chance is one in forty.
    scores = [
      rewards.exact_match(row['answer'] or '', row['golden_answers'])
      for row in own
    ]
    assert report['scores']['em'] == pytest.approx(sum(scores) / _COUNT)
    assert report['scores']['em'] > 0.5
    low, high = report['intervals']['em']
    assert 0 <= low <= report['scores']['em'] <= high <= 1
    assert report['pass_at'] == {'1': report['scores']['em']}
    assert abs(report['means']['searches'] - hops) < 0.6
    # Every search names an entity, whose passage is the best of all.
    assert report['means']['recall'] > 0.6
    assert 0 < report['baseline'] < 0.5
  answers = _lines(evaluated / 'answers.jsonl')
  assert [row['answer'] for row in answers] == [row['answer'] for row in rows]
  page = (evaluated / 'results.md').read_text()
  assert f'| two_hop | {_COUNT} |' in page and 'majority |' in page


def test_calls_of_tools_count_as_searches():
  config = runs.config(env__name='tools', env__max_turns=3)
  environment = tools.ToolsEnvironment.from_options(config.env.to_dict(), None)
  arguments = '"arguments": {"expression": "6 * 7"}'
  call = f'<tool_call>{{"name": "calculator", {arguments}}}</tool_call>'
  (trajectory,) = dialogues.collect_scripts(
    [[call, 'well', call, '<answer>42</answer>']],
    environment,
    [types.Question('q', '6 times 7?', ('42',), 'arithmetic')],
    max_length=3000,
  )
  unread: Any = None
  services = steps.Services(unread, environment, None, unread)
  record = evaluation.record_of(
    config, services, dialogues.Letters(), trajectory, 0
  )
  assert (record['searches'], record['answer']) == (2, '42')


def test_files_lie_in_the_root_of_the_data_or_in_the_working_directory(
  data, finished, tmp_path, monkeypatch, capsys, refused
):
  root = shutil.copytree(data, tmp_path / 'my data')
  here = tmp_path / 'here'
  here.mkdir()
  monkeypatch.chdir(here)
  (here / 'mine.jsonl').symlink_to(root / 'questions.jsonl')
  run = [f'--checkpoint={finished}', '--config.data.corpus=corpus.jsonl']
  run += [f'--config.model.tokenizer_path={finished}/policy']
  corpus = f'--config.data.corpus={data}/corpus.jsonl'
  for flags, name in (
    ([f'--config.data.root={root}'], 'questions'),
    ([corpus], 'mine'),
  ):
    assert _evaluate(*run, *flags, f'--sets={name}.jsonl limit=8') == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert sum(int(row.split()[1]) for row in rows) == 8
  root = f'--config.data.root={data}'
  err = refused('evaluate', *run, root, '--sets=test.jsonl limit=3')
  assert 'test.jsonl' in err and f'{data} or {here}' in err


def test_an_interrupted_evaluation_goes_on(data, evaluated, tmp_path, capsys):
  """Half of the dialogues, and half a line of the next one, are there."""
  whole = (evaluated / 'dialogues.jsonl').read_bytes().splitlines(keepends=True)
  for name in ('run.json', 'evaluation.json'):
    shutil.copy(evaluated / name, tmp_path)
  path = tmp_path / 'dialogues.jsonl'
  path.write_bytes(b''.join(whole[:8]) + whole[8][:40])
  assert _evaluate(*_flags(data), f'--out={tmp_path}') == 0
  lines = path.read_bytes().splitlines(keepends=True)
  assert lines[:8] == whole[:8] and sorted(lines) == sorted(whole)
  for name in ('results.json', 'results.md', 'answers.jsonl'):
    assert (tmp_path / name).read_bytes() == (evaluated / name).read_bytes()
  # Complete, it is only reported again.
  capsys.readouterr()
  assert _evaluate(*_flags(data), f'--out={tmp_path}') == 0
  out, err = capsys.readouterr()
  assert 'two_hop' in out and 'dialogues' not in err


@pytest.mark.slow
def test_samples_and_another_evaluation_in_the_same_folder(
  data, evaluated, tmp_path, refused
):
  assert _evaluate(*_flags(data), '--samples=3', f'--out={tmp_path}') == 0
  results = json.loads((tmp_path / 'results.json').read_text())['sets']
  for report in results.values():
    assert report['samples'] == 3 and list(report['pass_at']) == ['1', '2', '3']
    passes = list(report['pass_at'].values())
    assert passes == sorted(passes)
    assert passes[0] == pytest.approx(report['scores']['em'])
  by_question = {}
  for row in _lines(tmp_path / 'dialogues.jsonl'):
    by_question.setdefault(row['id'], []).append(row['turns'])
  # The samples of a question differ.
  assert all(len(turns) == 3 for turns in by_question.values())
  assert any(turns[0] != turns[1] for turns in by_question.values())
  before = sorted(os.listdir(evaluated))
  flags = [*_flags(data), '--samples=3', f'--out={evaluated}']
  err = refused('evaluate', *flags)
  assert f'--out={evaluated}' in err and 'samples=0' in err
  assert sorted(os.listdir(evaluated)) == before


def test_a_run_has_the_scores_of_its_own_evaluation(finished, capsys):
  assert _evaluate(f'--checkpoint={finished}') == 0
  out, _ = capsys.readouterr()
  title, head, *table = out.splitlines()
  assert title == f'{finished}, step 3, greedy'
  assert head.split()[:3] == ['set', 'questions', 'em']
  metrics = runs.metrics(finished)[-1]
  for line in table:
    name, count, em, interval, *_ = line.split()
    # No right answer of eight is no proof that there is none.
    assert (count, em, interval) == ('8', '0.000', '0.000-0.324')
    assert em == f'{metrics[f"val/em/{name}"]:.3f}'
  assert {line.split()[0] for line in table} == {'one_hop', 'two_hop'}
  # The config is that of the run, unless another one is given.
  assert _evaluate(*runs.flags(num_steps=3), f'--checkpoint={finished}') == 0
  assert capsys.readouterr().out == out


def test_a_run_that_a_tracker_followed_is_evaluated_without_it(
  finished, tmp_path, capsys
):
  run = shutil.copytree(finished, tmp_path / 'run')
  config = json.loads((run / 'config.json').read_text())
  config['writer'] |= {'trackers': ['wandb']}
  (run / 'config.json').write_text(json.dumps(config))
  assert _evaluate(f'--checkpoint={run}') == 0
  assert capsys.readouterr().out.startswith(f'{run}, step 3, greedy\n')
