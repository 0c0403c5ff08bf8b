"""Text games that TextWorld generates from the number of a question.

A game (arXiv 1806.11532) is a small house with things in it and a quest, such
as to unlock a chest and to put its content on a table. The rules, the house and
the quest are TextWorld's. The descriptions are our own: short lists of the
things that the player sees or has. Such lists need no interpreter of Inform, so
a game starts in milliseconds. The games need the package `textworld`, which the
extra `textworld` of this package installs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import pathlib
import re
from typing import Any, Self

from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.envs import game_text
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.retrieval import protocol as retrieval

Status = types.TrajectoryStatus

# The number of games that are kept in memory, because the trajectories of a
# group share a game.
_KEPT_GAMES = 4096

# The number of states of games that are kept in memory, each with the commands
# that a demonstrator can choose from.
_KEPT_STATES = 16 * _KEPT_GAMES

# The name of a fact about two rooms -> the direction from the second room to
# the first room, and the direction from the first room to the second room.
_DIRECTIONS = {'north_of': ('north', 'south'), 'west_of': ('west', 'east')}
_CONDITIONS = ('open', 'closed', 'locked')

# Commands that the policy cannot give. They change nothing in a game, and their
# answers would tell nothing that the other observations do not tell.
_IDLE = ('examine', 'inventory', 'look')

BUILT_IN = f"""\
You play a text game. {game_text.RULES}
{prompts.PLACEHOLDER}
"""


class TextWorldEnvironment(protocol.Environment):
  """Plays at most `max_turns` + 1 commands of a game.

  A question's id is the seed of its game. The score is `solved`.
  """

  stop_strings = game_text.STOP_STRINGS
  tags = game_text.TAGS
  main_score = 'solved'

  def __init__(
    self,
    *,
    rooms: int,
    objects: int,
    quest_length: int,
    list_commands: bool,
    max_turns: int,
    prompt_template: str,
    solved: float,
    turn_progress: float,
  ):
    """Makes an environment.

    Args:
      rooms: the number of rooms.
      objects: the least number of things in the rooms.
      quest_length: the number of commands that solve the game.
      list_commands: whether observations list the commands that are possible.
      max_turns: the number of commands that get an observation.
      prompt_template: a file in which `{question}` is replaced by the objective
        and the first observation; '' for the built-in prompt.
      solved: the reward of a solved game.
      turn_progress: the reward of a turn after which fewer commands solve the
        game than before, and the penalty of a turn after which more commands
        are needed than before; 0 for sparse rewards.

    Raises:
      ValueError: if the package `textworld` is missing or the file of the
        prompt cannot be used.
    """
    _require_textworld()
    self._template = prompts.load_template(prompt_template, BUILT_IN)
    self._list_commands = list_commands
    self.max_turns = max_turns
    self.solved, self.turn_progress = solved, turn_progress
    self._game = functools.lru_cache(_KEPT_GAMES)(
      functools.partial(_make_game, rooms, objects, quest_length)
    )
    # The choices of a state are cached, because demonstrations reach the same
    # states again and again.
    self._choices = functools.lru_cache(_KEPT_STATES)(self._choices_after)

  @classmethod
  def from_options(
    cls, options: Mapping[str, Any], retriever: retrieval.Retriever | None
  ) -> Self:
    """See `protocol.Environment`."""
    del retriever
    return cls(
      **options['textworld'],
      max_turns=options['max_turns'],
      prompt_template=options['prompt_template'],
      solved=options['rewards']['solved'],
      turn_progress=options['rewards']['turn_progress'],
    )

  @staticmethod
  def phrases(vocabulary: Sequence[str]) -> list[str]:
    """See `protocol.Environment`.

    The strings are tags, `vocabulary`, the words of games and the correction.

    Raises:
      ValueError: if the package `textworld` is missing.
    """
    _require_textworld()
    words = [f' {word}' for word in _words_of_games()]
    return [*game_text.TAGS, *vocabulary, *words, game_text.CORRECTION]

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns the mean number of commands that were played per trajectory."""
    return {
      'env/number_of_commands': protocol.mean_turns(trajectories, 'command')
    }

  def episode(self, question: types.Question) -> '_Episode':
    """Returns the episode of one trajectory, which has a game of its own."""
    return _Episode(self, self._begin(question.id))

  def prompt(self, question: types.Question) -> str:
    """Returns the prompt with the objective and the first observation."""
    game = self._begin(question.id)
    text = f'Objective: {" ".join(game.objective.split())}\n{self.look(game)}'
    return self._template.replace(prompts.PLACEHOLDER, text)

  def solution(self, question: types.Question) -> list[str]:
    """Returns commands that solve the game of a question."""
    return self._begin(question.id).solution()

  def demonstrate(
    self,
    question: types.Question,
    choose: Callable[[str, Sequence[str]], str],
  ) -> list[str]:
    """See `games.Player`."""
    played: tuple[str, ...] = ()
    while len(played) <= self.max_turns:
      right, possible = self._choices(question.id, played)
      if right is None:
        break
      played += (choose(right, possible),)
    return [game_text.write(command) for command in played]

  def look(self, game: '_Game') -> str:
    """Returns a game's description; `list_commands` adds possible commands."""
    text = ' '.join(game.sentences())
    if self._list_commands:
      text += f'\nCommands: {", ".join(sorted(game.commands()))}.'
    return text

  def _choices_after(
    self, number: str, played: tuple[str, ...]
  ) -> tuple[str | None, list[str]]:
    """Returns the next command of a solution, and all possible commands.

    The next command is None if the game is solved or can no longer be solved.

    Args:
      number: the number of the game.
      played: the commands that have been played so far.
    """
    game = self._begin(number)
    for command in played:
      game.play(command)
    return next(iter(game.solution()), None), sorted(game.commands())

  def _begin(self, number: str) -> '_Game':
    return _Game(self._game(int(number)))


