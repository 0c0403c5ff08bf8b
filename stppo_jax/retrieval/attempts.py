"""Sends one request to a retrieval server, and classifies its failures."""

import asyncio
from collections.abc import Sequence

from stppo_jax.http import client as http_client
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import replies

Cause = http_client.Cause

# After these statuses a retry cannot help, because the address or the token is
# wrong.
PERMANENT = frozenset({401, 403, 404, 405, *range(300, 400)})
# The first set has the statuses that mean that the server is out of reach. The
# second set also has the statuses of a server that is overloaded. A query is
# never the cause of these statuses.
_AWAY = frozenset({502, 503, 504})
_OVERLOADED = _AWAY | {408, 429}
# Statuses with which a server may refuse requests in a dialect that it does not
# speak.
_MISMATCH = frozenset({400, 404, 405, 415, 422, 500, 501})


async def ask(
  client: http_client.Client,
  dialect: dialects.Dialect,
  queries: Sequence[str],
  *,
  corpus: str,
  topk: int,
) -> replies.Answers:
  """Sends queries in one request, and returns the passages of each query.

  A query gets None if its list of passages is malformed.

  Raises:
    http_client.Failure: if the request failed, or the reply is not in the
      given dialect.
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
  """Sends a query in every dialect; returns the failure of each dialect.

  A dialect in which the server answers has None in place of a failure.
  """

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
  """Returns whether a request may have failed because of a wrong dialect."""
  if failure.cause is Cause.STATUS:
    return failure.status in _MISMATCH
  return failure.cause is Cause.MALFORMED


def may_be_query_error(failure: http_client.Failure) -> bool:
  """Returns whether a query of the request may have made the request fail."""
  if failure.cause is Cause.STATUS:
    return failure.status not in _OVERLOADED
  return failure.cause is not Cause.CONNECTION


def signals_outage(error: Exception) -> bool:
  """Returns whether an error means that the server is out of reach."""
  return isinstance(error, http_client.Failure) and (
    error.status in _AWAY or error.cause in (Cause.CONNECTION, Cause.TIMEOUT)
  )
