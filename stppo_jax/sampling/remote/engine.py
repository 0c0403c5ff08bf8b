"""An engine that others run: vLLM, SGLang, or the server beside this module.

It stands in for `engine.Engine`. Each turn is one request with the ids of the
whole dialogue (what was computed before is in the server's prefix cache), and
what comes back is ids and log-probabilities. Where a turn ends is our
automaton's say: what a server wrote beyond is cut off.

Weights are written as safetensors to a folder that the server must be able to
read: it lies where `tempfile` puts it (TMPDIR). Before a collection the server
is asked what it holds, and told to load them unless it holds them already: so
several engines may share a server, and one that was started anew gets them.
"""

import collections
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import logging
import pathlib
import queue
import shutil
import tempfile
import uuid
import weakref

import jax
import numpy as np

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models.hf import export
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from stppo_jax.sampling import turns
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import dialects
from stppo_jax.sampling.remote import served_model

_PATIENCE = 0.01  # seconds a poll waits: others may have something to do


@dataclasses.dataclass
class _Row:
  """A dialogue; `ids` is all of it."""

  ids: list[int]
  key_data: np.ndarray


class RemoteEngine:
  """Turns written by a server; keys from the caller become its seeds.

  Args:
    client: of the server.
    loop: that the client runs on.
    model: name under which the server knows the model.
    shape: of the model.
    automaton: where turns end, over the ids of the tokenizer.
    stop_strings: those of the automaton.
    eos_id: that of the automaton.
    max_length: tokens a row can hold.
    sampling: temperature and truncation.
    concurrency: turns asked for at once.

  Attributes:
    version: what `publish` was told last. Until then the server's own weights
      play.

  Raises:
    EngineUnreachable: it is not ready within the client's timeout.
    EngineUnsuited: it does not serve this model, is of an unknown kind, too
      short, or does not answer with ids and log-probabilities.
  """

  def __init__(
    self,
    client: client_lib.Client,
    *,
    loop: client_lib.Loop,
    model: str,
    shape: model_config.ModelConfig,
    automaton: stops.StopAutomaton,
    stop_strings: Sequence[str],
    eos_id: int,
    max_length: int,
    sampling: sampler.Sampling,
    concurrency: int,
  ):
    self.max_length = max_length
    self.version = 0
    self._client = client
    self._loop = loop
    self._shape = shape
    self._stopped = automaton.stopped
    self._table_SV = automaton.table(shape.vocab_size)
    self._stop_strings = tuple(stop_strings)
    self._stop_ids = (eos_id,)
    self._sampling = sampling
    self._concurrency = concurrency
    self._label = ''
    self._root = pathlib.Path(tempfile.mkdtemp(prefix='stppo_jax-weights-'))
    weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
    self._rows: dict[int, _Row] = {}
    self._in_flight: dict[int, concurrent.futures.Future] = {}
    self._forget()
    self._turns = self._failures = self._retries_told = 0
    first = dialects.Request((eos_id,), 1, sampling, 0, (), ())
    self._served = loop.run(served_model.meet(client, model, max_length, first))

  def publish(self, params: functional.Params, version: int) -> None:
    """Writes the policy's weights; the next collection plays with them.

    Args:
      params: in whatever layout.
      version: number of the step that made them.
    """
    # Other engines, and other runs, may give the same server a same version.
    label = f'{version}-{uuid.uuid4().hex[:12]}'
    export.export(self._root / label, self._shape, params)
    if self._label:
      shutil.rmtree(self._root / self._label)
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
    """Begins a collection; what was left of another one is given up.

    Args:
      prompts: token ids, one for each group of adjacent rows; None for rows
        that are not played.
      keys: one typed key per row; the seed of a turn is a function of it and
        of the position the turn begins at.
      group_size: rows of a prompt.
      max_turn_tokens: longest turn.
      greedy: take the likeliest token instead of drawing.

    Raises:
      ValueError: a prompt that is empty or leaves no room to write, or too few
        keys.
      EngineUnreachable: the server is not ready, or does not take the weights.
    """
    turns.check_prompts(
      prompts, keys, group_size=group_size, max_length=self.max_length
    )
    self._forget()
    self._max_turn_tokens = max_turn_tokens
    # Not temperature 0, whose log-probabilities would be those of another one.
    only = {'top_k': 1, 'top_p': 1.0, 'min_p': 0.0} if greedy else {}
    self._drawn = dataclasses.replace(self._sampling, **only)
    key_data = np.asarray(jax.random.key_data(keys))
    for group, prompt in enumerate(prompts):
      for row in range(group * group_size, (group + 1) * group_size):
        if prompt is not None:
          self._rows[row] = _Row(prompt.tolist(), key_data[row])
    self._waiting.extend(self._rows)
    self._loop.run(self._served.hold(self._root / self._label, self._label))

  def _forget(self) -> None:
    for future in self._in_flight.values():
      future.cancel()
    self._rows, self._in_flight = {}, {}
    self._waiting = collections.deque[int]()
    # A new one: what was cancelled still lands in the old one.
    self._landed = queue.SimpleQueue[int]()

  @property
  def busy(self) -> bool:
    """Whether a poll can end a turn, with no row resumed or closed before."""
    return bool(self._in_flight or self._waiting)

  def remaining(self, row: int) -> int:
    """Tokens that still fit into a row."""
    return self.max_length - len(self._rows[row].ids)

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, whose next turn begins.

    Raises:
      ValueError: it leaves no room to write, or no turn of the row has ended.
    """
    self._check_rests(row)
    turns.check_observation(
      token_ids, remaining=self.remaining(row), max_length=self.max_length
    )
    self._rows[row].ids.extend(np.asarray(token_ids).tolist())
    # Before those that have not begun: its dialogue is still in the cache.
    self._waiting.appendleft(row)

  def close(self, row: int) -> None:
    """Ends a row.

    Raises:
      ValueError: no turn of the row has ended.
    """
    self._check_rests(row)
    del self._rows[row]

  def _check_rests(self, number: int) -> None:
    if number in self._in_flight or number in self._waiting:
      raise ValueError(f'row {number} is not between two turns')

  def poll(self) -> dict[int, turns.GeneratedTurn | None]:
    """Waits a moment; the turns that ended, by row.

    None for a row whose turn the server failed, its retries included.
    """
    while self._waiting and len(self._in_flight) < self._concurrency:
      self._start(self._waiting.popleft())
    if not self._in_flight:
      return {}
    ended = {}
    try:
      landed = [self._landed.get(timeout=_PATIENCE)]
      while not self._landed.empty():
        landed.append(self._landed.get())
    except queue.Empty:
      return {}
    for number in landed:
      ended[number] = self._end(number, self._in_flight.pop(number))
    return ended

  def statistics(self) -> dict[str, float]:
    """Counts since the last call; resets them.

    `engine/ok` and `engine/failures` count turns, `engine/retries` further
    attempts at one of them.
    """
    retries = self._client.num_retries
    result = {
      'engine/ok': float(self._turns),
      'engine/failures': float(self._failures),
      'engine/retries': float(retries - self._retries_told),
    }
    self._turns = self._failures = 0
    self._retries_told = retries
    return result

  def _start(self, number: int) -> None:
    row = self._rows[number]
    ask = dialects.Request(
      prompt_ids=tuple(row.ids),
      max_tokens=min(self._max_turn_tokens, self.remaining(number)),
      sampling=self._drawn,
      seed=dialects.seed_of(row.key_data, len(row.ids)),
      stop_strings=self._stop_strings,
      stop_ids=self._stop_ids,
    )
    (future,) = self._loop.submit([self._served.ask(ask, self._written)])
    self._in_flight[number] = future
    landed = self._landed
    future.add_done_callback(lambda _: landed.put(number))

  def _end(
    self, number: int, future: concurrent.futures.Future
  ) -> turns.GeneratedTurn | None:
    try:
      written = future.result()
    except client_lib.EngineError as error:
      if not self._failures:  # one line tells; the others are counted
        logging.getLogger(__name__).warning('a turn failed: %s', error)
      self._failures += 1
      return None
    self._turns += 1
    self._rows[number].ids.extend(written.token_ids.tolist())
    return written

  def _written(
    self, ask: dialects.Request, answer: dialects.Answer
  ) -> turns.GeneratedTurn:
    """The turn in an answer.

    Raises:
      ValueError: there is none.
    """
    if answer.version is not None and self._label not in ('', answer.version):
      raise dialects.BadReply(
        f'written with weights {answer.version[:40]!r}, not {self._label!r}'
      )
    count, stopped = self._cut(answer.token_ids)
    if not stopped and count < ask.max_tokens:
      raise ValueError(
        f'the turn ended after {count} of {ask.max_tokens} tokens, without '
        'any of our stops'
      )
    logprobs = np.asarray(answer.logprobs[:count], np.float32)
    whole = dataclasses.replace(ask.sampling, top_k=0, top_p=1.0, min_p=0.0)
    return turns.GeneratedTurn(
      token_ids=np.asarray(answer.token_ids[:count], np.int32),
      logprobs=logprobs,
      # Under a truncated distribution nobody tells.
      truncated_logprobs=logprobs if ask.sampling == whole else None,
      stopped=stopped,
    )

  def _cut(self, token_ids: Sequence[int]) -> tuple[int, bool]:
    """Tokens up to the one that completes a stop; whether one does."""
    state = stops.StopAutomaton.START
    for n, token_id in enumerate(token_ids):
      if not 0 <= token_id < self._table_SV.shape[1]:
        raise dialects.BadReply(f'token id {token_id} is not of the model')
      state = self._table_SV[state, token_id]
      if state == self._stopped:
        return n + 1, True
    return len(token_ids), False
