"""Measures TextWorld: the games made per second, and the steps per second.

    pip install '.[textworld]'
    python -m benchmarks.text_games

A script plays in one thread, through the interface that the collector uses. It
alternates between a command that is not possible and the next command of the
solution. After a command of the solution, the environment looks for the
shortest solution from the new state, and describes what the player sees. Games
are made before steps are timed. The CPU time does not depend on other work of
the machine.
"""

import asyncio
from collections.abc import Sequence
import time

import numpy as np

from benchmarks import measure
from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.data import games
from stppo_jax.envs import text_games

_GOAL = 200  # the least steps per second


def play(
  environment: text_games.TextWorldEnvironment,
  questions: Sequence[types.Question],
) -> tuple[int, int]:
  """Solves games; returns the number of steps, and of solved games."""

  async def run() -> tuple[int, int]:
    steps = solved = 0
    for question in questions:
      episode = environment.episode(question)
      commands = environment.solution(question)
      texts = [x for command in commands for x in ('fly away', command)]
      for turn_index, text in enumerate(texts):
        step = await episode.step(
          question, turn_index, f'<action>{text}</action>'
        )
        steps += 1
      assert step.status is not None
      _, scores = episode.rewards(question, '', texts, step.status)
      solved += int(scores['solved'])
    return steps, solved

  return asyncio.run(run())


def report(rooms: int, objects: int, quest_length: int, count: int) -> str:
  """Returns the line about `count` games."""
  options = base.get_config().env
  options.max_turns = 2 * quest_length
  options.textworld.update(
    rooms=rooms, objects=objects, quest_length=quest_length
  )
  kind = text_games.TextWorldEnvironment
  environment = kind.from_options(options.to_dict(), None)
  questions = games.GameQuestions(seed=0, count=0).evaluation(count + 1)
  first, *others = questions['games']
  play(environment, [first])  # the first game reads the rules of all games
  begin = _clocks()
  for question in others:
    environment.prompt(question)
  between = _clocks()
  steps, solved = play(environment, others)
  made, (cpu, wall) = between - begin, _clocks() - between
  return (
    f'{rooms} rooms, {objects} objects, quests of {quest_length}: '
    f'{len(others) / made[0]:.0f} games made per CPU second '
    f'({len(others) / made[1]:.0f} per second), '
    f'{steps / cpu:.0f} steps per CPU second ({steps / wall:.0f} per second, '
    f'goal {_GOAL}); {solved} of {len(others)} solved'
  )


def _clocks() -> np.ndarray:
  """Returns the CPU time of this process and the wall time, in seconds."""
  return np.array([time.process_time(), time.perf_counter()])


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'text_games', rooms=3, objects=6, quest_length=4, games=40
  )
  flags = measure.start(parser, arguments)
  print(report(flags.rooms, flags.objects, flags.quest_length, flags.games))


if __name__ == '__main__':
  main()