class _Episode(protocol.Episode):
  """The episode of one trajectory, which has a game of its own."""

  def __init__(self, rules: TextWorldEnvironment, game: '_Game'):
    self._rules, self._game = rules, game

  async def step(self, question, turn_index, text):
    """See `protocol.Episode`."""
    del question
    game, rules = self._game, self._rules
    command, kind, reward = game_text.parse(text), 'command', 0.0
    if command is None:
      kind, news = protocol.INVALID, game_text.correction()
    elif command not in game.commands():
      refused = text_lib.neutralise_tags(f'{command!r} is not possible.')
      kind, news = protocol.INVALID, game_text.observation(refused)
    else:
      # The reward of a turn compares the number of commands that solve the game
      # before the turn with this number after the turn.
      before = game.distance()
      game.play(command)
      after = game.distance()
      reward = rules.turn_progress * ((before > after) - (before < after))
      if game.solved or game.lost:
        return protocol.Step(kind, None, Status.COMPLETED, reward)
      news = game_text.observation(rules.look(game))
    if turn_index >= rules.max_turns:
      return protocol.Step(kind, None, Status.TRUNCATED_TURNS, reward)
    return protocol.Step(kind, news, None, reward)

  def rewards(self, question, prompt, texts, status):
    """See `protocol.Episode`."""
    del question, prompt, texts
    solved = float(self._game.solved and status is not Status.INFRA_ERROR)
    return {'solved': self._rules.solved * solved}, {'solved': solved}


def _make_game(rooms: int, objects: int, quest_length: int, seed: int) -> Any:
  """Returns the TextWorld game of a seed, the same game in every run."""
  import textworld  # pyright: ignore[reportMissingImports]
  from textworld import generator  # pyright: ignore[reportMissingImports]

  options = textworld.GameOptions()
  options.kb = _rules_of_games()
  options.nb_rooms = rooms
  options.nb_objects = objects
  options.quest_length = quest_length
  # All four seeds are set, because TextWorld draws a seed that is not set from
  # a random generator of its own.
  options.seeds = {
    name: 4 * seed + n
    for n, name in enumerate(('map', 'objects', 'quest', 'grammar'))
  }
  return generator.make_game(options)


def _require_textworld() -> None:
  """Raises ValueError if the package `textworld` is missing."""
  try:
    import textworld  # pyright: ignore[reportMissingImports] # noqa: F401
  except ImportError as error:
    raise ValueError(
      'env.name=textworld: needs the package textworld: run '
      "pip install '.[textworld]' in the clone"
    ) from error


