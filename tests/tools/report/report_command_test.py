"""The commands report and view: what they read, write, leave out and refuse."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest

from benchmarks import made_runs
from stppo_jax import __main__
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import dialogue_data
from stppo_jax.tools.report import markdown
from stppo_jax.tools.report import run_files
from tests.tools.report import conftest
from tests.training import runs

_NESTED = '[' * 100_000 + '\n'


@pytest.fixture
def run(tmp_path):
  return made_runs.make(tmp_path / 'run')


def _records(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _store(path, records):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def _encoded(folder, *, most=10**6, most_bytes=10**9):
  """Returns the dialogues of a run as a page has them."""
  read = [run_files.read(str(folder))]
  return dialogue_data.encode(read, most=most, most_bytes=most_bytes, losses=[])


def _reported(capsys, tmp_path, *words):
  """Returns exit code, lines of errors and data of a report."""
  out = tmp_path / 'page.html'
  code = conftest.report(*words, f'--out={out}')
  errors = capsys.readouterr().err.splitlines()
  return code, errors, conftest.data(out) if out.exists() else None


def test_a_page_has_tables_and_curves_without_javascript(made, made_page):
  """Browsers that run scripts take what is in <noscript> for text."""
  found = re.search('<noscript>(.*)</noscript>', made_page.read_text(), re.S)[1]
  table = re.search('<h2>Summary</h2>.*?</table>', found, re.S)[0]
  rows = [
    re.findall('<td>(.*?)</td>', row)
    for row in re.findall('<tr>.*?</tr>', table)
  ]
  assert rows[0] == ['', 'st_ppo', 'token_ppo']
  (shown,) = (row[1:] for row in rows if row[0] == 'last reward')
  # Each experiment has a curve from the first to the last step.
  figure = re.search('<h3>Reward</h3>.*?</figure>', found, re.S)[0]
  curves = re.findall('points="(.*?)"', figure)
  for cell, curve, seeds in zip(
    shown, curves, (made[:2], made[2:]), strict=True
  ):
    rewards = np.array(
      [
        [line['critic/score/mean'] for line in runs.metrics(folder)[1:]]
        for folder in seeds
      ]
    )
    low, high = sorted(rewards[:, -10:].mean(axis=1))
    assert cell == f'{(low + high) / 2:.3f} [{low:.3f}, {high:.3f}]'
    x, y = np.array([place.split(',') for place in curve.split()], float).T
    assert x[0] == 0 and x[-1] == 400 and len(x) == rewards.shape[1]
    means = rewards.mean(axis=0)
    assert np.corrcoef(y, means)[0, 1] == pytest.approx(-1, abs=1e-4)


def test_texts_of_runs_are_texts_without_javascript(tmp_path):
  title = '<b>[[DATA]]</noscript> & \u202e"'
  run = made_runs.make(tmp_path / 'run', config={'title': title})
  out = tmp_path / 'page.html'
  assert conftest.report(run, f'--out={out}') == 0
  found = re.search('<noscript>(.*)</noscript>', out.read_text(), re.S)[1]
  shown = '&lt;b&gt;[[DATA]]&lt;/noscript&gt; &amp; \\u202e&quot;'
  assert f'<td>{shown}</td>' in found and '<b>' not in found
  assert conftest.data(out)['groups'] == [title]


def test_a_cut_off_line_is_dropped_and_said(run, tmp_path, capsys):
  with open(run / 'metrics.jsonl', 'ab') as file:
    file.write(b'{"step": 7, "critic/sc')
  with open(run / 'trajectories-000006.jsonl', 'ab') as file:
    file.write(b'{"question"')
  code, errors, data = _reported(capsys, tmp_path, run)
  assert code == 2
  assert errors == [
    f'{run}/metrics.jsonl: line 8 is cut off and was dropped',
    f'{run}/trajectories-000006.jsonl: line 5 is cut off and was dropped',
  ]
  assert data['runs'][0]['step'] == 6 and data['notes'] == errors


@pytest.mark.parametrize(
  ('name', 'content', 'line'),
  [
    ('metrics.jsonl', '[1]\n{"step": 1, "a": NaN}\n', 'line 1 is no JSON obj'),
    ('config.json', '[]', 'config.json: cannot be read'),
    ('trajectories-000002.jsonl', '{"turns": 3}\n', 'a line is no dialogue'),
    ('trajectories-000002.jsonl', '\xff\n', 'is no JSON object'),
    ('trajectories-000002.jsonl', _NESTED, 'is no JSON object'),
  ],
)
def test_what_is_damaged_is_left_out(
  run, tmp_path, capsys, name, content, line
):
  (run / name).write_text(content, 'latin-1')
  code, errors, data = _reported(capsys, tmp_path, run)
  assert code == 2 and len(errors) == 1 and line in errors[0]
  assert data['runs'][0]['folder'] == str(run)


@pytest.mark.parametrize(
  'change',
  [
    lambda record, turn: turn.update(tokens=None),
    lambda record, turn: turn['tokens'].update(ratio=None),
    lambda record, turn: turn['tokens'].update(turn_ratio=10**400),
    lambda record, turn: turn['tokens'].update(clipped=[[]]),
    lambda record, turn: turn['tokens']['value'].pop(),
    lambda record, turn: turn['tokens']['entropy'].insert(0, 'x'),
    lambda record, turn: turn['tokens']['characters'].insert(0, None),
    lambda record, turn: turn['tokens'].pop('clipped'),
    lambda record, turn: record['rewards'].update(em=None),
  ],
)
def test_a_dialogue_with_damaged_numbers_is_left_out(
  run, tmp_path, capsys, change
):
  path = run / 'trajectories-000006.jsonl'
  records = _records(path)
  record, turn = next(
    (record, turn)
    for record in records
    for turn in record['turns']
    if 'tokens' in turn
  )
  change(record, turn)
  _store(path, records)
  code, errors, data = _reported(capsys, tmp_path, run)
  assert code == 2 and data['runs'][0]['step'] == 6
  assert errors == [f'{path}: a line is no dialogue; it was dropped']
  for words in ([], ['--number=1', '--tokens']):
    code, out, err = _view(capsys, run, *words)
    assert code == 2 and out and err.splitlines() == errors


def test_a_number_that_is_too_large_is_no_number(run, tmp_path, capsys):
  with open(run / 'metrics.jsonl', 'a') as file:
    for line in ({'step': 7, 'critic/kl': 10**400}, {'step': 10**400}):
      file.write(json.dumps(line) + '\n')
  code, errors, data = _reported(capsys, tmp_path, run)
  assert (code, errors, data['runs'][0]['step']) == (0, [], 7)


def test_what_cannot_be_shown_is_named_and_the_rest_shown(
  run, tmp_path, capsys
):
  sft, newer, young = (
    shutil.copytree(run, tmp_path / name) for name in ('sft', 'newer', 'young')
  )
  (content,) = _records(run / 'run.json')
  _store(sft / 'run.json', [content | {'command': 'sft'}])
  _store(newer / 'run.json', [content | {'schema': 2}])
  (young / 'metrics.jsonl').write_text('')
  others = ['missing', 'sft', 'newer', 'young']
  code, errors, data = _reported(
    capsys, tmp_path, *(tmp_path / name for name in others), run
  )
  assert code == 2
  assert [error.partition(':')[0] for error in errors] == [
    str(tmp_path / name) for name in others
  ]
  assert [shown['name'] for shown in data['runs']] == ['run']
  assert data['notes'] == errors


def test_runs_of_other_tasks_cannot_be_compared(run, tmp_path, capsys):
  other = made_runs.make(
    tmp_path / 'other', dialogues=0, config={'env.name': 'tools'}
  )
  code, errors, data = _reported(capsys, tmp_path, run, other)
  assert code == 2 and len(data['groups']) == 2
  assert len(errors) == 1 and f'{run} and {other}' in errors[0]
  third = made_runs.make(tmp_path / 'third', dialogues=0, algorithm='grpo')
  text = (third / 'metrics.jsonl').read_text()
  (third / 'metrics.jsonl').write_text(text.replace('val/em/', 'val/f1/'))
  code, (error,), _ = _reported(capsys, tmp_path, run, third)
  assert code == 2 and 'no evaluation in common: val/em/one_hop' in error


def test_a_run_that_goes_on_is_shown(run, tmp_path, capsys):
  config = json.loads((run / 'config.json').read_text())
  _store(run / 'config.json', [config | {'num_steps': 40}])
  code, errors, data = _reported(capsys, tmp_path, run)
  assert (code, errors) == (0, [])
  shown = data['runs'][0]
  assert (shown['step'], shown['num_steps']) == (6, 40)
  assert shown['state'] == 'interrupted'  # it holds no lock


def test_the_page_names_no_other_file(made_page):
  """The page in Chromium asks for nothing; this holds for other browsers."""
  text = made_page.read_text('utf-8')
  begin = text.index('<script type="application/json"')
  program = text[:begin] + text[text.index('</script>', begin) :]
  addresses = re.findall(r'(?:https?:)?//[\w.-]+\.\w+[^\s\'"]*', program)
  assert set(addresses) <= {'http://www.w3.org/2000/svg'}
  assert not re.search(r'\b(?:src|href)="(?!#|data:)', program)
  assert "default-src 'none'" in program


def test_a_report_has_no_secrets_of_the_config(tmp_path, capsys):
  read = [
    made_runs.make(
      tmp_path / name,
      dialogues=0,
      config={
        'retrieval.url': 'http://me:hush@host/',
        'env.tools.mcp_servers': [f'run --token hush --name={name}'],
      },
    )
    for name in 'ab'
  ]
  code, errors, data = _reported(capsys, tmp_path, *read)
  assert (code, errors) == (0, [])
  text = json.dumps(data)
  assert 'hush' not in text
  assert 'http://***@host/' in text and 'run --token *** --name=a' in text


def test_experiments_are_what_differs_in_more_than_the_seed(made, tmp_path):
  read = [run_files.read(str(folder)) for folder in made]
  longer = made_runs.make(tmp_path / 'a', seed=5, steps=31, dialogues=0)
  wider = made_runs.make(
    tmp_path / 'b',
    dialogues=0,
    config={'algorithm.bounds.clip_high': 0.3, 'writer.samples': 0},
  )
  read += [run_files.read(str(folder)) for folder in (longer, wider)]
  groups = comparison.group(read)
  assert [[run.folder for run in group.runs] for group in groups] == [
    [str(made[0]), str(made[1]), str(longer)],
    [str(made[2]), str(made[3])],
    [str(wider)],
  ]
  labels = [group.label for group in groups]
  assert len(set(labels)) == 3
  assert labels[0].endswith(' clip_high=0.2')
  assert labels[2].endswith(' clip_high=0.3')


def test_a_recorded_config_has_the_names_of_today(tmp_path):
  folders = [
    made_runs.make(tmp_path / x, seed=n, dialogues=0)
    for n, x in enumerate('ab')
  ]
  path = folders[1] / 'config.json'
  config = json.loads(path.read_text())
  config['rollout']['extend_chunk'] = config['rollout'].pop('prefill_chunk')
  _store(path, [config])
  read = [run_files.read(str(folder)) for folder in folders]
  assert read[0].recorded.keys() == read[1].recorded.keys()
  assert len(comparison.group(read)) == 1


def test_dialogues_are_thinned_by_whole_steps(tmp_path):
  folder = made_runs.make(tmp_path / 'run', steps=20, dialogues=4)

  def steps(**limits):
    encoded = _encoded(folder, **limits)
    columns = encoded.index['columns']
    assert len(encoded.parts) == len(set(columns['part']))
    return sorted(set(columns['step'])), encoded

  everything, encoded = steps()
  assert everything == list(range(1, 21)) and not encoded.notes
  size = sum(map(len, encoded.parts))
  few, encoded = steps(most=20)
  assert few == [4, 8, 12, 16, 20]
  assert encoded.notes == [
    'dialogues of 5 of 20 steps, evenly spread: more would exceed 20 dialogues'
  ]
  half, encoded = steps(most_bytes=size // 2)
  assert 8 <= len(half) <= 10 and half[-1] == 20
  assert sum(map(len, encoded.parts)) <= size // 2
  assert 'the size of the page' in encoded.notes[0]
  # No step fits.
  assert steps(most=3)[0] == steps(most_bytes=-1)[0] == []


def test_evaluations_are_thinned_apart_from_training(tmp_path):
  folder = made_runs.make(tmp_path / 'run', steps=60, dialogues=4, evaluated=2)
  encoded = _encoded(folder, most=80)
  columns = encoded.index['columns']
  steps = {
    kind: {s for s, k in zip(columns['step'], columns['kind']) if k == kind}
    for kind in (dialogue_data.TRAINING, dialogue_data.EVALUATION)
  }
  # Half of 80 are 20 evaluations of two dialogues; 40 are left for training.
  assert len(steps[dialogue_data.EVALUATION]) == 20
  assert steps[dialogue_data.TRAINING] == set(range(6, 61, 6))
  assert [note.split(',')[0] for note in encoded.notes] == [
    'evaluations of 20 of 30 steps',
    'dialogues of 10 of 60 steps',
  ]
  order = list(zip(columns['step'], columns['kind'], columns['place']))
  assert order == sorted(order)


def test_equal_ids_of_other_questions_are_not_the_same(run):
  path = run / 'trajectories-000006.jsonl'
  records = _records(path)
  for record, question in zip(records, ('a', 'b', 'a', 'b'), strict=True):
    record |= {'id': '1', 'data_set': 'nq', 'question': question}
  _store(path, records)
  one, two, three, four = _encoded(run).index['columns']['key'][-4:]
  assert one == three != two == four


def test_the_index_of_dialogues(run):
  encoded = _encoded(run)
  rows = zip(*encoded.index['columns'].values())
  for row, (step, place) in zip(
    rows, itertools.product(range(1, 7), range(4)), strict=True
  ):
    row = dict(zip(dialogue_data.COLUMNS, row))
    record = _records(run / f'trajectories-{step:06d}.jsonl')[place]
    tokens = [t['tokens'] for t in record['turns'] if 'tokens' in t]
    count = sum(len(t['ratio']) for t in tokens)
    assert (row['step'], row['place']) == (step, place)
    assert encoded.index['questions'][row['question']] == record['question']
    assert encoded.index['statuses'][row['status']] == record['status']
    assert row['reward'] == record['rewards']['exact_match']
    assert row['turns'] == len(record['turns'])
    assert row['searches'] == len(record['turns']) - 1
    assert row['tokens'] == (count or None)
    if place >= 2:
      assert row['clipped'] is None and row['spread'] is None
      continue
    cut = sum(len(t['clipped']) for t in tokens)
    assert row['clipped'] == pytest.approx(cut / count, rel=1e-5)
    spread = max(abs(np.log(t['turn_ratio'])) for t in tokens)
    assert row['spread'] == pytest.approx(spread, rel=1e-5)


def test_a_file_that_the_run_removes_meanwhile_is_left_out(
  run, tmp_path, capsys
):
  # As after listing: the name is there, the file is not.
  (run / 'trajectories-000002.jsonl').unlink()
  (run / 'trajectories-000002.jsonl').symlink_to(run / 'gone')
  code, errors, data = _reported(capsys, tmp_path, run)
  assert (code, errors) == (0, []) and data['runs'][0]['step'] == 6


@pytest.mark.slow
def test_figures_of_others_are_not_replaced(run, tmp_path, capsys, monkeypatch):
  out = tmp_path / 'paper.md'
  figures = tmp_path / 'paper-figures'
  words = [run, '--format=md', f'--out={out}']
  for make, remove in (
    (figures.touch, figures.unlink),
    (figures.mkdir, figures.rmdir),
  ):
    make()
    assert conftest.report(*words) == 2
    assert f'--out={out}' in capsys.readouterr().err
    assert not out.exists()
    remove()
  # Those of a report are, even if its drawing was interrupted.
  with monkeypatch.context() as patch:
    patch.setattr(markdown.figures, 'draw', _interrupt)
    assert conftest.report(*words) == 130
  assert conftest.report(*words) == 0
  assert list(figures.glob('*.png'))


def _interrupt(*_):
  raise KeyboardInterrupt


def test_markdown_has_the_same_numbers_and_pictures(run, tmp_path):
  hostile = '<b>|`x`|</b>\x1b'
  config = json.loads((run / 'config.json').read_text())
  _store(run / 'config.json', [config | {'title': hostile}])
  # Few metrics, because each figure takes a while to draw.
  names = ('step', 'critic/score/mean', 'val/em/one_hop')
  lines = [
    {name: line[name] for name in names if name in line}
    for line in runs.metrics(run)
  ]
  _store(run / 'metrics.jsonl', lines)
  out = tmp_path / 'paper.md'
  assert conftest.report(run, '--format=md', f'--out={out}') == 0
  text = out.read_text('utf-8')
  assert '<b>' not in text and '\x1b' not in text
  mean = np.mean(
    [line['critic/score/mean'] for line in lines[-10:] if line['step']]
  )
  assert f'| last reward | {mean:.3f} |' in text
  pictures = re.findall(r'!\[.*\]\((.*)\)', text)
  assert pictures == [f'paper-figures/learning-{n}.png' for n in (1, 2)]
  for picture in pictures:
    assert (tmp_path / picture).read_bytes().startswith(b'\x89PNG')


def _view(capsys, *words):
  code = __main__.main(['view', *map(str, words)])
  return code, *capsys.readouterr()


def test_view_lists_the_last_step_and_needs_no_metrics(run, capsys):
  (run / 'metrics.jsonl').write_text('')
  code, out, _ = _view(capsys, run)
  title, _, *rows = out.splitlines()
  assert (code, title) == (0, 'step 6: 4 of 4 dialogues')
  assert [row.split()[0] for row in rows] == ['1', '2', '3', '4']
  assert '%' in rows[0] and '%' not in rows[3]


def test_view_shows_the_dialogues_of_evaluations(run, capsys):
  code, _, err = _view(capsys, run, '--evaluation')
  assert code == 2 and 'writer.evaluation' in err
  records = _records(run / 'trajectories-000003.jsonl')
  _store(run / 'evaluation-000004.jsonl', records[:1])
  code, out, _ = _view(capsys, run, '--evaluation')
  assert code == 0 and out.startswith('step 4: 1 of 1 dialogues')


def test_view_filters(run, capsys):
  records = _records(run / 'trajectories-000003.jsonl')
  for flag, passes in (
    ('--least=0.5', lambda r: r['rewards']['exact_match'] >= 0.5),
    ('--most=0.5', lambda r: r['rewards']['exact_match'] <= 0.5),
    ('--searches=1', lambda r: len(r['turns']) == 2),
    ('--status=completed', lambda r: r['status'] == 'completed'),
    ('--text=BRIDGE', lambda r: True),
    ('--text=nowhere', lambda r: False),
  ):
    code, out, _ = _view(capsys, run, '--step=3', flag)
    count = sum(map(passes, records))
    assert code == 0 and out.startswith(f'step 3: {count} of 4 dialogues'), flag


def test_view_shows_a_dialogue_and_its_tokens(run, capsys):
  record, *_ = _records(run / 'trajectories-000003.jsonl')
  code, out, _ = _view(capsys, run, '--step=3', '--number=1')
  assert code == 0 and record['turns'][0]['text'] in out
  assert 'old logprob' not in out
  _, out, _ = _view(capsys, run, '--step=3', '--number=1', '--tokens')
  tokens = record['turns'][0]['tokens']
  assert f'turn 1, ratio {tokens["turn_ratio"]:.4g}' in out
  assert f'{tokens["ratio"][0]:.4g}' in out


def test_view_escapes_what_would_reach_the_terminal(run, capsys):
  path = run / 'trajectories-000006.jsonl'
  record, *_ = _records(path)
  hostile = '\x1b]0;x\x07 \u202e \x9b2J'
  record['question'] = record['turns'][0]['text'] = hostile
  record['status'] = record['turns'][0]['action'] = hostile
  _store(path, [record])
  for words in ([], ['--number=1', '--tokens']):
    code, out, _ = _view(capsys, run, *words)
    assert code == 0 and r'\x1b]0;x\x07 \u202e \x9b2J' in out
    assert not set(out) & set(hostile) - set(']0;x 2J')
