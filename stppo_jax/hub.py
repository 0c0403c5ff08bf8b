"""Models of the Hugging Face Hub, named as org/name or org/name@revision.

The library `huggingface_hub` downloads files into its cache, sends the user's
token (`hf auth login` or HF_TOKEN) and completes broken downloads. A revision
is a branch, a tag or a commit. Branches move, so a run records the commit: see
`pinned`. An existing path of this machine is not taken for a name of the Hub.
If org is a folder here, org/name is not taken for a name either, unless it has
a commit.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import logging
import pathlib
import re
import sys
from typing import Any

from stppo_jax import buckets
from stppo_jax import exits

_NAME = re.compile(r'(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?')
_COMMIT = re.compile('[0-9a-f]{40}')
_MAIN = 'main'
# The small files of a model: its configs, tokenizer, model card and licence.
# The weights are not among them, because few commands need them.
SMALL = ('*.json', '*.jinja', '*.txt', 'tokenizer*', 'README.md', 'LICENSE*')


class HubError(buckets.BucketError):
  """Says in one line why a request for a model of the Hub failed."""


@contextlib.contextmanager
def naming(key: str, place: str) -> Iterator[None]:
  """Puts a config key before the message of a `BucketError` of the body.

  Args:
    key: the key whose value is the place.
    place: the path, name or address that the body reads.

  Raises:
    BucketError: the body has raised a BucketError. A HubError stays a HubError.
  """
  try:
    yield
  except buckets.BucketError as error:
    reason = str(error).removeprefix(f'{place}: ')
    line = f'config.{key}={place!r}: {reason}'
    raise type(error)(line, error.exit_code) from error


def is_name(place: str | pathlib.Path) -> bool:
  """Returns whether a place is the name of a model of the Hub.

  Existing paths and addresses are no names. If the first part of a place is a
  folder here, the place is taken for a misspelt path. But with a commit it is a
  name: runs record names with commits, and a record must mean the same on every
  machine.
  """
  match = _NAME.fullmatch(str(place))
  if not match or pathlib.Path(place).exists():
    return False
  is_commit = _COMMIT.fullmatch(match[2] or '')
  return bool(is_commit or not pathlib.Path(_first(place)).is_dir())


def not_here(place: str | pathlib.Path, kind: str = 'folder') -> str:
  """Returns the end of an error line about a path that does not exist here."""
  if not _NAME.fullmatch(str(place)):
    return f'no such {kind}'
  return (
    f'no such {kind}; {_first(place)} is a folder here, so this is not taken '
    'for a name of the Hub'
  )


def _first(place: str | pathlib.Path) -> str:
  """Returns the first part of a path or of a name."""
  return str(place).partition('/')[0]


def pinned(place: str, earlier: str = '') -> str:
  """Returns the name of a model with its commit; a path or address unchanged.

  Args:
    place: a name, a path or an address.
    earlier: the place that the record of the run holds, or ''. A name without a
      revision keeps the commit that the run began with.

  Raises:
    HubError: there is no such model, or the Hub is out of reach and the cache
      does not know the commit.
  """
  if not is_name(place):
    return place
  repository, revision = split(place)
  if _COMMIT.fullmatch(revision):
    return place
  if revision == _MAIN and split(earlier)[0] == repository:
    return earlier
  return f'{repository}@{_commit(place)}'


def local_folder(
  place: str | pathlib.Path, files: Sequence[str] = ()
) -> pathlib.Path:
  """Returns a folder of this machine with the files of a model.

  Args:
    place: a name, a path, or an address of a bucket.
    files: patterns of the files to download if the place is a name; () stands
      for the patterns in `SMALL`.

  Raises:
    HubError: the model does not exist, this user may not read it, or the Hub is
      out of reach while the cache lacks files of the model.
    BucketError: see `buckets.local_folder`.
  """
  if not is_name(place):
    return buckets.local_folder(place)
  return _downloaded(str(place), tuple(files or SMALL))


def split(name: str) -> tuple[str, str]:
  """Splits a name into repository and revision; ('', '') for other texts."""
  match = _NAME.fullmatch(name)
  return (match[1], match[2] or _MAIN) if match else ('', '')


@functools.cache
def _commit(name: str) -> str:
  # Imported inside functions, here and below, because the import takes a fifth
  # of a second.
  import huggingface_hub

  repository, revision = split(name)
  try:
    api = huggingface_hub.HfApi()
    return api.resolve_revision(repository, revision=revision).resolved
  except Exception as error:
    raise _described(name, error) from error


@functools.cache
def _downloaded(name: str, files: tuple[str, ...]) -> pathlib.Path:
  """Returns the folder of the cache that has the files of a model."""
  import huggingface_hub

  if not sys.stderr.isatty():
    huggingface_hub.utils.disable_progress_bars()
  repository, revision = split(name)
  try:
    folder = huggingface_hub.snapshot_download(
      repository, revision=revision, allow_patterns=list(files)
    )
  # A failed connection raises one of the many exceptions of the library's HTTP
  # client.
  except Exception as error:
    raise _described(name, error) from error
  return pathlib.Path(folder)


def address(name: str) -> str:
  """Returns the URL of a model's page on the Hub."""
  from huggingface_hub import constants

  return f'{constants.ENDPOINT}/{name}'


