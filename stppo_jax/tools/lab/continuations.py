"""Samples the values of prefixes of dialogues, by continuing each prefix.

The value of a prefix is the mean of the rewards that follow when the policy
continues the dialogue after the prefix. A critic learns these values, and this
module samples them. Each dialogue is cut before the first and before the last
token of each of its turns, and each prefix is continued many times with the
same engine, environment and limits. A cut before the first token of a turn is
also the cut after the observation before this turn. A KL penalty inside the
rewards is left out of the sampled values, although a critic learns values with
the penalty.

The continuations of a prefix share a prompt in the engine: the prefix is
prefilled once, and the continuations share its pages of the KV cache.

B trajectories, L tokens.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import logging
from typing import Any, NamedTuple

import numpy as np

from stppo_jax import exits
from stppo_jax import keys as keys_lib
from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import collect

_log = logging.getLogger(__name__)
Collected = Sequence[types.Trajectory]
_FAILED = types.TrajectoryStatus.INFRA_ERROR


@dataclasses.dataclass(frozen=True)
class Prefix:
  """The beginning of a dialogue, up to a cut inside or before a turn.

  Attributes:
    row: the row of the dialogue in the batch.
    position: the position of the first token after the prefix.
    trajectory: the whole dialogue.
    turn: the number of the turn that is cut, from 0.
    written: the number of tokens of this turn that are in the prefix.
  """

  row: int
  position: int
  trajectory: types.Trajectory
  turn: int
  written: int

  @property
  def token_ids(self) -> np.ndarray:
    """The tokens before `position`."""
    parts = [self.trajectory.prompt_ids]
    for turn in self.trajectory.turns[: self.turn]:
      parts += [turn.token_ids, turn.observation_ids]
    parts.append(self.trajectory.turns[self.turn].token_ids[: self.written])
    return np.concatenate(parts)


def prefixes(trajectories: Collected) -> list[Prefix]:
  """Returns the prefixes of all dialogues that have not failed."""
  return [
    prefix
    for row, trajectory in enumerate(trajectories)
    if trajectory.status is not _FAILED
    for prefix in _of_one(row, trajectory)
  ]


def _of_one(row: int, trajectory: types.Trajectory) -> Iterator[Prefix]:
  position = len(trajectory.prompt_ids)
  for number, turn in enumerate(trajectory.turns):
    length = len(turn.token_ids)
    # In a turn of one token, the first token is also the last. The set makes
    # one prefix of both.
    for written in sorted({0, length - 1}) if length else ():
      yield Prefix(row, position + written, trajectory, number, written)
    position += length + len(turn.observation_ids)


def check(config: Any, count: int, *, slots: int) -> None:
  """Checks that values can be sampled with a config.

  Args:
    config: the config of the dialogues.
    count: the number of continuations of a prefix.
    slots: the number of slots of a lane of the local engine; 0 for a remote
      engine.

  Raises:
    Misconfigured: the number of continuations is too small or does not divide
      the slots, or the config has discounts or rewards with which values cannot
      be sampled. The message has a line for each problem.
  """
  advantage, env = config.algorithm.advantage, config.env
  problems = []
  if count < 2:
    problems.append(
      f'--continuations={count}: must be 2 or more, or 0 for none'
    )
  elif slots % count:
    problems.append(
      f'--continuations={count}: must divide {slots}, the slots of a lane '
      '(rollout.slots / rollout.lanes)'
    )
  discounts = ['gamma']
  if 'steps' in advantage and advantage.steps == 'bilevel':
    discounts.append('gamma_turn')
  problems += [
    f'config.algorithm.advantage.{name}={advantage[name]}: must be 1 with '
    '--continuations, because a sampled value is a plain sum of rewards'
    for name in discounts
    if name in advantage and advantage[name] != 1
  ]
  if env.reward_function:
    problems.append(
      f'config.env.reward_function={env.reward_function}: must be empty with '
      '--continuations: it would get a continuation without its prefix'
    )
  if env.rewards.information_gain:
    problems.append(
      f'config.env.rewards.information_gain={env.rewards.information_gain}: '
      'must be 0 with --continuations: a continuation gets no such rewards'
    )
  if problems:
    raise exits.Misconfigured('\n'.join(problems))


class Sampled(NamedTuple):
  """The rewards of the continuations of a prefix.

  Attributes:
    row, position: see `Prefix`.
    rewards: for each continuation that the infrastructure did not fail, the sum
      of its outcome reward and of the rewards of its turns after the cut.
  """

  row: int
  position: int
  rewards: list[float]


def sample(
  collector: collect.Collector,
  trajectories: Collected,
  *,
  count: int,
  seed: int,
  step: int,
) -> list[Sampled]:
  """Continues every prefix of the dialogues, and returns the sampled rewards.

  The limit on the length of a turn counts from the cut: a continuation may add
  as many tokens to the turn that is cut as a whole turn may have.

  Args:
    collector: a collector of groups of `count` trajectories, built with the
      environment and the tokenizer that `continuing` returns.
    trajectories: the dialogues.
    count: the number of continuations of each prefix.
    seed, step: the numbers from which the random keys are derived.

  Raises:
    ValueError: `count` does not divide the slots of a lane of the engine.
  """
  cut = prefixes(trajectories)
  _log.info(f'continuing {len(cut)} prefixes {count} times each')
  key = keys_lib.step_key(seed, step, keys_lib.Purpose.CONTINUE)
  continued = collector.collect(
    [_Cut(**vars(x.trajectory.question), prefix=x) for x in cut],
    keys_lib.row_keys(key, 0, len(cut) * count),
  )
  groups = (continued[n : n + count] for n in range(0, len(continued), count))
  return [
    Sampled(
      prefix.row,
      prefix.position,
      [_rewards(x) for x in group if x.status is not _FAILED],
    )
    for prefix, group in zip(cut, groups, strict=True)
  ]


def as_arrays(
  sampled: Sequence[Sampled], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
  """Returns sampled values as arrays with an element for each token.

  Args:
    sampled: the result of `sample`.
    shape: B and L of the batch.

  Returns:
    The arrays by name: oracle_values_BL, the mean of the sampled rewards of the
    prefix before the token; oracle_variances_BL, the unbiased variance of these
    rewards; and oracle_counts_BL, the number of these rewards. All three are 0
    at tokens where nothing was sampled, or where fewer than two continuations
    succeeded.
  """
  values_BL, variances_BL = np.zeros((2, *shape), np.float32)
  counts_BL = np.zeros(shape, np.int32)
  for row, position, rewards in sampled:
    # A single continuation has no variance, so the error of its value is not
    # known. The count of 0 marks this token as not sampled.
    if len(rewards) > 1:
      values_BL[row, position] = np.mean(rewards)
      variances_BL[row, position] = np.var(rewards, ddof=1)
      counts_BL[row, position] = len(rewards)
  return {
    'oracle_values_BL': values_BL,
    'oracle_variances_BL': variances_BL,
    'oracle_counts_BL': counts_BL,
  }


def _rewards(trajectory: types.Trajectory) -> float:
  of_turns = sum(turn.reward for turn in trajectory.turns)
  return sum(trajectory.rewards.values()) + of_turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut(types.Question):
  """The question of a dialogue that continues a prefix."""

  prefix: Prefix


class _Prompt(str):
  """The prompt of a question, with the token ids of the prefix to continue."""

  token_ids: np.ndarray


def continuing(
  environment: protocol.Environment, tokenizer: collect.Tokenizer
) -> tuple[Any, Any]:
  """Returns the environment and the tokenizer that continue prefixes.

  With these two, a collector uses a prefix as the prompt of a dialogue. Before
  the first new turn, an episode steps through the recorded turns of the prefix
  again, so that it reaches the state at the end of the prefix. This needs an
  environment that always answers the same text in the same way.
  """
  return _Environment(environment, tokenizer), _Tokenizer(tokenizer)


class _Tokenizer:
  """A tokenizer that returns the recorded tokens of a prefix."""

  def __init__(self, tokenizer: collect.Tokenizer):
    self.encode_text, self.decode = tokenizer.encode_text, tokenizer.decode
    self.neutralise = tokenizer.neutralise
    self._encode_prompt = tokenizer.encode_prompt

  def encode_prompt(self, text: str, *, tools: Any = ()) -> np.ndarray:
    """Returns the prefix's tokens for a `_Prompt`, and encodes other texts."""
    # The recorded ids are returned. If the text were encoded again, it might be
    # cut into other tokens than the policy chose.
    if isinstance(text, _Prompt):
      return text.token_ids
    # If no episode could be opened, the collector passes the text of the
    # question.
    return self._encode_prompt(text, tools=tools)


