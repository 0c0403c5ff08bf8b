"""An engine whose turns are written by a server, vLLM or SGLang.

The engine has the methods that `collect.Engine` lists. Each turn is one request
with the token ids of the whole dialogue, and the server finds the earlier part
of the dialogue in its prefix cache. The reply has token ids and
log-probabilities. The stop automaton of this run decides where a turn ends:
tokens that the server wrote after the end are cut off.

`publish` writes weights as safetensors to a folder in the directory of
temporary files (TMPDIR), which the server must be able to read. The server
loads the weights at the beginning of a collection, unless it already reports
their label. So several engines may share a server, and a server that was
restarted gets the weights again.
"""

import collections
from collections.abc import Coroutine, Sequence
import concurrent.futures
import dataclasses
import logging
import queue
import shutil
from typing import Any, Protocol, TypeVar
import uuid

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models.hf import export
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import dialects
from stppo_jax.sampling.remote import served_model
from stppo_jax.sampling.remote import weights_folder

# Seconds that a poll waits for the end of a turn. Afterwards the caller can
# append observations.
_POLL_SECONDS = 0.01

Result = TypeVar('Result')


class Loop(Protocol):
  """The event loop of the engine, see `rollout.event_loop.EventLoop`."""

  def submit(
    self, coroutines: Sequence[Coroutine[Any, Any, Result]]
  ) -> list[concurrent.futures.Future[Result]]: ...
  def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result: ...


@dataclasses.dataclass
class _Row:
  """Holds the token ids of a dialogue, and the key that makes its seeds."""

  ids: list[int]
  key_data: np.ndarray


