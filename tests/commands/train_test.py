"""`train` and `sft` as users call them: algorithms, data, signals, errors."""

import contextlib
import functools
import io
import json
import math
import re
import signal

import pytest
import transformers

from stppo_jax import __main__
from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import server
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.training import faults
from tests.training import runs

# Demonstrations without errors, and a rate at which a hundred steps suffice.
_TEACHING = {
  'sft__batch_size': 16,
  'sft__error_rate': 0.0,
  'sft__optimizer__learning_rate': 2e-2,
  'sft__optimizer__warmup_updates': 5,
}


def _train(workdir, algorithm='st_ppo', **changes):
  return __main__.main(
    ['train', *runs.flags(algorithm, **changes), f'--workdir={workdir}']
  )


def _one_step(workdir, algorithm='st_ppo', **changes):
  """Trains one step; returns its line of metrics and its dialogues."""
  assert (
    _train(workdir, algorithm, num_steps=1, evaluate__every=0, **changes) == 0
  )
  (line,) = runs.metrics(workdir)
  assert all(math.isfinite(value) for value in line.values())
  assert line['update/skipped'] == 0
  assert line['mismatch/logprob_abs_diff'] < 1e-4
  return line, runs.trajectories(workdir, 1)


@pytest.fixture(scope='module')
def taught(tmp_path_factory):
  """Returns (folder of a policy after a supervised start, its output)."""
  folder = tmp_path_factory.mktemp('taught')
  # The shapes of other runs: the same programs.
  changes = _TEACHING | {'sft__num_steps': 40, 'sft__batch_size': 8}
  flags = runs.flags(num_steps=None, checkpoint__every=99, **changes)
  with contextlib.redirect_stdout(io.StringIO()) as output:
    assert __main__.main(['sft', *flags, f'--workdir={folder}']) == 0
  return folder / 'policy', output.getvalue()


def test_the_supervised_start_lowers_the_loss_and_is_evaluated(taught):
  policy, output = taught
  losses = [line['sft/loss'] for line in runs.metrics(policy.parent)]
  assert losses[0] == pytest.approx(math.log(290), rel=0.02)  # uniform
  assert losses[-1] < 0.5 * losses[0]
  scores = re.findall(r'^(\w+) (\w+) \d\.\d{3}$', output, re.MULTILINE)
  sets = ('one_hop', 'two_hop')
  assert scores == [(how, x) for how in ('sampled', 'greedy') for x in sets]


def test_a_dialogue_ends_with_its_scores_and_the_rewards_that_count(
  finished, capsys
):
  assert __main__.main(['view', str(finished), '--step=3', '--number=1']) == 0
  last = capsys.readouterr().out.splitlines()[-1]
  scores, reward = last.split(': ')[1].split('; ')
  assert [x.split()[0] for x in scores.split(', ')] == [
    *('em', 'f1', 'substring_match', 'format')
  ]
  assert reward == 'reward 0'


