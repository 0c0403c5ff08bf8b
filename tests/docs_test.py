"""The documents tell the truth: tables, links, metrics, and every command.

The commands run in the order of the pages, in one folder that looks like a
clone, as a reader would run them: what one leaves behind, later ones read.
"""

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
_FIRST = ('README.md', 'docs/commands.md')
_PAGES = {
  name: (_ROOT / name).read_text(encoding='utf-8')
  for name in (
    *_FIRST,
    'CONTRIBUTING.md',
    *(str(p.relative_to(_ROOT)) for p in sorted(_ROOT.glob('docs/**/*.md'))),
  )
}
_README = _PAGES['README.md']

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
  for page in _PAGES.values():
    for block in re.findall(r'^ *```sh\n(.*?)```', page, re.DOTALL | re.M):
      lines = (line.split('#')[0].strip() for line in block.splitlines())
      found += [line for line in lines if line and line not in found]
  return found


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


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
  """A folder that looks like a clone; `runs` in it is shared."""
  root = tmp_path_factory.mktemp('clone')
  for name in ('assets', 'configs', 'stppo_jax', 'Makefile'):
    (root / name).symlink_to(_ROOT / name)
  (root / 'runs').mkdir()
  return root


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


def _workdir(words, folder):
  (workdir,) = (w.split('=')[1] for w in words if w.startswith('--workdir='))
  return folder / workdir


def _make_run(folder):
  """Leaves the run that other commands evaluate and export."""
  command = 'make quickstart'
  if not (folder / 'runs' / 'quickstart-st_ppo-seed0').exists():
    _quickstart(command, folder)


def _quickstart(command, folder):
  tools = [f'BIN={pathlib.Path(sys.executable).parent}', 'RUNTIME=']
  smoke = f'ARGS={shlex.join(_SMOKE)}'
  return _run([*shlex.split(command), *tools, smoke], folder)


def _make_batch(folder):
  """Leaves the batch that other commands of the lab read."""
  (collect,) = (line for line in _commands() if ' lab collect ' in line)
  if not (folder / 'runs' / 'batch.npz').exists():
    _run([*_python(collect), *_SMOKE], folder)


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
def test_every_command_in_the_documents_runs(command, clone):
  words = shlex.split(command)
  if command in ('make test', 'make check'):  # here they would never end
    plan = _run(['make', '-n', words[1], 'TESTING='], clone)
    assert '-m pytest' in plan
  elif words[:2] == ['make', 'quickstart']:
    name = dict(word.split('=') for word in words[2:])
    workdir = 'quickstart-{ALGORITHM}-seed{SEED}'.format(
      **({'ALGORITHM': 'st_ppo', 'SEED': '0'} | name)
    )
    assert 'done.' in _quickstart(command, clone)
    workdir = clone / 'runs' / workdir
    assert (workdir / 'learning_curve.png').is_file()
    _check_metrics(workdir / 'metrics.jsonl')
  elif ' serve ' in command:
    _serves(command, clone)
  elif ' lab ' in command or ' prefer ' in command:
    _make_batch(clone)
    if ' collect ' not in command:
      assert _run(_python(command), clone)
  elif ' train ' in command:
    if 'DATA' in command and not (clone / 'DATA').exists():
      _question_files(clone / 'DATA')
    _run([*_python(command), *_SMOKE], clone)
    assert (_workdir(words, clone) / 'metrics.jsonl').is_file()
  elif ' sft ' in command:
    _run([*_python(command), *_SMOKE], clone)
    assert (_workdir(words, clone) / 'model.safetensors').is_file()
  elif ' evaluate ' in command:
    _make_run(clone)
    output = _run([*_python(command), *_SMOKE], clone)
    assert 'step 1 val/em/two_hop' in output
  elif ' export ' in command:
    _make_run(clone)
    assert 'the policy after step 1' in _run(_python(command), clone)
  else:
    assert _run(_python(command), clone)


def test_the_old_name_of_an_algorithm_is_accepted(clone):
  plan = _run(['make', '-n', 'quickstart', 'ROW=gspo', 'RUNTIME='], clone)
  assert 'quickstart.py:gspo' in plan and 'quickstart-gspo-seed0' in plan


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


def test_the_readme_has_every_algorithm_in_its_family():
  table = re.findall(
    r'^\| [\w, ]+ \| (\w+) \| (yes|no) \| (`.*`) \|$', _README, re.M
  )
  found = {
    name: (level, values)
    for level, values, names in table
    for name in re.findall(r'`(\w+)`', names)
  }
  assert found == {
    name: (
      entry['ratio']['level'],
      'no'
      if entry['advantage']['name'] in algorithms.WITHOUT_CRITIC
      else 'yes',
    )
    for name, entry in algorithms.ALGORITHMS.items()
  }
  assert len(found) == sum(names.count('`') // 2 for _, _, names in table)


def test_the_architecture_page_has_every_room():
  page = _PAGES['docs/architecture.md']
  block = page.split('## The rooms')[1].split('\n## ')[0]
  listed = set(re.findall(r'`(\w+)/`', block))
  package = _ROOT / 'stppo_jax'
  assert listed >= {path.parent.name for path in package.glob('*/__init__.py')}
  named = re.findall(r'`([\w/]+(?:/|\.py))`', page)
  for name in named:
    assert any((root / name).exists() for root in (_ROOT, package)) or any(
      package.rglob(name)
    ), name


@pytest.mark.parametrize('name', _PAGES)
def test_pictures_and_links_exist(name):
  folder = (_ROOT / name).parent
  for target in re.findall(r'\]\(([^)#]+)[^)]*\)', _PAGES[name]):
    assert target.startswith('https://') or (folder / target).exists(), target


def test_every_page_is_reached_from_the_readme():
  found, ahead = set(), ['README.md']
  while ahead:
    name = ahead.pop()
    found.add(name)
    for target in re.findall(r'\]\(([^):#]+\.md)[^)]*\)', _PAGES[name]):
      page = os.path.normpath(pathlib.Path(name).parent / target)
      if page in _PAGES and page not in found:
        ahead.append(page)
  assert found == set(_PAGES)
  assert '(docs/architecture.md)' in _README.split('\n## ')[0]
