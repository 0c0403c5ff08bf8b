"""Command lines of users: their configurations and their errors."""

import math
import os
import pathlib
import sys

from ml_collections import config_dict
import pytest

from stppo_jax import __main__
from stppo_jax import exits
from stppo_jax.commands import config as config_command
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from tests import processes

_REPO = pathlib.Path(__file__).resolve().parents[3]
_BASE = f'--config={_REPO}/configs/base.py'


def _flags(**options):
  return command_line.flags(workdir='', **options)


def _errors(*argv, required=(), **defaults):
  flags = _flags(**defaults)
  with pytest.raises(exits.Misconfigured) as caught:
    configuration.parse(argv, flags=flags, required=required)
  return str(caught.value).splitlines()


def _config(*argv):
  return configuration.parse([_BASE, *argv])


@pytest.mark.parametrize(
  ('flag', 'expected'),
  [
    ('--config.seed=7', 7),
    ('--config.rollout.temperature=2', 2.0),
    ('--config.rollout.temperature=5e-1', 0.5),
    ('--config.mesh.fsdp=1', 1),
    ('--config.writer.tensorboard=False', False),
    ('--config.writer.tensorboard=false', False),
    ('--config.writer.tensorboard=0', False),
    ('--noconfig.writer.tensorboard', False),
    ('--config.sft.before_training=true', True),
    ('--config.sft.before_training', True),
    ('--config.data.synthetic_wiki.hops=[2]', (2,)),
    ('--config.data.synthetic_wiki.hops=(1,)', (1,)),
    ("--config.updates.remat='full'", 'full'),
    ('--config.updates.remat=full', 'full'),
    ('--config.data.corpus=12', '12'),
    ('--config.data.corpus=a=b', 'a=b'),
    ('--config.data.corpus=', ''),
    ('--config.algorithm.correction.clipping_bias.tau=5', 5.0),
    ('--config.algorithm.correction.clipping_bias.tau=inf', math.inf),
    (
      "--config.algorithm.correction.names=['clipping_bias']",
      ('clipping_bias',),
    ),
    ('--config.algorithm.correction.names=tis', ('tis',)),
    ("--config.algorithm.correction.names='tis'", ('tis',)),
    ('--config.algorithm.correction.names=tis,mis', ('tis', 'mis')),
    ('--config.algorithm.correction.names=[tis, mis]', ('tis', 'mis')),
    ('--config.algorithm.correction.names=(tis,)', ('tis',)),
    ('--config.algorithm.correction.names=', ()),
    ('--config.algorithm.correction.names=()', ()),
  ],
)
def test_values_take_the_type_of_their_key(flag, expected):
  config = _config(flag)
  for name in flag.partition('=')[0].partition('config.')[2].split('.'):
    config = config[name]
  assert config == expected and type(config) is type(expected)


def test_algorithm_flags_and_separate_values():
  flags = _flags(steps=5, name='x')
  config = configuration.parse(
      [
          '--config', f'{_REPO}/configs/base.py:turn_ppo',
          '--workdir', 'run',
          '--config.mesh.data', '-1',
          '--config.seed=1', '--config.seed=2',
          '--steps=12',
      ],
      flags=flags,
  )  # fmt: skip
  assert config.algorithm.ratio.level == 'turn'
  assert (config.seed, config.mesh.data) == (2, -1)
  assert (flags.steps, flags.name, flags.workdir) == (12, 'x', 'run')
  with pytest.raises((AttributeError, KeyError)):
    config.new_key = 1
  assert isinstance(config, config_dict.ConfigDict)


def test_booleans_need_no_value():
  flags = _flags(compile=True, deep=False, name='', x=False, y=False)
  given = '--nocompile', '--deep', '--name=f', '--x', '--y=t', '--nox'
  configuration.parse([_BASE, *given], flags=flags)
  assert (flags.compile, flags.deep, flags.name) == (False, True, 'f')
  assert (flags.x, flags.y) == (False, True)


