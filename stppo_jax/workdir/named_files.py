"""The files that a config names, and their checksums."""

from collections.abc import Iterator
import hashlib
import json
import pathlib
from typing import Any

from stppo_jax import buckets
from stppo_jax import hub
from stppo_jax import settings
from stppo_jax.configs import schema
from stppo_jax.data import layout
from stppo_jax.data import mixtures

# The config keys that name a model, or files of a model.
MODELS = (
  'model.path',
  'model.reference_path',
  'model.value_path',
  'model.tokenizer_path',
  'model.lora.path',
)
# For larger files, such as weights and corpora, a checksum covers only some
# pieces, which are spread over the file: reading the whole file at each start
# would take too long.
_MAX_BYTES = 1 << 28
_NUM_PIECES, _PIECE = 64, 1 << 20
# The records of runs have names in place of the folders of packaged files, so
# that a run can be resumed in another clone. `_PACKAGED` maps the names to the
# folders.
_CONFIGS = pathlib.Path(schema.__file__).resolve().parent
# The paths are escaped as in JSON, but without quotes, because they are
# replaced within the JSON text of a record.
_PACKAGED = {
  'asset:prompts/': json.dumps(f'{_CONFIGS / "prompts"}/')[1:-1],
  'asset:': json.dumps(f'{_CONFIGS.parent / "assets"}/')[1:-1],
}


def find(config: Any) -> Iterator[tuple[str, pathlib.Path]]:
  """Yields the files and folders that a config names, each with its config key.

  The keys `data.train` and `data.evaluation` may name several data sets, so a
  colon and the name of the data set follow these keys.

  Args:
    config: the config, or its record, which is a nested mapping.
  """
  places = settings.flatten({'model': config['model']})
  for key in MODELS:
    place = places.get(key)  # the records of earlier versions lack some keys
    # The name of a model of the Hub contains its commit, so the model needs no
    # checksum.
    if place and not hub.is_name(place):
      yield key, buckets.local_folder(place)
  data = config['data']
  if data['name'] in ('jsonl', 'tfds'):
    root = buckets.local_folder(data['root'])
    for key in ('train', 'evaluation'):
      for element in mixtures.parse(data[key]) if data[key] else ():
        path = root / element.name
        if data['name'] == 'tfds':
          # This file has the checksums of the question files, so its own
          # checksum differs if one of these checksums differs.
          path = layout.folder(root, element.name) / 'metadata.json'
        yield f'data.{key}: {element.name}', path
    if data['corpus']:
      yield 'data.corpus', root / data['corpus']
  if config['sft'].get('demonstrations'):  # earlier versions lack this key
    yield 'sft.demonstrations', pathlib.Path(config['sft']['demonstrations'])
  if config['env']['prompt_template']:
    yield 'env.prompt_template', pathlib.Path(config['env']['prompt_template'])


def recorded(text: str) -> str:
  """Returns JSON text with `asset:` names in place of paths of packaged files.

  The record of a run has these names, see `_PACKAGED`. A path is replaced at
  the beginning of a string, and after an `=`, as in `data.train=PATH`.

  Args:
    text: the JSON of a config or of checksums.
  """
  for name, folder in _PACKAGED.items():
    for before in '"=':
      text = text.replace(f'{before}{folder}', f'{before}{name}')
  return text


def here(text: str) -> str:
  """Returns JSON text with paths in place of `asset:` names of packaged files.

  A name is replaced at the beginning of a string.
  """
  for name, folder in _PACKAGED.items():
    text = text.replace(f'"{name}', f'"{folder}')
  return text


def checksum(path: pathlib.Path) -> str:
  """Returns the checksum of a file, or of the files in a folder.

  Hidden files and folders in a folder do not count. For a file above 256 MiB,
  only the size and 64 pieces count.

  Args:
    path: the file or the folder; if it does not exist, the result is ''.
  """
  if not path.exists():
    return ''
  if path.is_file():
    return _of_file(path)
  contents = {
    other.name: _of_file(other)
    for other in sorted(path.iterdir())
    if other.is_file() and not other.name.startswith('.')
  }
  return hashlib.sha256(repr(contents).encode()).hexdigest()[:12]


def _of_file(path: pathlib.Path) -> str:
  size = path.stat().st_size
  with open(path, 'rb') as file:
    if size <= _MAX_BYTES:
      return hashlib.file_digest(file, 'sha256').hexdigest()[:12]
    digest = hashlib.sha256(str(size).encode())
    for number in range(_NUM_PIECES):
      file.seek(number * size // _NUM_PIECES)
      digest.update(file.read(_PIECE))
  return digest.hexdigest()[:12]
