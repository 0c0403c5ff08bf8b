"""Checks the files, data sets, functions and servers that a config names.

Each function yields errors, one line each. Its arguments are a key and the
value of the key, or the values of the keys that `configs/relations.py` lists
for the function.
"""

from collections.abc import Callable, Iterator
import importlib.util
import pathlib

from stppo_jax import buckets
from stppo_jax import hub
from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.data import layout
from stppo_jax.data import mixtures
from stppo_jax.envs import environments
from stppo_jax.envs import gymnasium
from stppo_jax.envs import prompts
from stppo_jax.envs import reward_function
from stppo_jax.models.hf import config_json
from stppo_jax.models.hf import peft
from stppo_jax.models.hf import weight_files
from stppo_jax.retrieval import address


def model_exists(key: str, path) -> Iterator[str]:
  """Checks that a key is empty or names a model of a known family."""
  for folder in _here(key, path, hub.local_folder):
    if isinstance(folder, str):
      yield folder
    elif not folder.exists():
      yield f'{key}={path!r}: {hub.not_here(path)}'
    elif not (folder / 'config.json').is_file():
      yield f'{key}={path!r}: has no config.json, so it is no model'
    else:
      try:
        config_json.read(weight_files.read_json(folder / 'config.json'))
      except ValueError as error:
        reason = str(error).removeprefix(f'{folder / "config.json"}: ')
        yield f'{key}={path!r}: config.json: {reason}'


def tokenizer_exists(key: str, path) -> Iterator[str]:
  """Checks that a key is empty or names an existing tokenizer."""
  for folder in _here(key, path, hub.local_folder):
    if isinstance(folder, str):
      yield folder
    elif not folder.exists():
      yield f'{key}={path!r}: {hub.not_here(path, "file or folder")}'


def adapter_options(config) -> Iterator[str]:
  """Copies the options of the adapters at model.lora.path into a config.

  Only options that have their defaults in the config are changed.

  Yields:
    An error if the adapters cannot be read or trained further, and an error for
    each key whose value is neither its default nor the value of the adapters.
  """
  path = settings.flatten(config).get('model.lora.path', '')
  for folder in _here('model.lora.path', path, hub.local_folder):
    if isinstance(folder, str):
      yield folder
      return
    if not folder.exists():
      yield f'model.lora.path={path!r}: {hub.not_here(path)}'
      return
    try:
      with hub.naming('model.lora.path', path):
        options = peft.options(path)
    except ValueError as error:
      yield f'model.lora.path={path!r}: {error}'
      return
    lora, defaults = config.model.lora, base.get_config().model.lora
    for name, value in options.items():
      if lora[name] == defaults[name]:
        lora[name] = value
      elif lora[name] != value:
        yield (
          f'model.lora.{name}={lora[name]!r}: must be {value!r}, as in '
          f'model.lora.path={path}, or left out'
        )


def _here(
  key: str,
  place: str,
  local_folder: Callable[[str], pathlib.Path] = buckets.local_folder,
) -> Iterator[pathlib.Path | str]:
  """Yields the local folder that the value of a key names, or an error line.

  Nothing is yielded if `place` is ''.

  Args:
    key: the config key.
    place: the value of the key: a path, an address in a bucket or, if the key
      names a model or a tokenizer, a Hub name.
    local_folder: returns the local folder of `place`, and downloads its files
      if `place` is not a path.

  Raises:
    BucketError: the folder is in a bucket that may be in reach later.
  """
  try:
    if place:
      with hub.naming(key, place):
        folder = local_folder(place)
      yield folder
  except buckets.BucketError as error:
    if error.exit_code != 2:
      raise
    yield str(error).removeprefix('config.')


def file_exists(key: str, path) -> Iterator[str]:
  """Checks that a key is empty or names a file."""
  if path and not pathlib.Path(path).is_file():
    yield f'{key}={path!r}: {_not_there(pathlib.Path(path), "file")}'


