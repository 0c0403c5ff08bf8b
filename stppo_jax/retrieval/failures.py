"""Classifies the failures of requests to a retriever."""

from stppo_jax.http import client as http_client

# A retry does not help against these statuses: the address or the token is
# wrong.
PERMANENT = frozenset({401, 403, 404, 405, *range(300, 400)})
# Statuses of a server that is away, or overloaded; no query is to blame.
_AWAY = frozenset({502, 503, 504})
_OVERLOADED = _AWAY | {408, 429}


def injected(kind: str) -> http_client.Failure:
  """Returns the failure of a request whose queries all have injected faults."""
  cause, _, status = kind.partition('_')
  return http_client.Failure(
    f'injected fault: {kind}',
    http_client.Cause(cause),
    status=int(status or 0),
  )


def a_query_may_be_to_blame(failure: http_client.Failure) -> bool:
  """Returns whether a single query may have made its whole request fail."""
  if failure.cause is http_client.Cause.STATUS:
    return failure.status not in _OVERLOADED
  return failure.cause is not http_client.Cause.CONNECTION


def signals_outage(error: Exception) -> bool:
  """Returns whether the error of a request means that the server is away."""
  if not isinstance(error, http_client.Failure):
    return False
  return error.status in _AWAY or error.cause in (
    http_client.Cause.CONNECTION,
    http_client.Cause.TIMEOUT,
  )
