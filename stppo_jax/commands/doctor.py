"""Ask a retrieval server a question, and say in plain words what is wrong.

python -m stppo_jax doctor retriever --url=URL [--dialect=NAME]
    [--corpus=PATH] [--query=TEXT] [--expect=TEXT] [--timeout=SECONDS]

  --url=URL          the address, as in retrieval.url
  --dialect=NAME     the dialect of the run, retrieval.dialect
  --corpus=PATH      the corpus of a question, such as worlds/0
  --query=TEXT       a query whose answer you know
  --expect=TEXT      a text that its passages must contain
  --timeout=SECONDS  seconds to wait for a reply, 10 by default

Tries the address, every dialect, the time of an answer and the query. The exit
code is 0 if a run can use the server, 2 if something must be changed first, and
75 if the server cannot be reached now.
"""

import argparse
import asyncio
from collections.abc import Sequence
import sys
import time

import numpy as np

from stppo_jax.http import address as http_address
from stppo_jax.http import client as http_client
from stppo_jax.retrieval import address
from stppo_jax.retrieval import detection
from stppo_jax.retrieval import dialects

_NUM_TIMED = 8  # requests whose time is measured
_SLOW = 1.0  # seconds
_UNREACHABLE = 75


class _UsageError(Exception):
  """A flag is wrong; the message is one line."""


class _Wrong(Exception):
  """The server cannot be used; the message says why and what to do."""

  def __init__(self, line: str, exit_code: int = 2):
    super().__init__(line)
    self.exit_code = exit_code


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise _UsageError(message)


def main(argv: Sequence[str]) -> int:
  """Examines a server; returns the exit code."""
  try:
    flags = _parser().parse_args(argv)
    if not 0 < flags.timeout < float('inf'):
      raise _UsageError(f'--timeout={flags.timeout:g}: must be greater than 0')
    address.check_corpus(flags.corpus)
  except (_UsageError, ValueError) as error:
    print(f'doctor: {error}', file=sys.stderr)
    return 2
  try:
    asyncio.run(_examine(flags))
  except _Wrong as wrong:
    _say('WRONG', str(wrong))
    return wrong.exit_code
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(prog='python -m stppo_jax doctor', allow_abbrev=False)
  parser.add_argument('patient', choices=['retriever'])
  parser.add_argument('--url', required=True)
  parser.add_argument('--dialect', default='', choices=['', *dialects.DIALECTS])
  parser.add_argument('--corpus', default='')
  parser.add_argument('--query', default='capital of France')
  parser.add_argument('--expect', default='')
  parser.add_argument('--timeout', type=float, default=10.0)
  return parser


def _say(label: str, line: str) -> None:
  print(f'{label:6} {http_client.one_line(line)}', flush=True)


async def _examine(flags: argparse.Namespace) -> None:
  """Prints a line for each examination; raises _Wrong at the first failure."""
  url = flags.url
  for path in dict.fromkeys(d.path for d in dialects.DIALECTS.values()):
    try:
      url = http_address.base_url(
        url, suffix=path, token_variable=address.TOKEN_VARIABLE
      )
    except ValueError as error:
      raise _Wrong(f'address: {error}') from None
  client = http_client.Client(
    url, timeout=flags.timeout, token_variable=address.TOKEN_VARIABLE
  )
  try:
    await _examine_address(client)
    name = await _examine_dialects(client, flags)
    await _examine_times(client, name, flags)
    await _examine_answer(client, name, flags)
  finally:
    await client.close()


async def _examine_address(client: http_client.Client) -> None:
  try:
    await client.get('/health')
    _say('ok', f'address: {client.url} answers, and is healthy')
  except http_client.Failure as failure:
    if failure.cause is http_client.Cause.CONNECTION:
      raise _Wrong(
        f'address: nothing answers at {client.url}: {failure}. Is the server '
        'running, and are host and port right?',
        _UNREACHABLE,
      ) from None
    if failure.cause is http_client.Cause.TIMEOUT:
      raise _Wrong(
        f'address: {client.url} accepts connections, but sends {failure}. It '
        'may be loading its index, or too busy',
        _UNREACHABLE,
      ) from None
    if 300 <= failure.status < 400:
      raise _Wrong(
        f'address: {client.url} redirects ({failure}); redirects are not '
        'followed. Give the address that it redirects to'
      ) from None
    if failure.status in (401, 403):
      raise _refused(failure) from None
    if failure.status in (404, 405):
      _say('ok', f'address: {client.url} answers; it has no /health')
    else:
      _say('note', f'address: {client.url} answers, but /health: {failure}')


async def _examine_dialects(
  client: http_client.Client, flags: argparse.Namespace
) -> str:
  """Returns the dialect to use."""
  failures = await detection.spoken(client, flags.query, corpus=flags.corpus)
  spoken = [name for name, failure in failures.items() if failure is None]
  chosen = flags.dialect or (spoken[0] if spoken else '')
  if not spoken:
    for failure in failures.values():
      if failure is not None and failure.status in (401, 403):
        raise _refused(failure)
    reasons = '; '.join(f'{name}: {why}' for name, why in failures.items())
    raise _Wrong(f'dialect: no known one is answered. {reasons}')
  if chosen not in spoken:
    raise _Wrong(
      f'dialect: not {chosen} ({failures[chosen]}), but {" or ".join(spoken)}: '
      f'set retrieval.dialect={spoken[0]}'
    )
  _say('ok', f'dialect: {", ".join(spoken)}; retrieval.dialect={chosen}')
  return chosen


async def _examine_times(
  client: http_client.Client, name: str, flags: argparse.Namespace
) -> None:
  seconds = []
  for n in range(_NUM_TIMED):
    begin = time.monotonic()
    # Other queries, because a server may keep its answers.
    await _ask(client, name, f'{flags.query} {n}', flags)
    seconds.append(time.monotonic() - begin)
  median, longest = np.median(seconds), max(seconds)
  line = (
    f'time: {1e3 * median:.0f} ms per query, at most {1e3 * longest:.0f} ms'
  )
  if median > _SLOW:
    _say('note', f'{line}. Slow: a run waits for every search of a turn')
  else:
    _say('ok', line)


async def _examine_answer(
  client: http_client.Client, name: str, flags: argparse.Namespace
) -> None:
  passages = await _ask(client, name, flags.query, flags)
  if not passages:
    raise _Wrong(
      f'answer: nothing is found for {flags.query!r}. Does the server have the '
      'right corpus? Try another --query'
    )
  texts = [f'{p.title}\n{p.text}' for p in passages]
  if flags.expect and not any(flags.expect in text for text in texts):
    raise _Wrong(
      f'answer: {flags.expect!r} is in none of the {len(passages)} passages '
      f'for {flags.query!r}; the first is {texts[0][:80]!r}'
    )
  _say(
    'ok',
    f'answer: {len(passages)} passages for {flags.query!r}; the first is '
    f'{texts[0][:80]!r}',
  )


async def _ask(
  client: http_client.Client, name: str, query: str, flags: argparse.Namespace
):
  """Returns the passages of a query, after one attempt."""
  try:
    (passages,) = await detection.ask(
      client, dialects.DIALECTS[name], query, corpus=flags.corpus, topk=3
    )
  except http_client.Failure as failure:
    raise _Wrong(
      f'answer: {query!r} failed ({failure}), though another query did not. '
      'The server is not reliable',
      _UNREACHABLE,
    ) from None
  return passages


def _refused(failure: http_client.Failure) -> _Wrong:
  return _Wrong(
    f'token: the server refuses this client ({failure}); set the bearer token '
    f'in {address.TOKEN_VARIABLE}'
  )
