"""Reads and writes the turns of text games, which are commands."""

from stppo_jax.envs import actions
from stppo_jax.envs import protocol

STOP_STRINGS: tuple[str, ...] = ('</action>',)
TAGS = ('<think>', '</think>', '<action>', '</action>')
CORRECTION = 'No valid action. Write a command inside <action> and </action>.'

RULES = (
  'In every turn, first reason inside <think> and </think>, then write one '
  'command inside <action> and </action>, for example '
  '<action>go north</action>. Then you read what has become of it.'
)


def parse(text: str) -> str | None:
  """Returns the command of a turn with single spaces; None if it has none."""
  action = actions.parse_action(text, ('action',))
  if action.kind == protocol.INVALID or not action.content:
    return None
  return ' '.join(action.content.split())


def write(command: str) -> str:
  """Returns a turn that gives a command."""
  # The space is part of the first word: the words of games get tokens with a
  # space in front, see `text_games`.
  return f'<action> {command}</action>'


def observation(text: str) -> protocol.Observation:
  """Returns the observation that holds the text of a game."""
  return protocol.Observation('\n\n', text, '\n\n')


def correction() -> protocol.Observation:
  """Returns the observation that follows a turn without a command."""
  return protocol.Observation(f'\n\n{CORRECTION}\n\n', '', '')