@pytest.mark.slow
def test_an_interrupted_sft_resumes_as_the_same_run(tmp_path, capsys):
  changes = {'sft__num_steps': 3, 'env__max_turn_tokens': 16, **_TEACHING}
  changes['num_steps'] = None
  flags = runs.flags(**changes, checkpoint__every=9, evaluate__num_questions=1)
  whole, workdir = tmp_path / 'whole', tmp_path / 'interrupted'
  assert __main__.main(['sft', *flags, f'--workdir={whole}']) == 0
  capsys.readouterr()
  stop = faults.send_at(('printed', 1), signal.SIGHUP)
  with faults.printed('step 2/', stop):
    assert __main__.main(['sft', *flags, f'--workdir={workdir}']) == 75
  assert not (workdir / 'policy').exists()
  out, err = capsys.readouterr()
  assert 'interrupted after step 2, saved' in out
  assert 'SIGHUP: saving step 2; send another one to abandon' in err
  assert __main__.main(['sft', *flags, f'--workdir={workdir}']) == 0
  assert runs.repeated(workdir) == runs.repeated(whole)
  weights = 'policy/model.safetensors'
  assert (workdir / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.slow
def test_a_running_server_is_used(tmp_path, taught):
  asked = []

  def world_passages(world):
    asked.append(world)
    return [types.Passage('1', 'Elsewhere', 'Zzz.')]

  with server.embedded(None, world_passages=world_passages) as running:
    line, _ = _one_step(
      tmp_path,
      model__path=taught[0],
      env__max_turn_tokens=16,
      retrieval__url=running.url,
    )
  assert len(set(asked)) == 1  # the world of the step
  assert line['retrieval/ok'] > 0


@pytest.mark.slow
def test_queries_of_an_evaluation_count_in_no_line(tmp_path, taught):
  changes = {'model__path': taught[0], 'env__max_turn_tokens': 16}
  assert _train(tmp_path, num_steps=1, evaluate__every=1, **changes) == 0
  # The step was collected between two evaluations, which use the same
  # retriever in a world of their own. Equal queries are sent once.
  queries = {
    turn['text']
    for record in runs.trajectories(tmp_path, 1)
    for turn in record['turns']
    if turn['action'] == 'search'
  }
  assert runs.metrics(tmp_path)[1]['retrieval/ok'] == len(queries) > 0


# A server whose clients need a token, and one that has no worlds.
@pytest.mark.parametrize(('token', 'status'), [('secret', 401), ('', 404)])
def test_a_retriever_that_refuses_searches_is_one_line_and_2(
  tmp_path, taught, capsys, token, status
):
  changes = {'model__path': taught[0]}
  app = functools.partial(server.make_app, [], token=token)
  with http_server.EmbeddedServer(app) as running:
    code = _train(
      tmp_path, evaluate__every=0, retrieval__url=running.url, **changes
    )
  (line,) = capsys.readouterr().err.splitlines()
  assert code == 2 and runs.metrics(tmp_path) == []
  assert line.startswith(running.url)
  assert f'/retrieve: status {status}' in line
  assert 'check retrieval.url' in line


def _write_lines(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf-8')


@pytest.fixture
def files(tmp_path):
  """Returns flags of a small data set in files, with a supervised start."""
  towns = 'Paris Rome Oslo Bern Lima Cairo Quito Delhi'.split()
  root = tmp_path / 'data'
  root.mkdir()
  row = {'dataset': 'nq', 'kind': 'open'}
  _write_lines(
    root / 'questions.jsonl',
    [
      {'id': x, 'question': x, 'answers': [town], 'gold_pids': [town], **row}
      for town in towns
      for x in (town, f'{town}?')
    ],
  )
  _write_lines(
    root / 'corpus.jsonl',
    [{'pid': t, 'title': t, 'text': f'{t} is a town.'} for t in towns],
  )
  return {
    'data__name': 'jsonl',
    'data__root': root,
    'data__train': 'questions.jsonl',
    'data__corpus': 'corpus.jsonl',
    # As many as the phrases of the synthetic wiki: the same programs.
    'data__tokenizer_vocab_size': 290,
    'sft__before_training': True,
    'sft__num_steps': 100,
    'env__max_turn_tokens': 40,
    **_TEACHING,
  }


@pytest.mark.slow
def test_questions_and_passages_from_files(tmp_path, files):
  workdir = tmp_path / 'run'
  line, records = _one_step(workdir, **files)
  assert line['env/number_of_valid_search'] > 0
  assert 'train/em/nq' in line
  found = [
    re.match(r'\n\n<information>Doc 1\(Title: (\w+)\) \1 ', text)
    for record in records
    for turn in record['turns']
    if '<information>' in (text := turn['observation'])
  ]
  assert any(found)  # a real passage, under its own title
  # The start is kept, and not made again.
  start = workdir / 'start' / 'policy' / 'model.safetensors'
  made = start.stat().st_mtime_ns
  again = files | {'num_steps': 1, 'evaluate__every': 0}
  assert _train(workdir, **again) == 0
  assert start.stat().st_mtime_ns == made


@pytest.mark.slow
def test_tags_that_are_tokens_of_the_tokenizer_are_learned(tmp_path, files):
  folder, tags = tmp_path / 'tokenizer', text_lib.TAGS
  corpus = (files['data__root'] / 'corpus.jsonl').read_text('utf-8')
  size = files['data__tokenizer_vocab_size'] - len(tags)
  tokenizer_lib.train_byte_level_bpe([corpus], size).save(folder)
  fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  fast.add_tokens(list(tags))
  fast.save_pretrained(folder)
  workdir = tmp_path / 'run'
  line, records = _one_step(
    workdir, **files, model__tokenizer_path=folder, rollout__temperature=0.5
  )
  turns = [turn for record in records for turn in record['turns']]
  assert {'search', 'answer'} <= {turn['action'] for turn in turns}
  assert line['env/ratio_of_valid_action'] > 0.5
  assert any('\n\n<information>Doc 1' in t['observation'] for t in turns)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('number', 'code'),
  [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)],
)
def test_a_signal_saves_and_the_same_command_resumes(tmp_path, number, code):
  flags = runs.flags(num_steps=40, evaluate__every=0, checkpoint__every=99)
  process = runs.start('train', *flags, f'--workdir={tmp_path}')
  try:
    for line in process.stdout:
      if line.startswith('step 2/'):
        break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == code
  (step,) = re.findall(r'interrupted after step (\d+), saved', out)
  assert 2 <= int(step) < 40
  assert err.startswith(f'{number.name}: ') and err.count('\n') == 1
  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    steps = int(step) + 1
    flags = runs.flags(num_steps=steps, evaluate__every=0, checkpoint__every=99)
    assert __main__.main(['train', *flags, f'--workdir={tmp_path}']) == 0
  # Nothing was done twice.
  shown = re.findall(r'^step (\d+)/', output.getvalue(), re.MULTILINE)
  assert shown == [str(steps)]
  lines = [line['step'] for line in runs.metrics(tmp_path)]
  assert lines == list(range(1, steps + 1))
