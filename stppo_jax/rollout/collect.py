"""Collects trajectories, in which the policy and the environment take turns.

Sampled tokens are stored exactly as they were sampled. They are decoded to text
for the environment only. A `Turn` keeps the policy's tokens apart from the
observation, and the loss mask is made from this division, never from text.

No row waits for another: the environment answers on the event loop's thread
while the engine decodes other rows, and a row goes on once it is answered.
"""

from collections.abc import Mapping, Sequence
import concurrent.futures
import dataclasses
import logging
from typing import Any, Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.envs import reward_function as reward_function_lib
from stppo_jax.rollout import event_loop

Status = types.TrajectoryStatus
_log = logging.getLogger(__name__)

# Seconds to wait for further answers of the environment after each answer.
_LINGER = 0.003


class Tokenizer(Protocol):
  """Lists the methods of a tokenizer, see `sampling.tokenizer.Tokenizer`."""

  def encode_prompt(
    self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()
  ) -> np.ndarray: ...
  def encode_text(
    self, text: str, *, tags: Sequence[str] = ()
  ) -> np.ndarray: ...
  def neutralise(self, text: str) -> str: ...
  def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


class Engine(Protocol):
  """Lists the methods of an engine, see `sampling.engine.Engine`.

  `poll` returns None for a row whose turn failed for good, for example because
  its server cannot be reached.
  """

  max_length: int

  @property
  def busy(self) -> bool: ...
  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: Any,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool,
  ) -> None: ...
  def poll(self) -> Mapping[int, types.GeneratedTurn | None]: ...
  def remaining(self, row: int) -> int: ...
  def resume(self, row: int, token_ids: np.ndarray) -> None: ...
  def close(self, row: int) -> np.ndarray | None: ...
  def statistics(self) -> Mapping[str, float]: ...
  def finish(self) -> None: ...


@dataclasses.dataclass
class _Row:
  """Holds a trajectory that is being collected.

  Attributes:
    question, prompt, prompt_ids: the question, its prompt, the prompt's ids.
    episode: answers the turns of this row.
    turns: the turns that the environment has answered.
    texts: the text of each turn of the policy.
    status: the status with which the row ended; None while it goes on.
    expert_ids, cause: see `types.Trajectory`.
  """

  question: types.Question
  prompt: str
  prompt_ids: np.ndarray
  episode: protocol.Episode
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  texts: list[str] = dataclasses.field(default_factory=list)
  status: Status | None = None
  expert_ids: np.ndarray | None = None
  cause: str = ''

  @property
  def length(self) -> int:
    """The number of tokens of the prompt, the turns and the observations."""
    return len(self.prompt_ids) + sum(
      len(turn.token_ids) + len(turn.observation_ids) for turn in self.turns
    )


# The turns that the environment is answering, with their row numbers.
_Pending = dict[concurrent.futures.Future, tuple[int, types.GeneratedTurn]]


@dataclasses.dataclass(frozen=True)
class Overlong:
  """Computes the soft punishment of overlong trajectories.

  The punishment is Eq. 13 of arXiv 2503.14476, applied to the length of the
  whole trajectory, because observations fill the context too. (In DAPO it is
  applied to the length of the answer, the only turn.)

  Attributes:
    weight: the reward that a trajectory of `max_length` loses.
    max_length: the longest trajectory, in tokens.
    interval: tokens before `max_length` over which the punishment grows from 0.
  """

  weight: float
  max_length: int
  interval: float

  def reward(self, row: _Row) -> float:
    """Returns the punishment of an ended row as a reward, 0 or negative."""
    if row.status is Status.INFRA_ERROR:
      return 0.0
    # A row that was cut off lacks the observation that did not fit, so it
    # counts as a row of `max_length`.
    cut_off = row.status is Status.TRUNCATED_LENGTH
    length = self.max_length if cut_off else row.length
    excess = length - (self.max_length - self.interval)
    return 0.0 - self.weight * min(max(excess / self.interval, 0.0), 1.0)