def test_flags_that_repeat_and_flags_that_are_wrong():
  flags = _flags(set=command_line.REPEATED, fast=False, x=1)
  argv = ['--set', 'a=1', '--fast', '--x', '-1', '--set=b=2', '--x=3']
  assert not command_line.parse(flags, argv).errors
  assert (flags.x, flags.set, flags.fast) == (3, ['a=1', 'b=2'], True)
  flags = _flags(set=command_line.REPEATED, fast=False, x=1)
  argv = ['--set=a', '--x=y', '--fats', '--fast=maybe', '--config.seed=1', 'z']
  # A misspelt flag and a wrong one are not missing as well.
  required = ('workdir', 'x', 'fast')
  found = command_line.parse(flags, [*argv, '--set'], required=required)
  choices = 'choices: --workdir, --set, --fast, --x'
  assert found.errors == [
    '--x=y: must be an integer',
    f'--fats: unknown flag; did you mean --fast? {choices}',
    '--fast=maybe: must be true or false',
    f'--config.seed=1: unknown flag; {choices}',
    'z: not a flag; flags start with --',
    '--set: has no value',
    '--workdir: missing',
  ]
  assert flags.set == ['a']  # what is right counts once
  flags = _flags(out='')
  (line,) = command_line.parse(flags, ['--ot=1'], required=('out',)).errors
  assert line.startswith('--ot=1: ')


@pytest.mark.parametrize('flag', ['--fats', '-fast', '--fsat'])
def test_the_value_of_a_misspelt_flag_is_no_error_of_its_own(flag):
  flags = _flags(x='')
  argv = [flag, '-1', flag, 'y', flag, '--x=1']
  first, second, third, fourth = command_line.parse(flags, argv).errors
  assert first == third == fourth and first.startswith(f'{flag}: ')
  assert second.startswith('-1: ')  # it may be a flag too
  assert len(command_line.parse(flags, [flag, '']).errors) == 1
  assert flags.x == '1'


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('\nimport no_such_module', 'line 2, fails with ModuleNotFoundError'),
    ('def get_config():\n  return 1 / 0', 'line 2, fails with ZeroDivision'),
    # The place of the file, not that of json.
    (
      'import json\ndef get_config(): return json.loads("")',
      'mine.py, line 2, fails with JSONDecodeError',
    ),
    ('def get_config(): raise ValueError("a\\nb")', 'ValueError: a b'),
    # A module that it imports.
    (
      'import sizes_with_an_error',
      'sizes_with_an_error.py, line 2, fails with SyntaxError: ',
    ),
  ],
)
def test_a_config_file_that_fails(tmp_path, monkeypatch, source, expected):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'sizes_with_an_error.py').write_text('\nx = (', encoding='utf-8')
  file = tmp_path / 'mine.py'
  file.write_text(source, encoding='utf-8')
  (line,) = _errors(f'--config={file}', '--workdir=x')
  assert line.startswith(f'--config={file}: ') and expected in line


def test_a_config_file_that_is_edited_at_once_is_read_again(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, 'dont_write_bytecode', False)
  file = tmp_path / 'mine.py'
  for steps in (5, 6):
    file.write_text(
      'from stppo_jax.configs import quickstart\n'
      'def get_config():\n'
      '  config = quickstart.get_config()\n'
      f'  config.num_steps = {steps}\n'
      '  return config\n',
      encoding='utf-8',
    )
    os.utime(file, (0, 0))  # byte code is known by time and size
    assert configuration.parse([f'--config={file}']).num_steps == steps
  assert [*tmp_path.iterdir()] == [file]


def test_packaged_configs_load_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  flags = ['--config=configs/quickstart.py:turn_ppo']
  config = configuration.parse(flags)
  assert config.algorithm.ratio.level == 'turn'
  # Files that the config names are found too, and its own files come first.
  assert '{question}' in pathlib.Path(config.env.prompt_template).read_text()
  (line,) = _errors('--config=configs/quickstrt.py', '--workdir=x')
  assert 'no such file; did you mean configs/quickstart.py' in line
  (tmp_path / 'configs').mkdir()
  mine = 'from stppo_jax.configs import base\nget_config = base.get_config\n'
  (tmp_path / 'configs' / 'quickstart.py').write_text(mine)
  assert configuration.parse(flags).model.path == ''