@functools.cache
def _words_of_games() -> list[str]:
  """Returns all words of the grammar that forms names and objectives."""
  from textworld.generator import text_grammar  # pyright: ignore[reportMissingImports]

  files = text_grammar.Grammar().grammar_files
  texts = [pathlib.Path(file).read_text('utf-8') for file in files]
  return sorted(set(re.findall(r"[A-Za-z][A-Za-z'-]*", ' '.join(texts))))


@functools.cache
def _rules_of_games() -> Any:
  """Returns the rules of all games; cached, because reading them takes long."""
  from textworld import generator  # pyright: ignore[reportMissingImports]

  return generator.KnowledgeBase.load()


class _Game:
  """A game that is being played."""

  def __init__(self, made: Any):
    from textworld.generator import game  # pyright: ignore[reportMissingImports]

    self._made = made
    self._progress = game.GameProgression(made)
    self._names = {name: info.name for name, info in made.infos.items()}
    self._solution = self._progress.winning_policy

  @property
  def objective(self) -> str:
    return self._made.objective

  @property
  def solved(self) -> bool:
    return self._progress.completed

  @property
  def lost(self) -> bool:
    return self._progress.failed

  def solution(self) -> list[str]:
    """Returns commands that solve the game from now on; [] if none exist."""
    return [self._command(action) for action in self._solution or ()]

  def distance(self) -> int:
    """Returns the number of commands of `solution`."""
    return len(self._solution or ())

  @functools.cached_property
  def _commands(self) -> Mapping[str, Any]:
    """TextWorld's actions that are possible now, by the player's commands."""
    return {
      self._command(action): action
      for action in self._progress.valid_actions
      if not action.name.startswith(_IDLE)
    }

  def commands(self) -> Sequence[str]:
    """Returns the commands that are possible now."""
    return list(self._commands)

  def play(self, command: str) -> None:
    """Plays a command, which must be possible."""
    self._progress.update(self._commands[command])
    self._solution = self._progress.winning_policy
    # The cached actions belong to the state before this command.
    del self._commands

  def _command(self, action: Any) -> str:
    return action.format_command(
      {
        variable.name: self._names[variable.name]
        for variable in action.variables
      }
    )

  def sentences(self) -> Iterator[str]:
    """Yields sentences about the room, its things, its exits and the player."""
    facts: dict[str, list[tuple[Any, ...]]] = {}
    for fact in self._progress.state.facts:
      facts.setdefault(fact.name, []).append(tuple(fact.arguments))
    name = lambda variable: self._names[variable.name]
    condition = {
      variable.name: word
      for word in _CONDITIONS
      for (variable,) in facts.get(word, ())
    }
    # In TextWorld, the type P is the player, and the type I is the inventory.
    (here,) = [r for who, r in facts['at'] if who.type == 'P']
    yield f'You are in the {name(here)}.'
    seen = []
    for thing, room in facts['at']:
      if room == here and thing.type != 'P':
        state = condition.get(thing.name, '')
        seen.append(_with_article(f'{state} {name(thing)}'))
        for word in ('in', 'on'):
          # The content of a closed thing cannot be seen.
          for inner, outer in facts.get(word, ()):
            if outer == thing and (word == 'on' or state == 'open'):
              seen.append(
                f'{_with_article(name(inner))} {word} the {name(thing)}'
              )
    if seen:
      yield f'There is {", ".join(sorted(seen))}.'
    doors = {(a, b): door for a, door, b in facts.get('link', ())}
    exits = []
    for relation, (to_first, to_second) in _DIRECTIONS.items():
      for first, second in facts.get(relation, ()):
        for start, end, direction in (
          (second, first, to_first),
          (first, second, to_second),
        ):
          if start == here:
            door = doors.get((start, end))
            through = ''
            if door is not None:
              state = condition.get(door.name, '')
              through = ' through ' + _with_article(f'{state} {name(door)}')
            exits.append(direction + through)
    if exits:
      yield f'You can go {", ".join(sorted(exits))}.'
    carried = [
      _with_article(name(thing))
      for thing, place in facts.get('in', ())
      if place.type == 'I'
    ]
    if carried:
      yield f'You have {", ".join(sorted(carried))}.'


def _with_article(noun: str) -> str:
  """Returns a noun with its indefinite article."""
  noun = noun.strip()
  return f'{"an" if noun[0].lower() in "aeiou" else "a"} {noun}'
