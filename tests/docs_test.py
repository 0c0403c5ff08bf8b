"""The documents tell the truth: tables, links, metrics, and every command.

The commands run in the order of the pages, in one folder that looks like a
clone, as a reader would run them: what one leaves behind, later ones read.
Those that train take minutes as they stand. So `make test` runs a small version
of each in this process, on the folder of a run that other tests read too, or
checks its configuration; the slow tests run them all as processes.
"""

import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from launch import first_hour
from launch import submit
from launch import sweep
from stppo_jax import __main__
from stppo_jax.configs import algorithms
from stppo_jax.data import passages as passages_lib
from stppo_jax.data import readers
from stppo_jax.rl import estimator_needs
from stppo_jax.tools.lab import collection
from stppo_jax.training import preference
from tests.commands import serving
from tests.data import public_files
from tests.tools.lab import batch_arrays

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FIRST = ('README.md', 'docs/commands.md')
_PAGES = {
  name: (_ROOT / name).read_text(encoding='utf-8')
  for name in (
    *_FIRST,
    'CONTRIBUTING.md',
    'SECURITY.md',
    'launch/README.md',
    *(
      str(path.relative_to(_ROOT))
      for path in sorted(_ROOT.glob('docs/**/*.md'))
      if path.parent.name != 'texts'  # what pages are made of
    ),
  )
}
_README = _PAGES['README.md']
_MAINS = {
  'stppo_jax': __main__.main,
  'launch.first_hour': first_hour.main,
  'launch.submit': submit.main,
  'launch.sweep': sweep.main,
}

# What makes a long command short; it stays the same command.
_SMOKE = [
  '--config.num_steps=1',
  '--config.sft.num_steps=1',
  '--config.sft.batch_size=4',
  '--config.evaluate.num_questions=4',
  '--config.rollout.trajectories_per_step=8',
  '--config.updates.minibatch_size=8',
]
# Commands that read the folder of a run, and a part of what they print.
_OF_RUNS = {
  **dict.fromkeys(('report', 'view', 'alarms'), ''),
  'evaluate': ', greedy',
  'status': 'finished',
  'checkpoint': 'step',
  'export': 'the policy after step ',
}
_RUN = pathlib.Path('runs', 'quickstart-st_ppo-seed0')


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
  # A `make test` that runs this hands its own variables to each make below it.
  for name in ('MAKEFLAGS', 'MAKEOVERRIDES', 'MFLAGS', 'ARGS'):
    environment.pop(name, None)
  return environment


