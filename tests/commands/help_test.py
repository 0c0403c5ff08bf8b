"""`--help` names every flag, and explains every config key."""

import re

import pytest

from stppo_jax import __main__
from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.configs import defaults

_NOT_OF_A_RUN = ('lab', 'data', 'serve', 'index', 'doctor', 'checkpoint')
_COMMANDS = [
  *(('lab', name) for name in ('collect', 'score', 'advantages', 'compare')),
  *(('data', name) for name in ('build', 'list', 'show', 'demonstrate')),
  *(('checkpoint', name) for name in ('list', 'verify')),
  *((name,) for name in __main__.commands() if name not in _NOT_OF_A_RUN),
]


def _help(capsys, *words):
  assert __main__.main(words) == 0
  out, err = capsys.readouterr()
  assert not err
  assert all(len(line) <= 80 for line in out.splitlines())
  return out


@pytest.mark.parametrize('command', _COMMANDS)
def test_the_help_of_a_command_lists_its_flags(capsys, command):
  assert __main__.main([*command, '--zzz=1']) == 2
  (line,) = re.findall(r'^--zzz=1: .* choices: (.*)', capsys.readouterr().err)
  shown = _help(capsys, *command, '--help')
  assert shown == _help(capsys, *command, '-h', '--config=absent')
  for flag in line.split(', '):
    assert re.search(rf'^ +{re.escape(flag)}\b', shown, re.MULTILINE), flag
  if command[0] not in ('lab', 'data'):  # their commands have one help
    takes_keys = '--config.KEY' in line
    assert ('--help=KEY explains a config key' in shown) == takes_keys


def test_the_full_help_explains_every_key(capsys):
  shown = _help(capsys, 'train', '--helpfull')
  assert shown.startswith(_help(capsys, 'train', '--help').split('\n--help')[0])
  lines = shown.splitlines()
  for key, value in settings.flatten(base.get_config()).items():
    place = lines.index(f'{key} = {value!r}')
    assert lines[place + 1].startswith('    '), key  # its comment
  for kind, choices in defaults.DEFAULTS.items():
    for name, options in choices.items():
      for option, value in options.items():
        place = lines.index(f'algorithm.{kind}.{option} = {value!r}')
        assert lines[place + 1].startswith('    With '), (kind, name)


def test_the_help_of_a_key_is_its_comment_and_of_a_section_its_keys(capsys):
  for flag in ('slots', 'rollout.slots', 'config.rollout.slots'):
    lines = _help(capsys, 'train', f'--help={flag}').splitlines()
    assert lines[0] == 'rollout.slots = 0' and lines[1].startswith('    Traj')
  lines = _help(capsys, 'sft', '--help=model.lora').splitlines()
  assert lines[0] == 'model.lora' and lines[1].startswith('    ')
  keys = [line.split(' = ')[0] for line in lines[1:] if line[0] != ' ']
  options = base.get_config().model.lora
  assert sorted(keys) == [f'model.lora.{key}' for key in sorted(options)]
  shown = _help(capsys, 'train', '--help=algorithm.bounds')
  assert "algorithm.bounds.name = 'fixed'\n    fixed | " in shown
  assert 'algorithm.bounds.most = 2.0\n    With entropy_scaled: ' in shown
