"""Samples the value of a dialogue's tokens: what the policy still earns there.

The value of a prefix is the mean of the rewards that follow it when the policy
goes on from there. A critic learns it; here it is sampled. Each dialogue is cut
before the first and before the last token of each of its turns, and is
continued many times from there by the same engine, environment and limits. The
place after an observation is the one before the next turn's first token. A KL
penalty inside the rewards is left out here, although a critic learns it.

The continuations of a prefix are a group of the engine: the prefix is computed
once, and they share its pages of keys and values.

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
  """The beginning of a dialogue.

  Attributes:
    row, position: the place of the first token that it lacks.
    trajectory: the dialogue.
    turn: the number of the turn that goes on, from 0.
    written: the tokens of that turn that it has.
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
  """Returns the prefixes of all dialogues but those that have failed."""
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
    # A set, because the first token of a turn of one token is its last one,
    # too.
    for written in sorted({0, length - 1}) if length else ():
      yield Prefix(row, position + written, trajectory, number, written)
    position += length + len(turn.observation_ids)


def check(config: Any, count: int, *, slots: int) -> None:
  """Checks that values can be sampled.

  Args:
    config: the config of the dialogues.
    count: the number of continuations of a prefix.
    slots: the slots of a lane of the local engine; 0 for a remote engine.

  Raises:
    Misconfigured: the rewards of the config do not add up to the values of its
      critic, or there are too few continuations; one line each.
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
    f'config.algorithm.advantage.{name}={advantage[name]}: must be 1 where '
    'values are sampled, which are sums of rewards'
    for name in discounts
    if name in advantage and advantage[name] != 1
  ]
  if env.reward_function:
    problems.append(
      f'config.env.reward_function={env.reward_function}: must be empty where '
      'values are sampled; it would see a continuation alone'
    )
  if env.rewards.information_gain:
    problems.append(
      f'config.env.rewards.information_gain={env.rewards.information_gain}: '
      'must be 0 where values are sampled; a continuation has no gains'
    )
  if problems:
    raise exits.Misconfigured('\n'.join(problems))


class Sampled(NamedTuple):
  """Holds what the continuations of a prefix have earned.

  Attributes:
    row, position: the place of the first token that the prefix lacks.
    rewards: for each continuation that the infrastructure did not fail, the sum
      of the rewards from that token on.
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
  """Continues every prefix of dialogues.

  The limit of a turn's length counts from the cut: a continuation may add as
  many tokens to the turn that was cut as a whole turn may have.

  Args:
    collector: samples groups of `count` trajectories; it is built with the
      environment and the tokenizer that `continuing` returns.
    trajectories: the dialogues.
    count: the number of continuations of each prefix.
    seed, step: what the keys are derived from.

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
  """Returns sampled values as arrays of a packed batch.

  Args:
    sampled: the result of `sample`.
    shape: B and L of the batch.

  Returns:
    oracle_values_BL, the mean of the rewards that follow; oracle_variances_BL,
    their unbiased variance; and oracle_counts_BL, their number. All are 0
    where nothing was sampled, or fewer than two continuations succeeded.
  """
  values_BL, variances_BL = np.zeros((2, *shape), np.float32)
  counts_BL = np.zeros(shape, np.int32)
  for row, position, rewards in sampled:
    # A single continuation has no variance, so nobody could tell how far off
    # its value is; the count of 0 marks the place as not sampled.
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
  """The question of a dialogue that goes on from a prefix."""

  prefix: Prefix


class _Prompt(str):
  """The prompt of a dialogue, with the tokens of a prefix of it."""

  token_ids: np.ndarray


def continuing(
  environment: protocol.Environment, tokenizer: collect.Tokenizer
) -> tuple[Any, Any]:
  """Returns environment and tokenizer of a collector that continues prefixes.

  To the collector, a prefix is the prompt of a dialogue. The state of an
  episode is that of its prefix: before its first new turn, it answers the
  recorded ones again. So an environment must answer equal texts alike.
  """
  return _Environment(environment, tokenizer), _Tokenizer(tokenizer)


class _Tokenizer:
  """A tokenizer that has the tokens of prompts already."""

  def __init__(self, tokenizer: collect.Tokenizer):
    self.encode_text, self.decode = tokenizer.encode_text, tokenizer.decode
    self.neutralise = tokenizer.neutralise
    self._encode_prompt = tokenizer.encode_prompt

  def encode_prompt(self, text: str, *, tools: Any = ()) -> np.ndarray:
    """Returns the tokens of a prefix, or those of any other text."""
    # The ids that were sampled, and not the text once more: a tokenizer may cut
    # the same text into other tokens than the policy chose.
    if isinstance(text, _Prompt):
      return text.token_ids
    # The question of an episode that could not be opened.
    return self._encode_prompt(text, tools=tools)


class _Environment:
  """An environment whose dialogues begin with a prefix."""

  def __init__(
    self, environment: protocol.Environment, tokenizer: collect.Tokenizer
  ):
    self._environment, self._decode = environment, tokenizer.decode
    self.tags, self.tools = environment.tags, environment.tools

  def prompt(self, question: _Cut) -> _Prompt:
    """Returns the prompt of the dialogue, with the tokens of the prefix."""
    prompt = _Prompt(self._environment.prompt(question))
    prompt.token_ids = question.prefix.token_ids
    return prompt

  def episode(self, question: _Cut) -> '_Episode':
    """Returns an episode that goes on from the prefix of a question."""
    prefix = question.prefix
    recorded = prefix.trajectory.turns
    return _Episode(
      self._environment.episode(prefix.trajectory.question),
      prefix.trajectory.question,
      [self._decode(turn.token_ids) for turn in recorded[: prefix.turn]],
      self._decode(recorded[prefix.turn].token_ids[: prefix.written]),
    )


class _Episode:
  """An episode that begins with turns which it has answered before.

  Args:
    episode: the episode at its beginning.
    question: its question.
    texts: the recorded turns.
    begun: the recorded part of the turn that goes on.
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
    """Answers a turn of the continuation."""
    del question  # it has another type than the environment knows
    if turn_index == 0:
      # The answers are known. The steps are made for the state that they leave
      # in the episode, such as the place of a player or what was found.
      for number, recorded in enumerate(self._texts):
        step = await self._episode.step(self._question, number, recorded)
        if step.status is not None:
          # A search that succeeded when it was recorded may fail now.
          cause = step.cause or 'a recorded turn ends the dialogue now'
          return dataclasses.replace(
            step, observation=None, status=_FAILED, cause=cause
          )
      # An action may begin before the cut and end after it, so the environment
      # has to see the turn as a whole.
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
    """Rewards the whole dialogue, its recorded turns included."""
    del question
    whole = [*self._texts, self._begun + ''.join(texts[:1]), *texts[1:]]
    return self._episode.rewards(self._question, prompt, whole, status)

  def close(self) -> None:
    """Closes the episode."""
    self._episode.close()
