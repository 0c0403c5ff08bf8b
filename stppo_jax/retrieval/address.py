"""The address of a retriever: its token, its URL, and the paths of corpora."""

import re

from stppo_jax.http import address

TOKEN_VARIABLE = 'STPPO_RETRIEVAL_TOKEN'

_SEGMENT = '[A-Za-z0-9_-][A-Za-z0-9_.-]*'  # no leading dot, so '..' is refused
_CORPUS = re.compile(f'{_SEGMENT}(/{_SEGMENT})*')


def check_url(url: str) -> str | None:
  """Returns one line on what is wrong with a retriever's URL; None if valid.

  The check uses no network. The URL may end with the path of the endpoint.
  """
  return address.check_url(url, token_variable=TOKEN_VARIABLE)


def check_corpus(corpus: str) -> None:
  """Raises ValueError if a corpus is neither '' nor a plain relative path."""
  if corpus and not _CORPUS.fullmatch(corpus):
    raise ValueError(f'corpus {corpus!r} is not a plain relative path')
