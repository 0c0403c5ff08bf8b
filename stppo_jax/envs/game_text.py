"""Reads and writes the turns of text games, each of which has a command."""

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
  """Returns a turn's command with single spaces; None if it has no command."""
  action = actions.parse_action(text, ('action',))
  if action.kind == protocol.INVALID or not action.content:
    return None
  return ' '.join(action.content.split())


def write(command: str) -> str:
  """Returns a turn that gives a command."""
  # The space belongs to the first word, because the tokens of the words of
  # games begin with a space, see `text_games`.
  return f'<action> {command}</action>'


def observation(text: str) -> protocol.Observation:
  """Returns the observation that holds the text of a game."""
  return protocol.Observation('\n\n', text, '\n\n')


def correction() -> protocol.Observation:
  """Returns the observation that follows a turn without a command."""
  return protocol.Observation(f'\n\n{CORRECTION}\n\n', '', '')