class _Environment:
  """An environment whose dialogues begin with a prefix."""

  def __init__(
    self, environment: protocol.Environment, tokenizer: collect.Tokenizer
  ):
    self._environment, self._decode = environment, tokenizer.decode
    self.tags, self.tools = environment.tags, environment.tools

  def prompt(self, question: _Cut) -> _Prompt:
    """Returns the prompt of the question, with the token ids of the prefix."""
    prompt = _Prompt(self._environment.prompt(question))
    prompt.token_ids = question.prefix.token_ids
    return prompt

  def episode(self, question: _Cut) -> '_Episode':
    """Returns an episode that continues `question.prefix`."""
    prefix = question.prefix
    recorded = prefix.trajectory.turns
    return _Episode(
      self._environment.episode(prefix.trajectory.question),
      prefix.trajectory.question,
      [self._decode(turn.token_ids) for turn in recorded[: prefix.turn]],
      self._decode(recorded[prefix.turn].token_ids[: prefix.written]),
    )


class _Episode:
  """An episode that continues a prefix of recorded turns.

  Args:
    episode: the episode of the environment, at its beginning.
    question: the question of the recorded dialogue.
    texts: the texts of the recorded turns before the cut turn.
    begun: the recorded text of the cut turn, up to the cut.
  """

  def __init__(
    self,
    episode: protocol.Episode,
    question: types.Question,
    texts: Sequence[str],
    begun: str,
  ):
    self._episode, self._question = episode, question
    self._texts, self._begun = texts, begun

  async def step(
    self, question: _Cut, turn_index: int, text: str
  ) -> protocol.Step:
    """Answers a turn of the continuation.

    Before the first turn, the episode steps through the recorded turns.
    """
    del question  # the environment does not know the type `_Cut`
    if turn_index == 0:
      # The answers to the recorded turns are known. These steps are made for
      # the state that they leave in the episode, such as the position of a
      # player.
      for number, recorded in enumerate(self._texts):
        step = await self._episode.step(self._question, number, recorded)
        if step.status is not None:
          # A search that succeeded when it was recorded may fail now.
          cause = step.cause or 'a recorded turn ends the dialogue now'
          return dataclasses.replace(
            step, observation=None, status=_FAILED, cause=cause
          )
      # An action may begin before the cut and end after it, so the environment
      # gets the whole text of the turn.
      text = self._begun + text
    number = len(self._texts) + turn_index
    return await self._episode.step(self._question, number, text)

  def rewards(
    self,
    question: _Cut,
    prompt: str,
    texts: Sequence[str],
    status: types.TrajectoryStatus,
  ) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the rewards of the whole dialogue, recorded turns included."""
    del question
    whole = [*self._texts, self._begun + ''.join(texts[:1]), *texts[1:]]
    return self._episode.rewards(self._question, prompt, whole, status)

  def close(self) -> None:
    """Closes the episode."""
    self._episode.close()
