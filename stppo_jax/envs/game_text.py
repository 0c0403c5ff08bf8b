"""Reads and writes turns of text games; a turn gives the game one command."""

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
  # The command begins with a space, because the tokens for the words of games
  # begin with a space, see `TextWorldEnvironment.phrases`.
  return f'<action> {command}</action>'


def observation(text: str) -> protocol.Observation:
  """Returns the observation that holds the text of a game."""
  return protocol.Observation('\n\n', text, '\n\n')


def correction() -> protocol.Observation:
  """Returns the observation that follows a turn without a command."""
  return protocol.Observation(f'\n\n{CORRECTION}\n\n', '', '')