def push(folder: pathlib.Path, files: Sequence[str], name: str) -> str:
  """Uploads files to a model of the Hub, and deletes its older weights.

  If the model does not exist, a private model is created. Weights of an earlier
  push that are not among the files are deleted.

  Returns:
    The URL of the commit.

  Raises:
    HubError: the Hub is out of reach, or refuses the upload.
  """
  import huggingface_hub

  api = huggingface_hub.HfApi()
  try:
    api.create_repo(name, private=True, exist_ok=True)
    commit = api.upload_folder(
      repo_id=name,
      folder_path=folder,
      allow_patterns=list(files),
      delete_patterns=['model*.safetensors*', 'adapter_*'],
      commit_message='Upload a policy of stppo_jax',
    )
  except Exception as error:
    raise _described(name, error) from error
  return str(commit.commit_url)


# The functions whose results are cached. A process asks the Hub only once for
# the commit of a name, and once for each set of files of a model.
CACHED = (_commit, _downloaded)


def _described(name: str, error: Exception) -> HubError:
  """Returns a `HubError` whose line explains an error and names the remedy."""
  from huggingface_hub import constants
  from huggingface_hub import errors

  logging.getLogger(__name__).debug('%s', name, exc_info=error)
  repository, revision = split(name)
  hub = constants.ENDPOINT
  # The library may wrap the error that says why a request failed, for example
  # when the cache lacks a file. So the chain of causes is searched.
  causes: list[Any] = [error]
  while causes[-1].__cause__ is not None:
    causes.append(causes[-1].__cause__)
  answers = errors.HfHubHTTPError, errors.OfflineModeIsEnabled
  cause = next((x for x in causes if isinstance(x, answers)), causes[-1])
  status = getattr(getattr(cause, 'response', None), 'status_code', None)
  if isinstance(cause, errors.GatedRepoError):
    line = (
      f'the model is gated: ask for access at {hub}/{repository}, then log in '
      'with `hf auth login` or set HF_TOKEN'
    )
  elif isinstance(cause, errors.RevisionNotFoundError):
    line = f'{hub}/{repository} has no revision {revision}'
  elif isinstance(cause, errors.RepositoryNotFoundError):
    line = (
      f'no such folder, and {hub} has no model {repository}; if it is private, '
      'log in with `hf auth login` or set HF_TOKEN'
    )
  elif isinstance(cause, errors.HFValidationError):
    line = 'no such folder, and not a name that the Hub allows'
  elif status in (401, 403):
    line = f'{hub} refuses: log in with `hf auth login` or set HF_TOKEN'
  elif status == 429:
    line = f'{hub} answers "too many requests" (429): try again later'
    return HubError(f'{name}: {line}')
  else:
    lacking = ''
    if isinstance(error, errors.IncompleteSnapshotError):
      # The beginning of the library's message names the missing files.
      lacking = str(error).partition(' The Hub could')[0] + ' '
    elif isinstance(
      error, errors.LocalEntryNotFoundError | errors.RevisionResolutionError
    ):
      lacking = 'no such folder, no file of the model in the cache, and '
    offline = isinstance(cause, errors.OfflineModeIsEnabled)
    reason = ' '.join(str(cause).split()) or type(cause).__name__
    reason = 'HF_HUB_OFFLINE is set' if offline else reason
    line = f'{lacking}{hub} is out of reach ({reason})'
    code = exits.USAGE if offline else exits.TRY_AGAIN
    return HubError(f'{name}: {line}', code)
  return HubError(f'{name}: {line}', exits.USAGE)
