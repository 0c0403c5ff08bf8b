"""A model that a server plays: whether it suits a run, and its weights."""

from collections.abc import Callable
import functools
import os
import pathlib
from typing import TypeVar

from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import dialects

EngineError = client_lib.EngineError
EngineUnreachable = client_lib.EngineUnreachable
EngineUnsuited = client_lib.EngineUnsuited

Result = TypeVar('Result')


async def meet(
  client: client_lib.Client,
  model: str,
  max_length: int,
  first: dialects.Request,
) -> 'ServedModel':
  """The model under this name, tried out with a first turn.

  Args:
    client: of the server.
    model: name under which the server knows the model.
    max_length: tokens a row can hold.
    first: a turn like those to come.

  Raises:
    EngineUnreachable: the server is not ready within the client's timeout.
    EngineUnsuited: it does not serve the model, is of an unknown kind, too
      short, or does not answer with token ids and log-probabilities.
  """
  await client.wait_until_ready()
  try:
    models = dialects.listed(await client.get('/v1/models'))
  except (client_lib.Failure, ValueError) as error:
    raise EngineUnsuited(f'{client.url}/v1/models: {error}') from error
  if model not in models:
    raise EngineUnsuited(
      f'{client.url} serves {", ".join(sorted(models)) or "nothing"}, '
      f'not {model!r}'
    )
  kind = models[model].get('owned_by')
  if kind not in dialects.DIALECTS:
    raise EngineUnsuited(
      f'{client.url} is of kind {kind!r}; choices: '
      + ', '.join(sorted(dialects.DIALECTS))
    )
  dialect = dialects.DIALECTS[kind]
  room = models[model].get('max_model_len')
  if isinstance(room, int) and room < max_length:
    raise EngineUnsuited(
      f'{client.url} holds {room} tokens, fewer than max_length={max_length}'
    )
  temperature = first.sampling.temperature
  if not dialect.tempered and temperature != 1:
    raise EngineUnsuited(
      f'{client.url} ({kind}) reports log-probabilities of temperature 1, '
      f'which do not tell those of temperature={temperature}'
    )
  found = ServedModel(client, model, dialect)
  try:
    await found.ask(first, lambda _, answer: answer)
    await found.held()
  except EngineError as error:
    # What fails now would fail all along.
    raise EngineUnsuited(str(error)) from error
  return found


class ServedModel:
  """See `meet`, which makes it.

  Args:
    client: of the server.
    model: name under which the server knows the model.
    dialect: of the server.
  """

  def __init__(
    self,
    client: client_lib.Client,
    model: str,
    dialect: dialects.Dialect,
  ):
    self._client = client
    self._model = model
    self._dialect = dialect

  async def ask(
    self,
    ask: dialects.Request,
    check: Callable[[dialects.Request, dialects.Answer], Result],
  ) -> Result:
    """The checked answer.

    Args:
      ask: one turn.
      check: what is made of the answer; a ValueError is asked again, an
        `Unfaithful` is not.

    Raises:
      EngineError: none came, all retries included.
    """
    return await self._client.post(
      self._dialect.path,
      self._dialect.body(self._model, ask),
      lambda reply: check(ask, self._dialect.read(ask, reply)),
    )

  async def hold(self, folder: pathlib.Path, label: str) -> None:
    """Waits for the server, and has it hold these weights.

    Args:
      folder: of `export_hf.export`, in the server's eyes too.
      label: tells these weights from all others; '' = its own will do.

    Raises:
      EngineUnreachable: it is not ready, or does not take them.
    """
    await self._client.wait_until_ready()
    if not label:
      return
    try:
      if await self.held() == label:
        return
      await self._update(folder, label)
      held = await self.held()
    except EngineError as error:
      raise EngineUnreachable(f'weights were not taken: {error}') from error
    if held not in (None, label):
      raise EngineUnreachable(
        f'{self._client.url} holds weights {held!r} after an update to '
        f'{label!r}; does another run use it?'
      )

  async def held(self) -> str | None:
    """The label of the weights that are held; None where it is not told.

    Raises:
      EngineError: no answer, all retries included.
    """
    path = self._dialect.version_path
    if not path:
      return None
    return await self._client.retried(
      path, functools.partial(self._ask_version, path)
    )

  async def _update(self, folder: pathlib.Path, label: str) -> None:
    dialect = self._dialect
    await self._client.post(
      dialect.update_path,
      dialect.update_body(os.fspath(folder), label),
      _check_success,
    )
    if dialect.flush_path:
      await self._client.post(dialect.flush_path, {}, bytes)

  async def _ask_version(self, path: str) -> str | None:
    reply = await self._client.get(path)
    try:
      label = dialects.fields(reply).get('weight_version')
    except ValueError as error:
      raise client_lib.Failure(str(error)) from error
    return None if label is None else str(label)


def _check_success(reply: bytes) -> None:
  """Raises ValueError where a server says that an update failed."""
  if reply and dialects.fields(reply).get('success') is False:
    raise ValueError(f'refused: {reply[:200].decode("utf-8", "replace")}')
