"""Collecting: the policy writes, the environment answers, until it ends.

Token in, token out: what the policy sampled is stored as sampled, text is
decoded for the environment only. Masks are born here: a `Turn` holds what the
policy wrote apart from what it was told.

Nobody waits for anybody: the environment answers on the event loop's thread
while the engine writes on, and a row goes on as soon as its answer is there.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import dataclasses
from typing import Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import event_loop

Status = types.TrajectoryStatus

_LINGER = 0.003  # seconds without a further answer


class Tokenizer(Protocol):
  """See `sampling.tokenizer.Tokenizer`."""

  def encode_prompt(self, text: str) -> np.ndarray: ...
  def encode_text(self, text: str) -> np.ndarray: ...
  def decode(self, ids: Sequence[int]) -> str: ...


class GeneratedTurn(Protocol):
  """See `sampling.turns.GeneratedTurn`."""

  token_ids: np.ndarray
  logprobs: np.ndarray
  truncated_logprobs: np.ndarray | None  # where that is not known
  stopped: bool


class Engine(Protocol):
  """See `sampling.engine.Engine`.

  A polled row without a turn (None) was failed by the engine's infrastructure.
  """

  max_length: int
  version: int
  busy: bool

  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool,
  ) -> None: ...
  def poll(self) -> Mapping[int, GeneratedTurn | None]: ...
  def remaining(self, row: int) -> int: ...
  def resume(self, row: int, token_ids: np.ndarray) -> None: ...
  def close(self, row: int) -> np.ndarray | None: ...  # its expert_ids
  def statistics(self) -> Mapping[str, float]: ...


@dataclasses.dataclass
class _Row:
  """A trajectory in the making."""

  question: types.Question
  prompt: str
  prompt_ids: np.ndarray
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  texts: list[str] = dataclasses.field(default_factory=list)
  status: Status | None = None
  expert_ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class _Asked:
  """A turn that the environment is answering."""

  row: int
  written: GeneratedTurn


class Collector:
  """Plays questions on an engine.

  Args:
    engine: decodes; weights have been published to it.
    environment: prompts, answers and rewards.
    tokenizer: of the policy.
    loop: where the environment's coroutines run.
    max_turn_tokens: longest turn, in tokens.
    max_observation_tokens: longest observation; its body is cut, never its
      closing tag.
    group_size: trajectories of each question; see `begin` for their prompt.
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
      questions: as many as there are groups.
      keys: typed jax keys, one per trajectory.
      greedy: take the likeliest token instead of drawing.

    A question whose prompt leaves no room to write becomes TRUNCATED_LENGTH
    without a turn.
    """
    groups = [self._open(question) for question in questions]
    rows = [row for group in groups for row in group]
    self._engine.begin(
      [g[0].prompt_ids if g[0].status is None else None for g in groups],
      keys,
      group_size=self._group_size,
      max_turn_tokens=self._max_turn_tokens,
      greedy=greedy,
    )
    playing = sum(row.status is None for row in rows)
    asked: dict[concurrent.futures.Future, _Asked] = {}
    try:
      while playing:
        for future in self._answered(asked):
          turn = asked.pop(future)
          playing -= self._go_on(turn, rows[turn.row], future.result())
        ended = self._engine.poll()
        asked |= self._ask(rows, {n: w for n, w in ended.items() if w})
        playing -= self._give_up(rows, [n for n, w in ended.items() if not w])
    finally:
      for future in asked:  # of an interrupted collection
        future.cancel()
    return [self._finish(row) for row in rows]

  def statistics(self) -> Mapping[str, float]:
    """What the engine counted since the last call."""
    return self._engine.statistics()

  def _answered(self, asked) -> list[concurrent.futures.Future]:
    """The turns that are answered; waits where there is nothing else to do."""
    if not self._engine.busy:
      done, waiting = concurrent.futures.wait(
        asked, return_when=concurrent.futures.FIRST_COMPLETED
      )
      # Questions that went together are answered together: going on with the
      # first answer alone would cost as much as going on with all of them.
      while waiting and done:
        done, waiting = concurrent.futures.wait(waiting, timeout=_LINGER)
    return [future for future in asked if future.done()]

  def _ask(
    self, rows: Sequence[_Row], ended: Mapping[int, GeneratedTurn]
  ) -> dict[concurrent.futures.Future, _Asked]:
    """Shows turns to the environment, which answers on another thread."""
    turns = [_Asked(number, written) for number, written in ended.items()]
    asking = [rows[turn.row] for turn in turns]
    for turn, row in zip(turns, asking):
      row.texts.append(self._tokenizer.decode(turn.written.token_ids))
    steps = [
      self._environment.step(row.question, len(row.turns), row.texts[-1])
      for row in asking
    ]
    return dict(zip(self._loop.submit(steps), turns, strict=True))

  def _give_up(self, rows: Sequence[_Row], failed: Sequence[int]) -> int:
    """Closes rows whose turn the engine failed; how many."""
    for number in failed:
      rows[number].status = Status.INFRA_ERROR
      self._engine.close(number)
    return len(failed)

  def _go_on(self, turn: _Asked, row: _Row, step: protocol.Step) -> bool:
    """Closes a turn with its answer; whether the trajectory ends with it."""
    observation_ids = self._close_turn(turn.row, row, turn.written, step)
    if row.status is None:
      self._engine.resume(turn.row, observation_ids)
      return False
    row.expert_ids = self._engine.close(turn.row)
    return True

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

  def _close_turn(
    self, number: int, row: _Row, written: GeneratedTurn, step: protocol.Step
  ) -> np.ndarray:
    """Appends the turn; sets the status if the trajectory ends here."""
    observation_ids = np.zeros(0, np.int32)
    row.status = step.status
    if row.status is None:
      observation_ids = self._observe(step.observation)
      # The policy must be able to write at least one token after it.
      if len(observation_ids) >= self._engine.remaining(number):
        row.status = Status.TRUNCATED_LENGTH
    elif row.status is not Status.INFRA_ERROR:
      out_of_room = not written.stopped and not self._engine.remaining(number)
      if step.action == protocol.INVALID and out_of_room:
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
        written.truncated_logprobs,
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
      version=self._engine.version,
      expert_ids=row.expert_ids,
    )
