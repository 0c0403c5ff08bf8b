"""One attempt at a request: asks, and tells what its failure means."""

import asyncio
from collections.abc import Sequence

from stppo_jax.http import client as http_client
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import replies

Cause = http_client.Cause

# A retry does not help against these statuses: the address or the token is
# wrong.
PERMANENT = frozenset({401, 403, 404, 405, *range(300, 400)})
# Statuses of a server that is away, or overloaded; no query is to blame.
_AWAY = frozenset({502, 503, 504})
_OVERLOADED = _AWAY | {408, 429}
# Statuses by which a server may refuse the requests of another dialect.
_MISMATCH = frozenset({400, 404, 405, 415, 422, 500, 501})


async def ask(
  client: http_client.Client,
  dialect: dialects.Dialect,
  queries: Sequence[str],
  *,
  corpus: str,
  topk: int,
) -> replies.Answers:
  """Returns the passages of each query, None where they are malformed.

  Raises:
    http_client.Failure: if there was no reply in this dialect.
  """
  reply = await client.post(
    dialect.path_of(corpus), dialect.body(queries, topk)
  )
  try:
    return dialect.read(reply, len(queries))
  except ValueError as error:
    raise http_client.Failure(str(error), Cause.MALFORMED) from error


async def spoken(
  client: http_client.Client, query: str, *, corpus: str
) -> dict[str, http_client.Failure | None]:
  """Asks in every dialect; returns by name its failure, None if answered."""

  async def failure_in(dialect: dialects.Dialect):
    try:
      answer = await ask(client, dialect, [query], corpus=corpus, topk=1)
    except http_client.Failure as failure:
      return failure
    return malformed() if None in answer else None

  failures = await asyncio.gather(*map(failure_in, dialects.DIALECTS.values()))
  return dict(zip(dialects.DIALECTS, failures, strict=True))


def malformed() -> http_client.Failure:
  """Returns the failure of a query whose list of passages is malformed."""
  return http_client.Failure('malformed list of passages', Cause.MALFORMED)


def may_be_mismatch(failure: http_client.Failure) -> bool:
  """Returns whether a server of another dialect may fail like this."""
  if failure.cause is Cause.STATUS:
    return failure.status in _MISMATCH
  return failure.cause is Cause.MALFORMED


def may_be_query_error(failure: http_client.Failure) -> bool:
  """Returns whether a single query may have made its whole request fail."""
  if failure.cause is Cause.STATUS:
    return failure.status not in _OVERLOADED
  return failure.cause is not Cause.CONNECTION


def signals_outage(error: Exception) -> bool:
  """Returns whether the error of a request means that the server is away."""
  return isinstance(error, http_client.Failure) and (
    error.status in _AWAY or error.cause in (Cause.CONNECTION, Cause.TIMEOUT)
  )
