"""Collecting: the policy writes, the environment answers, until it ends.

Token in, token out: what the policy sampled is stored as sampled, text is
decoded for the environment only. Masks are born here: a `Turn` holds what the
policy wrote apart from what it was told.
"""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import event_loop

Status = types.TrajectoryStatus


class Tokenizer(Protocol):
  """See `sampling.tokenizer.Tokenizer`."""

  def encode_prompt(self, text: str) -> np.ndarray: ...
  def encode_text(self, text: str) -> np.ndarray: ...
  def decode(self, ids: Sequence[int]) -> str: ...


class Written(Protocol):
  """See `sampling.engine.Written`."""

  token_ids: np.ndarray
  logprobs: np.ndarray
  stopped: bool


class Engine(Protocol):
  """See `sampling.engine.Engine`."""

  slots: int
  max_length: int

  def prefill(
    self, ids_by_group: Mapping[int, np.ndarray], *, group_size: int
  ) -> None: ...
  def remaining(self, slot: int) -> int: ...
  def extend(self, ids_by_slot: Mapping[int, np.ndarray]) -> None: ...
  def generate(
    self, slots, *, keys_S, max_tokens, greedy
  ) -> Mapping[int, Written]: ...


@dataclasses.dataclass
class _Row:
  """A trajectory in the making."""

  question: types.Question
  prompt: str
  prompt_ids: np.ndarray
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  texts: list[str] = dataclasses.field(default_factory=list)
  status: Status | None = None


class Collector:
  """Plays questions on the slots of an engine.

  Args:
    engine: decodes; weights have been published to it.
    environment: prompts, answers and rewards.
    tokenizer: of the policy.
    loop: where the environment's coroutines run.
    max_turn_tokens: longest turn, in tokens.
    max_observation_tokens: longest observation; its body is cut, never its
      closing tag.
    group_size: trajectories of each question; their prompt is computed once.
  """

  def __init__(
    self,
    *,
    engine: Engine,
    environment: protocol.Environment,
    tokenizer: Tokenizer,
    loop: event_loop.EventLoop,
    max_turn_tokens: int,
    max_observation_tokens: int,
    group_size: int = 1,
  ):
    self._engine = engine
    self._environment = environment
    self._tokenizer = tokenizer
    self._loop = loop
    self._max_turn_tokens = max_turn_tokens
    self._max_observation_tokens = max_observation_tokens
    self._group_size = group_size

  def collect(
    self, questions: Sequence[types.Question], keys, *, greedy: bool = False
  ) -> list[types.Trajectory]:
    """`group_size` adjacent trajectories per question, in order.

    Args:
      questions: no more than the engine has slots for their trajectories.
      keys: typed jax keys, one per slot of the engine.
      greedy: take the likeliest token instead of drawing.

    A question whose prompt leaves no room to write becomes TRUNCATED_LENGTH
    without a turn.

    Raises:
      ValueError: too many questions.
    """
    size = self._group_size
    if len(questions) * size > self._engine.slots:
      raise ValueError(
        f'{len(questions)} questions for {self._engine.slots} slots, '
        f'{size} of them for each'
      )
    groups = [self._open(question) for question in questions]
    rows = [row for group in groups for row in group]
    active = [n for n, row in enumerate(rows) if row.status is None]
    self._engine.prefill(
      {n // size: rows[n].prompt_ids for n in active}, group_size=size
    )
    while active:
      written = self._engine.generate(
        active, keys_S=keys, max_tokens=self._max_turn_tokens, greedy=greedy
      )
      steps = self._loop.run(self._answers(rows, written))
      observations = {}
      for slot in active:
        observation_ids = self._close_turn(
          slot, rows[slot], written[slot], steps[slot]
        )
        if rows[slot].status is None:
          observations[slot] = observation_ids
      self._engine.extend(observations)
      active = list(observations)
    return [self._finish(row) for row in rows]

  def _open(self, question: types.Question) -> list[_Row]:
    """The rows of a group: one prompt, one beginning."""
    prompt = self._environment.prompt(question)
    ids = self._tokenizer.encode_prompt(prompt)
    room = self._engine.max_length
    status = Status.TRUNCATED_LENGTH if len(ids) >= room else None
    return [
      _Row(question, prompt, ids[:room], status=status)
      for _ in range(self._group_size)
    ]

  async def _answers(
    self, rows: Sequence[_Row], written: Mapping[int, Written]
  ) -> dict[int, protocol.Step]:
    """What the environment says to every turn, all at once."""

    async def answer(slot):
      row = rows[slot]
      row.texts.append(self._tokenizer.decode(written[slot].token_ids))
      return await self._environment.step(
        row.question, len(row.turns), row.texts[-1]
      )

    steps = await asyncio.gather(*(answer(slot) for slot in written))
    return dict(zip(written, steps))

  def _close_turn(
    self, slot: int, row: _Row, written: Written, step: protocol.Step
  ) -> np.ndarray:
    """Appends the turn; sets the status if the trajectory ends here."""
    observation_ids = np.zeros(0, np.int32)
    row.status = step.status
    if row.status is None:
      observation_ids = self._observe(step.observation)
      # The policy must be able to write at least one token after it.
      if len(observation_ids) >= self._engine.remaining(slot):
        row.status = Status.TRUNCATED_LENGTH
    elif row.status is not Status.INFRA_ERROR:
      out_of_room = not written.stopped and not self._engine.remaining(slot)
      if step.action == 'invalid' and out_of_room:
        row.status = Status.TRUNCATED_LENGTH
    if row.status is not None:
      observation_ids = np.zeros(0, np.int32)
    row.turns.append(
      types.Turn(
        written.token_ids,
        written.logprobs,
        observation_ids,
        step.action,
        step.reward,
      )
    )
    return observation_ids

  def _observe(self, observation: protocol.Observation) -> np.ndarray:
    prefix, body, suffix = (
      self._tokenizer.encode_text(part)
      for part in (observation.prefix, observation.body, observation.suffix)
    )
    room = self._max_observation_tokens - len(prefix) - len(suffix)
    return np.concatenate([prefix, body[: max(room, 0)], suffix])

  def _finish(self, row: _Row) -> types.Trajectory:
    rewards, scores = self._environment.rewards(
      row.question, row.prompt, row.texts, row.status
    )
    return types.Trajectory(
      question=row.question,
      prompt_ids=row.prompt_ids,
      turns=tuple(row.turns),
      rewards=rewards,
      status=row.status,
      scores=scores,
    )
