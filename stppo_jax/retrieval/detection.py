"""Finds out which dialects a server speaks, by asking it in each."""

import asyncio

from stppo_jax.http import client as http_client
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import replies


async def ask(
  client: http_client.Client,
  dialect: dialects.Dialect,
  query: str,
  *,
  corpus: str = '',
  topk: int = 1,
) -> replies.Answers:
  """Returns the reply to one query, after one attempt.

  Raises:
    http_client.Failure: if there was no reply in this dialect.
  """
  path = (f'/{corpus}' if corpus else '') + dialect.path
  reply = await client.post(path, dialect.body([query], topk))
  try:
    answers = dialect.read(reply, 1)
  except ValueError as error:
    raise http_client.Failure(
      str(error), http_client.Cause.MALFORMED
    ) from error
  if answers[0] is None:
    raise http_client.Failure(
      'malformed list of passages', http_client.Cause.MALFORMED
    )
  return answers


async def spoken(
  client: http_client.Client, query: str, *, corpus: str = ''
) -> dict[str, http_client.Failure | None]:
  """Asks in every dialect; returns its failure, or None if it is answered."""

  async def failure_in(dialect: dialects.Dialect):
    try:
      await ask(client, dialect, query, corpus=corpus)
    except http_client.Failure as failure:
      return failure

  failures = await asyncio.gather(
    *(failure_in(dialect) for dialect in dialects.DIALECTS.values())
  )
  return dict(zip(dialects.DIALECTS, failures, strict=True))


def may_be_mismatch(failure: http_client.Failure) -> bool:
  """Returns whether a server of another dialect may fail like this."""
  if failure.cause is http_client.Cause.STATUS:
    return failure.status in (400, 404, 405, 415, 422, 500, 501)
  return failure.cause is http_client.Cause.MALFORMED
