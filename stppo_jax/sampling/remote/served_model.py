"""Checks a model on an inference server, requests turns and sets weights."""

from collections.abc import Callable
import os
import pathlib
from typing import TypeVar

from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import dialects

Result = TypeVar('Result')


async def connect(
  client: client_lib.EngineClient,
  model: str,
  max_length: int,
  trial: dialects.Request,
) -> 'ServedModel':
  """Returns a model on a server, after checks and a trial turn.

  Args:
    client: the client of the server.
    model: the model's name on the server.
    max_length: the most tokens of a row.
    trial: the request for the trial turn, with the run's options of sampling.

  Raises:
    EngineUnreachable: if the server is not ready within the client's timeout.
    EngineUnsuited: if the server does not serve the model, is of an unknown
      kind, cannot hold `max_length` tokens, or does not answer with token ids
      and the required log-probabilities.
  """
  await client.wait_until_ready()
  try:
    models = await client.get('/v1/models', dialects.read_models)
  except client_lib.EngineError as error:
    raise client_lib.EngineUnsuited(str(error)) from error
  if model not in models:
    raise client_lib.EngineUnsuited(
      f'{client.url} serves {", ".join(sorted(models)) or "nothing"}, '
      f'not {model!r}'
    )
  kind = str(models[model].get('owned_by'))
  if kind not in dialects.DIALECTS:
    raise client_lib.EngineUnsuited(
      f'{client.url} is of kind {kind!r}; choices: '
      + ', '.join(sorted(dialects.DIALECTS))
    )
  dialect = dialects.DIALECTS[kind]
  # Some servers do not report how many tokens they hold. Then a row that is too
  # long fails only during the run.
  capacity = models[model].get('max_model_len')
  if isinstance(capacity, int) and capacity < max_length:
    raise client_lib.EngineUnsuited(
      f'{client.url} holds {capacity} tokens, fewer than '
      f'max_length={max_length}'
    )
  temperature = trial.sampling.temperature
  if not dialect.tempered and temperature != 1:
    raise client_lib.EngineUnsuited(
      f'{client.url} ({kind}) reports log-probabilities at temperature 1, '
      f'but the run samples at temperature={temperature}'
    )
  served = ServedModel(client, model, dialect)
  try:
    await served.complete(trial, lambda _, answer: answer)
    await served.weight_version()
  except client_lib.EngineError as error:
    # A request that fails now would fail in every collection.
    raise client_lib.EngineUnsuited(str(error)) from error
  return served


class ServedModel:
  """Requests turns of a model on a server, and sets the model's weights.

  `connect` makes objects of this class.

  Args:
    client: the client of the server.
    model: the model's name on the server.
    dialect: the protocol of the server, from `DIALECTS`.
  """

  def __init__(
    self,
    client: client_lib.EngineClient,
    model: str,
    dialect: dialects.Dialect,
  ):
    self._client = client
    self._model = model
    self._dialect = dialect

  async def complete(
    self,
    request: dialects.Request,
    check: Callable[[dialects.Request, dialects.Answer], Result],
  ) -> Result:
    """Requests one turn, and returns the result of `check` on the answer.

    Args:
      request: the request for the turn.
      check: takes the request and the answer, and returns the result. If it
        raises ValueError, the request is repeated; if it raises `BadReply`, the
        failure is final.

    Raises:
      EngineError: if no attempt of the request succeeded.
    """
    return await self._client.post(
      self._dialect.path,
      self._dialect.body(self._model, request),
      lambda reply: check(request, self._dialect.read(request, reply)),
    )

  async def set_weights(self, folder: pathlib.Path, label: str) -> None:
    """Waits for the server, and makes it load weights that it does not hold.

    The server is first asked for the label of its weights: another engine that
    shares the server may have replaced the weights of this run, or a restart of
    the server may have dropped them. After loading, the server is asked again,
    because another run may replace the weights at any time.

    Args:
      folder: a folder that `export.export` wrote, which the server can read.
      label: the label of these weights, which no other weights have. If '', the
        server keeps its own weights.

    Raises:
      EngineUnreachable: if the server is not ready, or does not load the
        weights.
    """
    await self._client.wait_until_ready()
    if not label:
      return
    try:
      if await self.weight_version() == label:
        return
      await self._load(folder, label)
      version = await self.weight_version()
    except client_lib.EngineError as error:
      raise client_lib.EngineUnreachable(
        f'weights were not loaded: {error}'
      ) from error
    if version not in (None, label):
      raise client_lib.EngineUnreachable(
        f'{self._client.url} holds weights {version!r} after an update to '
        f'{label!r}; does another run use it?'
      )

  async def weight_version(self) -> str | None:
    """Returns the label of the server's weights; None if it reports none.

    Raises:
      EngineError: if no attempt of the request succeeded.
    """
    path = self._dialect.version_path
    if not path:
      return None
    return await self._client.get(path, dialects.read_version)

  async def _load(self, folder: pathlib.Path, label: str) -> None:
    dialect = self._dialect
    await self._client.post(
      dialect.update_path,
      dialect.update_body(os.fspath(folder), label),
      dialects.check_success,
    )
    if dialect.flush_path:
      await self._client.post(dialect.flush_path, {}, bytes)