def template_is_readable(key: str, path) -> Iterator[str]:
  """Checks that the prompt template can be read and contains {question}."""
  try:
    prompts.load_template(path)
  except ValueError as error:
    yield f'{key.partition(".")[0]}.{error}'


def trackers_are_installed(key: str, names) -> Iterator[str]:
  """Checks that the packages of experiment trackers are installed."""
  for name in names:
    spec = importlib.util.find_spec(name)
    # wandb leaves a folder `wandb` where it has run. Python finds this folder
    # as a package without an origin.
    if spec is None or spec.origin is None:
      yield (
        f'{key}={names!r}: needs the package {name}: pip install '
        f"'.[{name}]' in the clone"
      )


def function_exists(key: str, name) -> Iterator[str]:
  """Checks that the reward function of the user, if any, can be imported."""
  try:
    reward_function.find(name)
  except ValueError as error:
    yield f'{key}={name!r}: {error}'


def gymnasium_is_made(make, environment) -> Iterator[str]:
  """Checks that the function that makes environments can be imported."""
  if environment == 'gymnasium':
    try:
      gymnasium.load(make)
    except ValueError as error:
      yield str(error)


def passages_are_named(name, root, corpus, url, environment) -> Iterator[str]:
  """Checks that a run with questions from files has passages to search in.

  The passages are in a file or on a server. An environment that does not search
  needs none.
  """
  is_of_files = root and name in ('jsonl', 'tfds')
  needed = is_of_files and environments.find(environment).needs_retriever
  if needed and not url and not corpus:
    yield (
      "data.corpus='': must name a file of passages when retrieval.url is empty"
    )


def data_exist(name, root, train, evaluation, corpus) -> Iterator[str]:
  """Checks that `data.root` has the questions and passages of a config."""
  if name not in ('jsonl', 'tfds'):
    return
  if not root:
    yield f"data.root='': must name a folder when data.name={name}"
    return
  (folder,) = _here('data.root', root)
  if isinstance(folder, str):
    yield folder
    return
  folder = folder.resolve()
  if not folder.is_dir():
    yield f'data.root={root!r}: {_not_there(folder, "folder")}'
    return
  if not train:
    kind = 'file' if name == 'jsonl' else 'data set'
    yield f"data.train='': must name a {kind} when data.name={name}"
  for key, text in (('train', train), ('evaluation', evaluation)):
    try:
      elements = mixtures.parse(text) if text else ()
    except ValueError as error:
      yield f'data.{key}={text!r}: {error}'
      continue
    for element in elements:
      if name == 'jsonl' and not element.split:
        yield from _file_exists(key, text, element.name, root)
      elif name == 'jsonl':
        yield f'data.{key}={text!r}: {element.name} is a file without splits'
      else:
        try:
          layout.check_built(folder, element.name)
        except ValueError as error:
          yield f'data.{key}={text!r}: {error}'
      if key == 'evaluation' and element.weight is not None:
        yield f'data.{key}={text!r}: must have no weights'
  if corpus:
    yield from _file_exists('corpus', corpus, corpus, root)


def _file_exists(key, text, file, root) -> Iterator[str]:
  folder = buckets.local_folder(root).resolve()
  path = (folder / file).resolve()
  if not path.is_relative_to(folder):
    yield f'data.{key}={text!r}: must lie under data.root={root}'
  elif not path.is_file():
    problem = _not_there(path, 'file')
    yield f'data.{key}={text!r}: {problem} in data.root={root}'


def _not_there(path: pathlib.Path, kind: str) -> str:
  """Returns why a path is wrong: it does not exist, or is of another kind."""
  return f'not a {kind}' if path.exists() else f'no such {kind}'


def url_is_valid(key: str, url) -> Iterator[str]:
  """Checks the form of the retriever's address."""
  if url and (problem := address.check_url(url)):
    yield f'{key}: {problem}'


# The checks that look for files and packages on this machine. Their results say
# nothing about another machine.
OF_THIS_MACHINE = (
  model_exists,
  tokenizer_exists,
  file_exists,
  template_is_readable,
  trackers_are_installed,
  data_exist,
  passages_are_named,
)
