"""Collects trajectories: the policy and the environment take turns.

Token in, token out: sampled tokens are stored as they were sampled, and text is
decoded for the environment only. Masks are born here: a `Turn` keeps the
policy's tokens apart from the observation.

No row waits for another: the environment answers on the event loop's thread
while the engine decodes other rows, and a row goes on as soon as its answer is
there.
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

# Seconds to wait for a further answer, once one has arrived.
_LINGER = 0.003


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

  `poll` returns None for a row whose turn the infrastructure failed.
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
class _PendingTurn:
  """A generated turn that the environment is answering."""

  row: int
  written: GeneratedTurn


class Collector:
  """Collects the trajectories of questions.

  Args:
    engine: generates the policy's turns; its weights have been published.
    environment: gives prompts, observations and rewards.
    tokenizer: the policy's tokenizer.
    loop: the event loop that runs the environment's coroutines.
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
    """Returns `group_size` adjacent trajectories per question, in order.

    A question whose prompt leaves no room to generate becomes TRUNCATED_LENGTH
    without a turn.

    Args:
      questions: one for each group.
      keys: typed jax keys, one for each trajectory.
      greedy: whether to take the most probable token instead of sampling.
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
    asked: dict[concurrent.futures.Future, _PendingTurn] = {}
    try:
      while playing:
        for future in self._answered_turns(asked):
          turn = asked.pop(future)
          playing -= self._finish_turn(turn, rows[turn.row], future.result())
        ended = self._engine.poll()
        asked |= self._request_steps(
          rows, {n: w for n, w in ended.items() if w}
        )
        playing -= self._close_failed(
          rows, [n for n, w in ended.items() if not w]
        )
    finally:
      for future in asked:  # of an interrupted collection
        future.cancel()
    return [self._finish(row) for row in rows]

  def statistics(self) -> Mapping[str, float]:
    """Returns what the engine has counted since the last call."""
    return self._engine.statistics()

  def _answered_turns(self, asked) -> list[concurrent.futures.Future]:
    """Returns the answered turns; waits if the engine has nothing to do."""
    if not self._engine.busy:
      done, waiting = concurrent.futures.wait(
        asked, return_when=concurrent.futures.FIRST_COMPLETED
      )
      # Questions that went together are answered together: going on with the
      # first answer alone would cost as much as going on with all of them.
      while waiting and done:
        done, waiting = concurrent.futures.wait(waiting, timeout=_LINGER)
    return [future for future in asked if future.done()]

  def _request_steps(
    self, rows: Sequence[_Row], ended: Mapping[int, GeneratedTurn]
  ) -> dict[concurrent.futures.Future, _PendingTurn]:
    """Requests the environment's steps, which run on another thread."""
    turns = [_PendingTurn(number, written) for number, written in ended.items()]
    asking = [rows[turn.row] for turn in turns]
    for turn, row in zip(turns, asking):
      row.texts.append(self._tokenizer.decode(turn.written.token_ids))
    steps = [
      self._environment.step(row.question, len(row.turns), row.texts[-1])
      for row in asking
    ]
    return dict(zip(self._loop.submit(steps), turns, strict=True))

  def _close_failed(self, rows: Sequence[_Row], failed: Sequence[int]) -> int:
    """Closes the rows whose turn failed and returns how many they are."""
    for number in failed:
      rows[number].status = Status.INFRA_ERROR
      self._engine.close(number)
    return len(failed)

  def _finish_turn(
    self, turn: _PendingTurn, row: _Row, step: protocol.Step
  ) -> bool:
    """Finishes an answered turn; returns whether the trajectory ends."""
    observation_ids = self._close_turn(turn.row, row, turn.written, step)
    if row.status is None:
      self._engine.resume(turn.row, observation_ids)
      return False
    row.expert_ids = self._engine.close(turn.row)
    return True

  def _open(self, question: types.Question) -> list[_Row]:
    """Returns the rows of a group, which share a prompt."""
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
    """Appends the turn, and sets the status if the trajectory ends here."""
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
