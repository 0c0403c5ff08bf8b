"""Where a retriever lives: its URL, its paths, its token."""

import re
from urllib import parse

TOKEN_VARIABLE = 'STPPO_RETRIEVAL_TOKEN'

_SEGMENT = '[A-Za-z0-9_-][A-Za-z0-9_.-]*'  # no dot in front: no '..'
_CORPUS = re.compile(f'{_SEGMENT}(/{_SEGMENT})*')


def check_url(url: str) -> str | None:
  """What is wrong with a retriever's URL, in one line; None if it is fine.

  Touches no network. A trailing /retrieve is allowed, as users write it.
  """
  if any(c.isspace() or not c.isprintable() for c in url):
    return f'{url!r} contains white space or control characters'
  try:
    parts = parse.urlsplit(url)
    port = parts.port
  except ValueError as error:
    return f'{url!r} is no URL: {error}'
  if parts.scheme not in ('http', 'https') or not parts.hostname:
    return f'{url!r} is no http:// or https:// URL'
  if port == 0:
    return f'{url!r} names port 0'
  if parts.username is not None or parts.password is not None:
    return (
      'user and password in the URL are not allowed; set a bearer token in '
      f'{TOKEN_VARIABLE}'
    )
  if parts.query or parts.fragment:
    return f'{url!r} has a query or a fragment'
  return None


def base_of(url: str) -> str:
  """The URL without a trailing slash or /retrieve.

  Raises:
    ValueError: the URL is bad; one line.
  """
  problem = check_url(url)
  if problem:
    raise ValueError(problem)
  return url.rstrip('/').removesuffix('/retrieve').rstrip('/')


def check_corpus(corpus: str) -> None:
  """Raises ValueError unless a question's corpus is '' or a plain path."""
  if corpus and not _CORPUS.fullmatch(corpus):
    raise ValueError(f'corpus {corpus!r} is no plain relative path')


def path_of(corpus: str) -> str:
  """The path that answers queries to a corpus."""
  return f'/{corpus}/retrieve' if corpus else '/retrieve'