class RemoteEngine:
  """Requests turns from a server, with seeds made from the keys of the rows.

  Attributes:
    max_length: the most tokens of a row.
    version: the version of the weights that were published last. Before the
      first `publish` it is 0, and the server samples with its own weights.
  """

  def __init__(
    self,
    client: client_lib.EngineClient,
    *,
    loop: Loop,
    model: str,
    shape: model_config.ModelConfig,
    automaton: stops.StopAutomaton,
    stop_strings: Sequence[str],
    eos_ids: Sequence[int],
    max_length: int,
    sampling: sampler.Sampling,
    concurrency: int,
  ):
    """Connects to the server, and requests a trial turn.

    Args:
      client: the client of the server.
      loop: runs the client's coroutines.
      model: the model's name on the server.
      shape: the config of the model's architecture.
      automaton: finds the end of a turn in its token ids.
      stop_strings: the stop strings of the automaton.
      eos_ids: the end tokens of the automaton; at least one.
      max_length: the most tokens of a row.
      sampling: temperature and truncation.
      concurrency: the most requests for turns in flight.

    Raises:
      EngineUnreachable: if the server is not ready within the client's timeout.
      EngineUnsuited: if the server does not serve this model, is of an unknown
        kind, cannot hold `max_length` tokens, or does not answer with token ids
        and log-probabilities.
    """
    self.max_length = max_length
    self.version = 0
    self._client = client
    self._loop = loop
    self._shape = shape
    self._stopped = automaton.stopped
    self._transitions = automaton.table(shape.vocab_size)
    self._stop_strings = tuple(stop_strings)
    self._stop_ids = tuple(eos_ids)
    self._sampling = sampling
    self._concurrency = concurrency
    # The label of the published weights; '' while the server has its own
    # weights.
    self._label = ''
    self._folder = weights_folder.WeightsFolder()
    self._in_flight: dict[int, concurrent.futures.Future] = {}
    self._reset()
    self._num_turns = self._num_failures = self._retries_reported = 0
    trial = dialects.Request(
      prompt_ids=(eos_ids[0],),
      max_tokens=1,
      sampling=sampling,
      seed=0,
      stop_strings=(),
      stop_ids=(),
    )
    self._served = loop.run(
      served_model.connect(client, model, max_length, trial)
    )

  def publish(self, params: functional.Params, version: int) -> None:
    """Writes the policy's weights; the next collection samples with them.

    Args:
      params: the weights, with any sharding.
      version: the number of steps that the weights have been trained for.
    """
    # The label is partly random, because other engines and runs that share the
    # server may publish different weights under the same version.
    label = f'{version}-{uuid.uuid4().hex[:12]}'
    export.export(self._folder.path / label, self._shape, params)
    if self._label:
      shutil.rmtree(self._folder.path / self._label)
    self._label, self.version = label, version

  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: jax.Array,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool,
  ) -> None:
    """Begins a collection, and cancels the turns of the last one.

    Args:
      prompts: token ids, one array for each group of adjacent rows; None for a
        group that is left out.
      keys: one typed key per row; the seed of a turn is a function of the key
        and of the position at which the turn begins.
      group_size: the number of rows that share a prompt.
      max_turn_tokens: the most tokens of a turn.
      greedy: whether to take the most probable token instead of sampling.

    Raises:
      EngineUnreachable: if the server is not ready, or does not load the
        weights.
    """
    self._reset()
    self._max_turn_tokens = max_turn_tokens
    # Greedy decoding uses top_k=1 and not temperature 0, because at temperature
    # 0 servers would report log-probabilities at temperature 1.
    top_1 = {'top_k': 1, 'top_p': 1.0, 'min_p': 0.0} if greedy else {}
    self._turn_sampling = dataclasses.replace(self._sampling, **top_1)
    key_data = np.asarray(jax.random.key_data(keys))
    for group, prompt in enumerate(prompts):
      for row in range(group * group_size, (group + 1) * group_size):
        if prompt is not None:
          self._rows[row] = _Row(prompt.tolist(), key_data[row])
    self._waiting.extend(self._rows)
    self._loop.run(
      self._served.set_weights(self._folder.path / self._label, self._label)
    )

  @property
  def busy(self) -> bool:
    """Whether a request for a turn is at the server, or waits to be sent."""
    return bool(self._in_flight or self._waiting)

  def remaining(self, row: int) -> int:
    """Returns how many tokens still fit into a row."""
    return self.max_length - len(self._rows[row].ids)

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, and begins the row's next turn.

    Raises:
      ValueError: if the row's last turn has not ended.
    """
    self._check_between_turns(row)
    self._rows[row].ids.extend(np.asarray(token_ids).tolist())
    # This row goes ahead of rows that have not begun, because the prefix cache
    # of the server may still hold its dialogue.
    self._waiting.appendleft(row)

  def close(self, row: int) -> None:
    """Ends a row.

    Raises:
      ValueError: if the row's last turn has not ended.
    """
    self._check_between_turns(row)
    del self._rows[row]

  def poll(self) -> dict[int, types.GeneratedTurn | None]:
    """Waits for a short time, and returns the turns that ended, by row.

    If no attempt to request a turn succeeded, None takes the turn's place.
    """
    while self._waiting and len(self._in_flight) < self._concurrency:
      self._request(self._waiting.popleft())
    if not self._in_flight:
      return {}
    try:
      # All turns that have ended by now are returned, so that the caller can
      # request their observations together.
      done = [self._done.get(timeout=_POLL_SECONDS)]
      while not self._done.empty():
        done.append(self._done.get())
    except queue.Empty:
      return {}
    return {row: self._finish(row, self._in_flight.pop(row)) for row in done}

  def finish(self) -> None:
    """Does nothing, because no other host takes part."""

  def statistics(self) -> dict[str, float]:
    """Returns the counts since the last call, and sets them to 0.

    `engine/ok` and `engine/failures` count turns, and `engine/retries` counts
    repeated attempts.
    """
    retries = self._client.num_retries
    result = {
      'engine/ok': float(self._num_turns),
      'engine/failures': float(self._num_failures),
      'engine/retries': float(retries - self._retries_reported),
    }
    self._num_turns = self._num_failures = 0
    self._retries_reported = retries
    return result

  def _reset(self) -> None:
    for future in self._in_flight.values():
      future.cancel()
    self._in_flight = {}
    self._rows: dict[int, _Row] = {}
    self._waiting = collections.deque[int]()
    # A new queue is made, because cancelled requests of the last collection may
    # still put their rows into the old one.
    self._done = queue.SimpleQueue[int]()

  def _check_between_turns(self, row: int) -> None:
    if row in self._in_flight or row in self._waiting:
      raise ValueError(f'the last turn of row {row} has not ended')

  def _request(self, row: int) -> None:
    """Requests the next turn of a row."""
    ids = self._rows[row].ids
    request = dialects.Request(
      prompt_ids=tuple(ids),
      max_tokens=min(self._max_turn_tokens, self.remaining(row)),
      sampling=self._turn_sampling,
      seed=dialects.seed_of(self._rows[row].key_data, len(ids)),
      stop_strings=self._stop_strings,
      stop_ids=self._stop_ids,
    )
    (future,) = self._loop.submit(
      [self._served.complete(request, self._check_turn)]
    )
    self._in_flight[row] = future
    # The callback keeps the present queue: if the request is cancelled, its row
    # must not get into the new queue of the next collection.
    done = self._done
    future.add_done_callback(lambda _: done.put(row))

  def _finish(
    self, row: int, future: concurrent.futures.Future
  ) -> types.GeneratedTurn | None:
    """Appends a turn to its row and returns the turn, or counts a failure."""
    try:
      written = future.result()
    except client_lib.EngineError as error:
      # Only the first failure since the last call of `statistics` is logged.
      if not self._num_failures:
        logging.getLogger(__name__).warning('a turn failed: %s', error)
      self._num_failures += 1
      return None
    self._num_turns += 1
    self._rows[row].ids.extend(written.token_ids.tolist())
    return written

  def _check_turn(
    self, request: dialects.Request, answer: dialects.Answer
  ) -> types.GeneratedTurn:
    """Returns the turn in an answer, cut after the first stop.

    Raises:
      ValueError: if the answer has no stop, and fewer than `max_tokens` tokens.
      BadReply: if other weights wrote the answer, or it has ids that the model
        lacks.
    """
    if answer.version is not None and self._label not in ('', answer.version):
      raise dialects.BadReply(
        f'written with weights {answer.version[:40]!r}, not {self._label!r}'
      )
    count, stopped = self._find_stop(answer.token_ids)
    if not stopped and count < request.max_tokens:
      raise ValueError(
        f'the server ended the turn after {count} of {request.max_tokens} '
        'tokens, at no stop string and no end token of the run'
      )
    logprobs = np.asarray(answer.logprobs[:count], np.float32)
    sampling = request.sampling
    full = dataclasses.replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    return types.GeneratedTurn(
      token_ids=np.asarray(answer.token_ids[:count], np.int32),
      logprobs=logprobs,
      # Servers do not report log-probabilities under the truncated
      # distribution.
      truncated_logprobs=logprobs if sampling == full else None,
      stopped=stopped,
      version=self.version,
    )

  def _find_stop(self, token_ids: Sequence[int]) -> tuple[int, bool]:
    """Returns how many tokens the turn has, and whether a stop ended it.

    The turn ends with the token that completes a stop string, or with an end
    token. If there is no such token, all tokens belong to the turn.
    """
    state = stops.StopAutomaton.START
    for n, token_id in enumerate(token_ids):
      if not 0 <= token_id < self._transitions.shape[1]:
        raise dialects.BadReply(f'token id {token_id} is unknown to the model')
      state = self._transitions[state, token_id]
      if state == self._stopped:
        return n + 1, True
    return len(token_ids), False