def test_errors_of_all_kinds_are_printed_together():
  lines = _errors(
    _BASE,
    '--workdri=x',
    '--config.sed=1',
    '--config.seed=x',
    '--config.env.max_length=-1',
    '--config.algorithm.objective.name=hope',
    '--config.retrieval.url=nowhere',
  )
  starts = [line.split(':')[0].split('=')[0] for line in lines]
  assert starts == [
    '--workdri',  # and no --workdir that is missing
    '--config.sed',
    '--config.seed',
    'config.env.max_length',
    'config.retrieval.url',
    'config.algorithm.objective.name',
  ]


@pytest.mark.parametrize('command', ['train', 'evaluate'])
def test_a_wrong_command_line_exits_2_fast(tmp_path, command):
  before = os.times()
  done = processes.python(
    *('-m', 'stppo_jax', command, '--config=configs/base.py'),
    f'--{"checkpoint" if command == "evaluate" else "workdir"}={tmp_path}/run',
    *('--config.rollout.temperature=0', '--config.sed=1'),
    # A platform that does not exist: touching a device would be an error.
    env=os.environ | {'JAX_PLATFORMS': 'none_such'},
  )
  # Not the time on the wall: other tests share the machine.
  after = os.times()
  assert (done.returncode, done.stdout) == (2, '')
  # Only evaluate reads a folder that must be there.
  expected = 3 if command == 'evaluate' else 2
  assert len(done.stderr.splitlines()) == expected
  assert 'Traceback' not in done.stderr
  seconds = after.children_user + after.children_system
  assert seconds - before.children_user - before.children_system < 2
  assert not (tmp_path / 'run').exists()


def _main(capsys, *argv):
  """Returns exit code, stdout and stderr."""
  code = __main__.main(argv)
  return code, *capsys.readouterr()


def test_config_prints_overrides_that_give_the_same_config(capsys):
  code, out, err = _main(
    capsys, 'config', '--config=configs/base.py', '--config.seed=3'
  )
  assert (code, err) == (0, '')
  lines = out.splitlines()
  assert 'seed = 3' in lines and "model.dtype = 'float32'" in lines
  flags = [
    f'--config.{line.replace(" = ", "=", 1)}'
    for line in lines
    if not line.startswith('#')
  ]
  again = _config(*flags)
  assert again.to_dict() == _config('--config.seed=3').to_dict()
  differences = [x for x in lines if x.startswith('# differs')]
  assert differences[0] == '# differs from base: seed = 3, not 0'
  assert len(differences) == 2  # the title has the name of the file


def test_config_prints_numbers_that_follow_from_it(capsys):
  code, out, _ = _main(
    *(capsys, 'config', '--config=configs/quickstart.py:turn_ppo'),
    *('--config.rollout.steps_ahead=2', '--config.updates.microbatch_size=16'),
  )
  assert code == 0
  # 128 trajectories, minibatches of 64, two epochs, 60 steps.
  assert '# updates per collection: 4' in out
  assert '# updates of the run: 240' in out
  assert '# microbatches per update: at most 4' in out
  assert 'is 11 updates newer' in out
  assert '# differs from base: num_steps = 60, not 100' in out


class _Foreseen(Exception):
  exit_code = 75


@pytest.mark.parametrize(
  ('error', 'code', 'expected'),
  [
    (_Foreseen('the retriever is away'), 75, 'the retriever is away\n'),
    (KeyError('bug'), 70, 'Traceback'),
    (KeyboardInterrupt(), 130, 'interrupted\n'),
  ],
)
def test_exit_codes_of_what_a_command_raises(
  monkeypatch, capsys, error, code, expected
):
  def main(argv):
    raise error

  monkeypatch.setattr(config_command, 'main', main)
  found, _, err = _main(capsys, 'config')
  assert found == code and err.startswith(expected)