class Collector:
  """Collects the trajectories of questions.

  An error of the environment fails only the trajectory in which it happened.
  The first such error is logged with its traceback.

  Args:
    engine: generates the policy's turns. It must already have the weights.
    environment: makes prompts, observations and rewards.
    tokenizer: the policy's tokenizer.
    loop: the event loop that runs the environment's coroutines.
    max_turn_tokens: the most tokens of a turn.
    max_observation_tokens: the most tokens of an observation. The body of a
      longer one is cut, never its closing tag.
    group_size: the number of trajectories of a question, with the same prompt.
    overlong: the punishment of long trajectories; None if there is none.
    reward_function: computes one more reward of a trajectory, if given.
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
    overlong: Overlong | None = None,
    reward_function: reward_function_lib.RewardFunction | None = None,
  ):
    self._engine, self._environment = engine, environment
    self._tokenizer, self._loop = tokenizer, loop
    self._max_turn_tokens, self._group_size = max_turn_tokens, group_size
    self._max_observation_tokens = max_observation_tokens
    self._overlong, self._reward_function = overlong, reward_function
    self._has_logged = False

  def collect(
    self, questions: Sequence[types.Question], keys, *, greedy: bool = False
  ) -> list[types.Trajectory]:
    """Returns `group_size` trajectories of each question, group after group.

    If the prompt of a question leaves no room to generate, its trajectories end
    in TRUNCATED_LENGTH, without a turn.

    Args:
      questions: one for each group of trajectories.
      keys: typed jax keys, one for each trajectory.
      greedy: whether to take the most probable token instead of sampling.
    """
    rows: list[_Row] = []
    try:
      for question in questions:
        rows += self._open(question)
      self._run(rows, keys, greedy=greedy)
      return [self._trajectory(row) for row in rows]
    finally:
      self._close_episodes([row.episode for row in rows])

  def statistics(self) -> Mapping[str, float]:
    """Returns the counts of the engine since the last call."""
    return self._engine.statistics()

  def finish(self) -> None:
    """Takes part in programs of the other hosts until all hosts are done."""
    self._engine.finish()

  def _run(self, rows: Sequence[_Row], keys, *, greedy: bool) -> None:
    """Samples and answers turns until every row has a status."""
    firsts = rows[:: self._group_size]
    self._engine.begin(
      [row.prompt_ids if row.status is None else None for row in firsts],
      keys,
      group_size=self._group_size,
      max_turn_tokens=self._max_turn_tokens,
      greedy=greedy,
    )
    pending: _Pending = {}
    try:
      while any(row.status is None for row in rows):
        for future in self._answered(pending):
          number, turn = pending.pop(future)
          self._append_turn(number, turn, rows[number], future.result())
        polled = self._engine.poll()
        generated = {n: turn for n, turn in polled.items() if turn is not None}
        pending |= self._request_steps(rows, generated)
        for number in [n for n, turn in polled.items() if turn is None]:
          rows[number].status = Status.INFRA_ERROR
          rows[number].cause = 'the engine failed a turn'
          self._engine.close(number)
    finally:
      # After an interrupt or an error, nobody waits for the pending answers.
      for future in pending:
        future.cancel()

  def _close_episodes(self, episodes: Sequence[protocol.Episode]) -> None:
    for episode in episodes:
      try:
        episode.close()
      except Exception as error:  # no trajectory depends on closing an episode
        _log.warning(
          'an episode could not be closed: %s: %s', type(error).__name__, error
        )

  def _answered(self, pending: _Pending) -> list[concurrent.futures.Future]:
    """Returns the futures of answered turns; waits if the engine is idle."""
    if not self._engine.busy:
      done, waiting = concurrent.futures.wait(
        pending, return_when=concurrent.futures.FIRST_COMPLETED
      )
      # Turns that were sent together are answered at nearly the same time. One
      # call of the engine for all of them costs no more than a call for one.
      while waiting and done:
        done, waiting = concurrent.futures.wait(waiting, timeout=_LINGER)
    return [future for future in pending if future.done()]

  def _request_steps(
    self, rows: Sequence[_Row], turns: Mapping[int, types.GeneratedTurn]
  ) -> _Pending:
    """Requests the steps of the environment, which run on another thread."""
    # All texts are decoded before the first coroutine is made. So an error of
    # decoding leaves no coroutine that nobody awaits.
    for number, turn in turns.items():
      rows[number].texts.append(self._tokenizer.decode(turn.token_ids))
    steps = [self._step(rows[number]) for number in turns]
    return dict(zip(self._loop.submit(steps), turns.items(), strict=True))

  async def _step(self, row: _Row) -> protocol.Step:
    """Returns the environment's step, or a step that describes its failure."""
    try:
      step = await row.episode.step(row.question, len(row.turns), row.texts[-1])
      protocol.check_reward('of a turn', step.reward)
      return step
    except Exception as error:
      return protocol.Step(
        protocol.INVALID, None, Status.INFRA_ERROR, cause=self._cause(error)
      )

  def _cause(self, error: Exception) -> str:
    """Returns an error of the environment as one line; logs the first error.

    Raises:
      Exception: the error itself, if it must end the run.
    """
    if hasattr(error, 'exit_code'):
      raise error
    if not self._has_logged:
      self._has_logged = True
      _log.exception(
        'the environment failed a trajectory; further errors are only counted'
      )
    return ' '.join(f'{type(error).__name__}: {error}'.split())

  def _open(self, question: types.Question) -> list[_Row]:
    """Returns the rows of a question, which share its prompt."""
    status, cause = None, ''
    episodes: list[protocol.Episode] = []
    try:
      prompt = self._environment.prompt(self._neutral(question))
      while len(episodes) < self._group_size:
        episodes.append(self._environment.episode(question))
    except Exception as error:
      self._close_episodes(episodes)
      episodes = [self._environment] * self._group_size
      # A row must not be empty, so it gets the text of the question. The tokens
      # of a failed row have no weight.
      prompt = self._neutral(question).text
      status, cause = Status.INFRA_ERROR, self._cause(error)
    ids = self._tokenizer.encode_prompt(prompt, tools=self._environment.tools)
    room = self._engine.max_length
    if status is None and len(ids) >= room:
      status = Status.TRUNCATED_LENGTH
    return [
      _Row(question, prompt, ids[:room], episode, status=status, cause=cause)
      for episode in episodes
    ]

  def _neutral(self, question: types.Question) -> types.Question:
    """Returns the question, changed so that its texts spell no added token."""
    clean = self._tokenizer.neutralise
    options = {key: clean(text) for key, text in question.options.items()}
    return dataclasses.replace(
      question, text=clean(question.text), options=options
    )

  def _append_turn(
    self, number: int, turn: types.GeneratedTurn, row: _Row, step: protocol.Step
  ) -> None:
    """Appends an answered turn to its row, then resumes or closes the row."""
    remaining = self._engine.remaining(number)
    observation_ids = np.zeros(0, np.int32)
    row.status, row.cause = step.status, step.cause
    if row.status is None:
      assert step.observation is not None
      encoded = self._encode(step.observation)
      # After the observation the policy must have room for at least one token.
      if len(encoded) < remaining:
        observation_ids = encoded
        self._engine.resume(number, observation_ids)
      else:
        row.status = Status.TRUNCATED_LENGTH
    elif row.status is not Status.INFRA_ERROR:
      # A turn that has filled the row may be invalid because it was cut off.
      out_of_room = not turn.stopped and not remaining
      if step.action == protocol.INVALID and out_of_room:
        row.status = Status.TRUNCATED_LENGTH
    if row.status is not None:
      row.expert_ids = self._engine.close(number)
    row.turns.append(
      types.Turn(
        turn.token_ids,
        turn.logprobs,
        observation_ids,
        step.action,
        step.reward,
        turn.truncated_logprobs,
        step.passages,
        turn.version,
      )
    )

  def _encode(self, observation: protocol.Observation) -> np.ndarray:
    """Returns the ids of an observation, with its body cut to the limit."""
    encode, tags = self._tokenizer.encode_text, self._environment.tags
    prefix = encode(observation.prefix, tags=tags)
    body = encode(observation.body)
    suffix = encode(observation.suffix, tags=tags)
    room = self._max_observation_tokens - len(prefix) - len(suffix)
    return np.concatenate([prefix, body[: max(room, 0)], suffix])

  def _trajectory(self, row: _Row) -> types.Trajectory:
    """Returns the trajectory of a row that has ended, with its rewards."""
    assert row.status is not None
    try:
      rewards, scores = row.episode.rewards(
        row.question, row.prompt, row.texts, row.status
      )
      for name, reward in rewards.items():
        protocol.check_reward(name, reward)
    except Exception as error:
      rewards, scores = {}, {}
      # The first failure is the cause: an episode that could not begin cannot
      # be rewarded either.
      cause = self._cause(error)
      row.status, row.cause = Status.INFRA_ERROR, row.cause or cause
    if self._reward_function is not None:
      reward = 0.0
      if row.status is not Status.INFRA_ERROR:
        reward = self._reward_function(row.question, row.texts, scores)
      rewards = {**rewards, 'function': reward}
    if self._overlong is not None:
      rewards = {**rewards, 'overlong': self._overlong.reward(row)}
    return types.Trajectory(
      question=row.question,
      prompt_ids=row.prompt_ids,
      turns=tuple(row.turns),
      rewards=rewards,
      status=row.status,
      scores=scores,
      expert_ids=row.expert_ids,
      cause=row.cause,
    )
