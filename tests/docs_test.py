"""The documents tell the truth: trees, tables, metrics, and every command."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import urllib.request

import pytest

from stppo_jax.configs import algorithms

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_README = (_ROOT / 'README.md').read_text(encoding='utf-8')
_PAGES = [_README] + [
  page.read_text(encoding='utf-8') for page in (_ROOT / 'docs').glob('*.md')
]

# What makes a long command short; it stays the same command.
_SMOKE = [
  '--config.num_steps=1',
  '--config.sft.num_steps=1',
  '--config.sft.batch_size=4',
  '--config.evaluate.num_questions=4',
  '--config.evaluate.batch_size=8',
  '--config.rollout.trajectories_per_step=8',
  '--config.updates.minibatch_size=8',
]


def _commands():
  """Every line of every sh block, without comments, in order."""
  found = []
  for page in _PAGES:
    for block in re.findall(r'```sh\n(.*?)```', page, re.DOTALL):
      lines = (line.split('#')[0].strip() for line in block.splitlines())
      found += [line for line in lines if line and line not in found]
  return found


# Makes the file that the commands after it read.
(_COLLECT,) = (line for line in _commands() if ' lab collect ' in line)


def _environment():
  environment = dict(os.environ, JAX_NUM_CPU_DEVICES='1')
  environment['PYTHONPATH'] = str(_ROOT)
  return environment


def _run(words, cwd):
  done = subprocess.run(
    words,
    cwd=cwd,
    env=_environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def _folder(tmp_path):
  """A working folder that looks like a clone."""
  for name in ('assets', 'configs', 'stppo_jax', 'Makefile'):
    (tmp_path / name).symlink_to(_ROOT / name)
  return tmp_path


def _question_files(root):
  folder = root / 'general'
  folder.mkdir(parents=True)
  passages = [
    {'pid': f'p{n}', 'title': f'Lake {n}', 'text': f'Lake {n} is {n} km long.'}
    for n in range(40)
  ]
  questions = [
    {
      'id': f'q{n}',
      'dataset': 'lakes',
      'kind': 'open',
      'question': f'how long is lake {n}',
      'answers': [f'{n} km'],
    }
    for n in range(40)
  ]
  for name, rows in (('corpus', passages), ('questions', questions)):
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    (folder / f'nq_train.{name}.jsonl').write_text(text, encoding='utf-8')
  return folder / 'nq_train.corpus.jsonl'


def _python(command):
  words = shlex.split(command)
  assert words[:3] == ['python', '-m', 'stppo_jax'], command
  return [sys.executable, *words[1:]]


def _trains(words, folder):
  _run([*words, *_SMOKE], folder)
  (workdir,) = (w.split('=')[1] for w in words if w.startswith('--workdir='))
  return folder / workdir


def _serves(command, folder):
  corpus = _question_files(folder)
  words = _python(command.replace('CORPUS.jsonl', str(corpus)))
  words = ['--port=0' if w.startswith('--port=') else w for w in words]
  server = subprocess.Popen(
    words, cwd=folder, env=_environment(), stdout=subprocess.PIPE, text=True
  )
  try:
    url = re.search(r'http://\S+', server.stdout.readline()).group()
    request = urllib.request.Request(
      url.rstrip('/') + '/retrieve',
      json.dumps(
        {'queries': ['lake 7'], 'topk': 1, 'return_scores': True}
      ).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
      assert (
        '"Lake 7"' in json.load(reply)['result'][0][0]['document']['contents']
      )
  finally:
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=30) == 0
    server.stdout.close()


@pytest.mark.parametrize('command', _commands())
def test_every_command_in_the_documents_runs(command, tmp_path):
  folder = _folder(tmp_path)
  if command == 'make test':  # running it here would never end
    plan = _run(['make', '-n', 'test', 'TESTING='], folder)
    assert '-m pytest' in plan and '-n' in plan
  elif command.startswith('make quickstart'):
    tools = [f'BIN={pathlib.Path(sys.executable).parent}', 'RUNTIME=']
    smoke = f'ARGS={shlex.join(_SMOKE)}'
    output = _run([*shlex.split(command), *tools, smoke], folder)
    assert 'done.' in output
    (workdir,) = (folder / 'runs').iterdir()
    assert (workdir / 'learning_curve.png').is_file()
    _check_metrics(workdir / 'metrics.jsonl')
  elif ' serve ' in command:
    _serves(command, folder)
  elif ' lab ' in command or ' prefer ' in command:
    (folder / 'runs').mkdir()
    _run([*_python(_COLLECT), *_SMOKE], folder)
    if command != _COLLECT:
      assert _run(_python(command), folder)
  elif ' train ' in command:
    if 'DATA' in command:
      _question_files(folder / 'DATA')
    workdir = _trains(_python(command), folder)
    assert (workdir / 'metrics.jsonl').is_file()
  elif ' sft ' in command:
    workdir = _trains(_python(command), folder)
    assert (workdir / 'model.safetensors').is_file()
  elif ' evaluate ' in command:
    words = _python(command)
    _trains([w.replace('evaluate', 'train') for w in words], folder)
    assert 'step 1 val/em/two_hop' in _run([*words, *_SMOKE], folder)
  elif ' export ' in command:
    words = _python(command)
    (workdir,) = (w for w in words if w.startswith('--workdir='))
    config = '--config=configs/quickstart.py:st_ppo'
    _trains([*words[:3], 'train', config, workdir], folder)
    assert 'the policy after step 1' in _run(words, folder)
  else:
    assert _run(_python(command), folder)


def _patterns(page):
  """Regular expressions of the names in tables of docs/metrics.md."""
  table = [line for line in page.splitlines() if line.startswith('| `')]
  patterns = []
  for line in table:
    for name in re.findall(r'`([^`]+)`', line.split('|')[1]):
      pattern = re.escape(name).replace(r'\{level\}', '(token|turn|sequence)')
      pattern = re.sub(
        r'\\{([a-z0-9_,]+,[a-z0-9_,]+)\\}',
        lambda m: '(' + m.group(1).replace(',', '|') + ')',
        pattern,
      )
      patterns.append(re.sub(r'\\{\w+\\}', r'\\w+', pattern))
  return patterns


def _check_metrics(path):
  """Every metric is documented, and there if documented as of every run."""
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  names = set().union(*lines) - {'step'}
  page = (_ROOT / 'docs' / 'metrics.md').read_text(encoding='utf-8')
  of_all, of_some = page.split('## Of some runs only')
  patterns = _patterns(of_all)
  known = patterns + _patterns(of_some)
  unknown = {
    name for name in names if not any(re.fullmatch(p, name) for p in known)
  }
  assert not unknown
  missing = [p for p in patterns if not any(re.fullmatch(p, n) for n in names)]
  assert not missing


def test_the_readme_table_is_the_table():
  table = [
    ' | '.join(
      [
        f'`{name}`',
        row['ratio']['level'],
        row['objective']['name'],
        ', '.join(row['correction']['names']) or 'none',
        row['advantage']['name'],
      ]
    ).replace('_', ' ')
    for name, row in algorithms.ALGORITHMS.items()
  ]
  rows = re.findall(r'^\| (`\w+`(?: \| [\w ,]+){4}) \|$', _README, re.M)
  assert [row.replace('_', ' ') for row in rows] == table


def test_the_readme_tree_is_the_tree():
  block = _README.split('## The tree')[1].split('\n\n')[1]
  listed, parent = set(), ''
  for line in block.splitlines():
    match = re.match(r'^( {4}| {6})([\w.]+/?)(  |$)', line)
    if match:
      indent, name = match.group(1), match.group(2)
      parent = name if len(indent) == 4 else parent
      listed.add(name if len(indent) == 4 else parent + name)
  for name in listed:
    assert (_ROOT / name).exists(), name
  folders = {
    f'stppo_jax/{path.name}/'
    for path in (_ROOT / 'stppo_jax').iterdir()
    if (path / '__init__.py').is_file()
  }
  assert folders <= listed


def test_pictures_and_links_exist():
  for page in _PAGES:
    for target in re.findall(r'\]\(([^)]+)\)', page):
      assert target.startswith('https://') or (_ROOT / target).exists(), target
