"""Examines a retrieval server: its address, dialect, speed and answers."""

from collections.abc import Callable
import dataclasses
import time

import numpy as np

from stppo_jax import exits
from stppo_jax.http import address as http_address
from stppo_jax.http import client as http_client
from stppo_jax.retrieval import address
from stppo_jax.retrieval import attempts
from stppo_jax.retrieval import dialects

_NUM_TIMED = 8  # the number of requests whose time is measured
_SLOW = 1.0  # the seconds per query above which a server gets a note

# The result of one check: the grade 'ok' or 'note', and one line.
Said = tuple[str, str]


class Unusable(Exception):
  """The error of an unusable server; the message says why and what to do.

  Attributes:
    exit_code: 2 if the user must change something first; 75 if the server does
      not answer now, but may answer later.
  """

  def __init__(self, line: str, exit_code: int = exits.USAGE):
    super().__init__(line)
    self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class Examination:
  """A server to examine, and the query to send to it.

  Attributes:
    url: the address of the server, as in the config key retrieval.url.
    dialect: the dialect that the run uses, a key of `dialects.DIALECTS`; '' for
      the first dialect in which the server answers.
    corpus: the corpus in which the server searches, such as worlds/0.
    query: the query that is sent to the server.
    expect: a text that a passage of the answer must contain; '' for any answer.
    timeout: seconds to wait for a reply.
  """

  url: str
  dialect: str = ''
  corpus: str = ''
  query: str = 'capital of France'
  expect: str = ''
  timeout: float = 10.0


async def examine(asked: Examination, say: Callable[[str, str], None]) -> None:
  """Examines a server step by step, and stops at the first failed step.

  Args:
    asked: the server, and the query to send to it.
    say: called with the grade and the line of each step.

  Raises:
    Unusable: a run cannot use the server.
  """
  # Some users give the address of an endpoint, which ends in the path of a
  # dialect. Each request appends this path, so the path is removed here.
  url = asked.url
  for path in dict.fromkeys(d.path for d in dialects.DIALECTS.values()):
    try:
      url = http_address.base_url(
        url, suffix=path, token_variable=address.TOKEN_VARIABLE
      )
    except ValueError as error:
      raise Unusable(f'address: {error}') from None
  client = http_client.Client(
    url, timeout=asked.timeout, token_variable=address.TOKEN_VARIABLE
  )
  try:
    say(*await _examine_address(client))
    spoken, name = await _examine_dialects(client, asked)
    say(
      'ok',
      f'dialect: the server answers in {", ".join(spoken)}; checked with '
      f'retrieval.dialect={name}',
    )
    say(*await _examine_times(client, name, asked))
    say(*await _examine_answer(client, name, asked))
  finally:
    await client.close()


async def _examine_address(client: http_client.Client) -> Said:
  try:
    await client.get('/health')
    return 'ok', f'address: {client.url} answers, and is healthy'
  except http_client.Failure as failure:
    if failure.cause is http_client.Cause.CONNECTION:
      raise Unusable(
        f'address: nothing answers at {client.url}: {failure}. Is the server '
        'running, and are host and port right?',
        exits.TRY_AGAIN,
      ) from None
    if failure.cause is http_client.Cause.TIMEOUT:
      raise Unusable(
        f'address: {client.url} accepts connections, but sends {failure}. It '
        'may be loading its index, or too busy',
        exits.TRY_AGAIN,
      ) from None
    if 300 <= failure.status < 400:
      raise Unusable(
        f'address: {client.url} redirects ({failure}); redirects are not '
        'followed. Give the address that it redirects to'
      ) from None
    if failure.status in (401, 403):
      raise _refused(failure) from None
    if failure.status in (404, 405):
      return 'ok', f'address: {client.url} answers; it has no /health'
    return 'note', f'address: {client.url} answers, but /health: {failure}'


async def _examine_dialects(
  client: http_client.Client, asked: Examination
) -> tuple[list[str], str]:
  """Returns the dialects that the server speaks, and the dialect to use."""
  failures = await attempts.spoken(client, asked.query, corpus=asked.corpus)
  # A server may answer in several dialects; `stppo_jax serve` answers in all.
  spoken = [name for name, failure in failures.items() if failure is None]
  chosen = asked.dialect or (spoken[0] if spoken else '')
  if not spoken:
    for failure in failures.values():
      if failure is not None and failure.status in (401, 403):
        raise _refused(failure)
    reasons = '; '.join(f'{name}: {why}' for name, why in failures.items())
    raise Unusable(f'dialect: no known dialect is answered. {reasons}')
  if chosen not in spoken:
    raise Unusable(
      f'dialect: {chosen} is not answered ({failures[chosen]}), but '
      f'{" or ".join(spoken)} is; set retrieval.dialect={spoken[0]}'
    )
  return spoken, chosen


async def _examine_times(
  client: http_client.Client, name: str, asked: Examination
) -> Said:
  seconds = []
  for n in range(_NUM_TIMED):
    begin = time.monotonic()
    # Each query is different, because a server may cache its answers.
    await _ask(client, name, f'{asked.query} {n}', asked)
    seconds.append(time.monotonic() - begin)
  median, longest = np.median(seconds), max(seconds)
  line = (
    f'time: {1e3 * median:.0f} ms per query, at most {1e3 * longest:.0f} ms'
  )
  if median > _SLOW:
    return 'note', f'{line}. Slow: a run waits for every search of a turn'
  return 'ok', line


async def _examine_answer(
  client: http_client.Client, name: str, asked: Examination
) -> Said:
  passages = await _ask(client, name, asked.query, asked)
  if not passages:
    raise Unusable(
      f'answer: nothing is found for {asked.query!r}. Does the server have the '
      'right corpus? Try another --query'
    )
  texts = [f'{p.title}\n{p.text}' for p in passages]
  if asked.expect and not any(asked.expect in text for text in texts):
    raise Unusable(
      f'answer: {asked.expect!r} is in none of the {len(passages)} passages '
      f'for {asked.query!r}; the first is {texts[0][:80]!r}'
    )
  return 'ok', (
    f'answer: {len(passages)} passages for {asked.query!r}; the first is '
    f'{texts[0][:80]!r}'
  )


async def _ask(
  client: http_client.Client, name: str, query: str, asked: Examination
):
  """Returns the passages that the server finds for a query in one attempt."""
  try:
    (passages,) = await attempts.ask(
      client, dialects.DIALECTS[name], [query], corpus=asked.corpus, topk=3
    )
    if passages is None:
      raise attempts.malformed()
  except http_client.Failure as failure:
    raise Unusable(
      f'answer: {query!r} failed ({failure}), though another query did not. '
      'The server is not reliable',
      exits.TRY_AGAIN,
    ) from None
  return passages


def _refused(failure: http_client.Failure) -> Unusable:
  return Unusable(
    f'token: the server refuses this client ({failure}); set the bearer token '
    f'in {address.TOKEN_VARIABLE}'
  )
