"""The address of a retriever: its token, its URL, the corpora below it."""

import re

from stppo_jax.http import address

TOKEN_VARIABLE = 'STPPO_RETRIEVAL_TOKEN'

_SEGMENT = '[A-Za-z0-9_-][A-Za-z0-9_.-]*'  # no dot in front: no '..'
_CORPUS = re.compile(f'{_SEGMENT}(/{_SEGMENT})*')


def check_url(url: str) -> str | None:
  """Says in one line what is wrong with a retriever's URL; None if it is fine.

  Touches no network. The path of the endpoint may stand at the end, as users
  write it.
  """
  return address.check_url(url, token_variable=TOKEN_VARIABLE)


def check_corpus(corpus: str) -> None:
  """Raises ValueError unless a question's corpus is '' or a plain path."""
  if corpus and not _CORPUS.fullmatch(corpus):
    raise ValueError(f'corpus {corpus!r} is no plain relative path')