def _run(words, cwd):
  done = subprocess.run(
    words,
    cwd=cwd,
    env=_environment(),
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def clones(tmp_path_factory):
  """Two folders that look like clones; what is in their `runs` is shared.

  The second one is for small runs.
  """
  folders = []
  for name in ('clone', 'small'):
    root = tmp_path_factory.mktemp(name)
    for linked in (
      *('assets', 'configs', 'launch', 'stppo_jax', 'studies', 'Makefile'),
      'tests/models/published',
    ):
      (root / linked).parent.mkdir(parents=True, exist_ok=True)
      (root / linked).symlink_to(_ROOT / linked)
    (root / 'runs').mkdir()
    folders.append(root)
  return folders


def _corpus(root):
  """Leaves a file of passages and returns its path."""
  passages = [
    {'pid': f'p{n}', 'title': f'Lake {n}', 'text': f'Lake {n} is {n} km long.'}
    for n in range(40)
  ]
  return _saved(
    root / 'lakes.jsonl', ''.join(json.dumps(row) + '\n' for row in passages)
  )


def _own_files(root, monkeypatch):
  """Leaves the folder DATA and the reward function of the documents."""
  monkeypatch.syspath_prepend(root)
  if (root / 'my_rewards.py').exists():
    return
  originals = public_files.write(root / 'originals')['qed']
  build = ['data', 'build', 'qed', f'--root={root}/DATA']
  assert __main__.main([*build, f'--from_files={originals}']) == 0
  (program,), (rewards,) = (
    re.findall(r'^```python\n(.*?)```', _PAGES[page], re.DOTALL | re.M)
    for page in ('docs/your_own_data.md', 'docs/data.md')
  )
  with monkeypatch.context() as patch:
    patch.chdir(root)
    runpy.run_path(_saved(root / 'make_data.py', program))
  _saved(root / 'my_rewards.py', rewards)


def _own_study(root):
  """Leaves the config file of docs/your_own_study.md."""
  (program,) = re.findall(
    r'^```python\n(.*?)```', _PAGES['docs/your_own_study.md'], re.DOTALL | re.M
  )
  _saved(root / 'my_study.py', program)


def _saved(path, text):
  path.write_text(text, encoding='utf-8')
  return str(path)


def _workdir(words, folder):
  (workdir,) = (w.split('=')[1] for w in words if w.startswith('--workdir='))
  return folder / workdir


def _make(command, *more):
  """Returns the words of a make that installs nothing."""
  tools = [f'BIN={pathlib.Path(sys.executable).parent}', 'RUNTIME=']
  return [*shlex.split(command), *tools, *more]


def _quickstart(command, folder):
  return _run(_make(command, f'ARGS={shlex.join(_SMOKE)}'), folder)


def _made(command, folder):
  """Returns the words of the training or the study that a make starts."""
  lines = _run([*_make(command), '-n'], folder).replace('\\\n', '')
  (train,) = (x for x in lines.splitlines() if ' --workdir=' in x)
  words = shlex.split(train)
  return ['python', *words[words.index('-m') :]]


def _make_batch(folder, run, *flags):
  """Leaves the batch that other commands of the lab read."""
  (collect,) = (line for line in _commands() if ' lab collect ' in line)
  if not (folder / 'runs' / 'batch.npz').exists():
    run(*flags, words=shlex.split(collect))


def _index(command, folder):
  """Returns the command that indexes a corpus."""
  return shlex.split(command.replace('CORPUS.jsonl', _corpus(folder)))


def _serves(command, folder, run, capsys):
  """Asserts that a server answers; in this process if `capsys` is given."""
  (line,) = (line for line in _commands() if ' index ' in line)
  run(words=_index(line, folder))
  words = [sys.executable, *shlex.split(command)[1:], '--port=0']
  ask = lambda url: serving.post(
    f'{url.rstrip("/")}/retrieve', {'queries': ['lake 7'], 'topk': 1}
  )
  if capsys:
    _, reply = serving.run(capsys, words[4:], ask)
  else:
    server = subprocess.Popen(
      words, cwd=folder, env=_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
      reply = ask(re.search(r'http://\S+', server.stdout.readline()).group())
    finally:
      server.send_signal(signal.SIGTERM)
      assert server.wait(timeout=30) == 0
      server.stdout.close()
  assert '"Lake 7"' in reply['result'][0][0]['contents']


def _check_quickstart(command, output, folder):
  """Asserts that it is done and left what the documents promise."""
  name = dict(word.split('=') for word in shlex.split(command)[2:])
  workdir = 'quickstart-{ALGORITHM}-seed{SEED}'.format(
    **({'ALGORITHM': 'st_ppo', 'SEED': '0'} | name)
  )
  assert 'done.' in output
  workdir = folder / 'runs' / workdir
  assert (workdir / 'learning_curve.png').is_file()
  _check_metrics(workdir / 'metrics.jsonl')


def _of_own_data():
  """Returns the command of the run that others evaluate."""
  (line,) = (x for x in _commands() if x.endswith(' --workdir=runs/own'))
  return line


def _check_own_scores(output):
  """Asserts that both parts of the questions are beside the baseline."""
  head, *rows = [x.split() for x in output.splitlines()[-3:]]
  assert (head[2], head[-1]) == ('substring_match', 'majority')
  assert sorted(row[:2] for row in rows) == [['test', '8'], ['train', '32']]


def _check_plan(command, folder):
  """Asserts that these tests are called; here they would never end."""
  plan = _run([*_make(command, 'TESTING='), '-n'], folder)
  assert '-m pytest' in plan


def _check(command, folder, run, make_run, monkeypatch, *, capsys=None):
  """Asserts that a command of the documents does what they say.

  Args:
    command: the command.
    folder: a folder like a clone, where the commands before it have been run.
    run: returns the output of a command, with further flags. Without `words` it
      is this one.
    make_run: leaves the run of `make quickstart`.
    monkeypatch: the fixture.
    capsys: the fixture, for small versions: without programs that would be
      compiled for this command alone.
  """
  words, is_small = shlex.split(command), bool(capsys)
  if ' ablate ' in command:
    _own_study(folder)
  if 'DATA' in command or ' demonstrate ' in command:
    _own_files(folder, monkeypatch)
  if command in ('make test', 'make check'):
    _check_plan(command, folder)
  elif words[:2] == ['make', 'quickstart']:
    if is_small:
      _check_choices(words, _made(command, folder), run)
    else:
      _check_quickstart(command, _quickstart(command, folder), folder)
  elif command == 'make compare' and is_small:
    made = run('--dry_run', words=_made(command, folder))
    assert [made.count(f':{name}_ppo ') for name in ('token', 'turn')] == [3, 3]
  elif command == 'make compare':
    flags = shlex.join([*_SMOKE, '--seeds=1'])
    assert 'Paired differences' in _run(_make(command, f'ARGS={flags}'), folder)
    assert (folder / 'runs' / 'token_or_turn' / 'report.html').is_file()
  elif ' ablate ' in command and is_small:
    run('--dry_run')
  elif ' ablate ' in command:
    run(*_SMOKE)
    if '--dry_run' not in command:
      assert (_workdir(words, folder) / 'report.html').is_file()
  elif ' train ' in command or ' sft ' in command:
    if is_small:  # tests of what they choose run these
      run(words=_config(words))
    else:
      run(*(_SMOKE if ' train ' in command else _SMOKE[1:]))
      left = 'metrics.jsonl'
      if ' sft ' in command:
        left = 'policy/model.safetensors'
      assert (_workdir(words, folder) / left).is_file()
  elif ' demonstrate ' in command:
    assert '</search>' in run()
  elif ' index ' in command:
    run(words=_index(command, folder))
  elif ' serve ' in command:
    _serves(command, folder, run, capsys)
  elif ' lab ' in command or ' prefer ' in command:
    _make_batch(folder, run, *(() if is_small else _SMOKE))
    if ' collect ' not in command:
      run(*(_one_algorithm(command) if is_small else ()))
  elif ' evaluate ' in command and 'runs/own' in command:
    if is_small:
      run('--help')
    else:
      if not (folder / 'runs' / 'own').exists():
        _own_files(folder, monkeypatch)
        run(*_SMOKE, words=shlex.split(_of_own_data()))
      _check_own_scores(run())
  elif any(f' {name} ' in command for name in _OF_RUNS):
    if not (folder / _RUN).exists():
      make_run()
    for picture in re.findall(r'--picture=(\S+)', command):
      if is_small and not (folder / picture).exists():
        shutil.copy(folder / _RUN / 'learning_curve.png', folder / picture)
    name = next(name for name in _OF_RUNS if f' {name} ' in command)
    is_large = name == 'evaluate' and not is_small
    assert _OF_RUNS[name] in run(*(_SMOKE if is_large else ()))
  else:
    run()


def _check_choices(words, made, run):
  """Asserts that a quickstart has the algorithm and the seed of its command."""
  chosen = {'ALGORITHM': 'st_ppo', 'SEED': '0'}
  chosen |= dict(word.split('=') for word in words[2:])
  config = run(words=_config(made))
  assert any(word.endswith(f':{chosen["ALGORITHM"]}') for word in made)
  assert f'seed = {chosen["SEED"]}' in config.splitlines()
  workdir = 'runs/quickstart-{ALGORITHM}-seed{SEED}'.format(**chosen)
  assert f'--workdir={workdir}' in made


def _one_algorithm(command):
  """Returns a flag for one of several algorithms: each is a program."""
  found = re.findall(r'--algorithms=(\S+)', command)
  for names in found:
    names = [name.partition(':')[0] for name in names.split(',')]
    assert len(names) > 1 and set(names) <= set(algorithms.ALGORITHMS)
  return ['--algorithms=st_ppo'] if found else []


@pytest.mark.slow
@pytest.mark.parametrize('command', _commands())
def test_every_command_in_the_documents_runs(command, clones, monkeypatch):
  own, clone = shlex.split(command), clones[0]

  def run(*more, words=own):
    assert words[:2] == ['python', '-m'], words
    output = _run([sys.executable, *words[1:], *more], clone)
    assert output
    return output

  make_run = lambda: _quickstart('make quickstart', clone)
  _check(command, clone, run, make_run, monkeypatch)


@pytest.mark.parametrize('command', _commands())
def test_a_small_version_of_every_command_runs(
  command, clones, finished, monkeypatch, capsys
):
  own, clone = shlex.split(command), clones[1]
  monkeypatch.chdir(clone)
  # Tests of the lab and of training run what these two are for.
  arrays, *_ = batch_arrays.arrays()
  monkeypatch.setattr(collection, 'collect', lambda *_, **__: arrays)
  done = lambda *_, **__: print('done.') or 0
  monkeypatch.setattr(preference, 'prefer', done)

  def run(*more, words=own):
    assert words[:2] == ['python', '-m'], words
    # The last of equal flags counts.
    code = _MAINS[words[2]]([*words[3:], *more])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert out
    return out

  copy = lambda: shutil.copytree(finished, clone / _RUN, symlinks=True)
  _check(command, clone, run, copy, monkeypatch, capsys=capsys)


def _config(words):
  """Returns the words that print the configuration of a run."""
  flags = [word for word in words if not word.startswith('--workdir=')]
  return ['config' if word in ('train', 'sft') else word for word in flags]


def test_every_metric_of_a_run_is_documented(finished):
  _check_metrics(finished / 'metrics.jsonl')


def test_the_lines_of_the_data_page_are_read():
  page = _PAGES['docs/data.md']
  lines = '\n'.join(re.findall(r'^```json\n(.*?)```', page, re.DOTALL | re.M))
  lines = [json.loads(line) for line in lines.splitlines() if line]
  kinds = [readers.parse_question(x).kind for x in lines if 'question' in x]
  assert kinds == ['open', 'choice']
  passages = [passages_lib.passage_of(x) for x in lines if 'question' not in x]
  assert len({(p.title, p.text) for p in passages}) == 1 < len(passages)


def test_the_old_name_of_an_algorithm_is_accepted(clones):
  plan = _run(['make', '-n', 'quickstart', 'ROW=gspo', 'RUNTIME='], clones[0])
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
      'yes' if entry['advantage']['name'] in estimator_needs.VALUES else 'no',
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


def test_links_exist_and_lead_from_the_readme_to_every_page():
  linked = {}
  for name, page in _PAGES.items():
    folder = pathlib.Path(name).parent
    targets = re.findall(r'\]\(([^)#]+)[^)]*\)', page)
    targets = [x for x in targets if not x.startswith('https://')]
    lost = [x for x in targets if not (_ROOT / folder / x).exists()]
    assert not lost, (name, lost)
    linked[name] = {os.path.normpath(folder / x) for x in targets} & {*_PAGES}
  found, ahead = set(), {'README.md'}
  while ahead:
    found |= ahead
    ahead = set().union(*(linked[name] for name in ahead)) - found
  assert found == {*_PAGES}
  assert '(docs/architecture.md)' in _README.split('\n## ')[0]
