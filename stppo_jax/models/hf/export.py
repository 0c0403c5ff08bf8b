"""Writes a policy as a Hugging Face directory, slice by slice.

The weights stay on the devices, and the host holds one slice of one leaf at a
time. The directory gets its final name when it is complete, see `replace_dir`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import fnmatch
import functools
import itertools
import json
import math
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models.hf import config_json
from stppo_jax.models.hf import families
from stppo_jax.models.hf import peft
from stppo_jax.models.hf import safetensors_file
from stppo_jax.models.hf import weight_files

DTYPES: Mapping[str, str] = {
  'float32': 'F32',
  'bfloat16': 'BF16',
}
TOKENIZER_FILES = (
  'tokenizer*',
  'vocab.json',
  'merges.txt',
  'special_tokens_map.json',
  'added_tokens.json',
  'chat_template*',
)
_GENERATION = 'generation_config.json'
_OURS = (
  *('config.json', _GENERATION, 'model*.safetensors', weight_files.INDEX),
  *(peft.CONFIG, peft.WEIGHTS),
)
_MAX_SHARD_BYTES = 5 * 10**9

_Leaf = np.ndarray | jax.Array


def export(
  directory: str | pathlib.Path,
  config: model_config.ModelConfig,
  params: functional.Params,
  *,
  dtype: str = 'float32',
  source: str | pathlib.Path = '',
  save_tokenizer: Callable[[pathlib.Path], None] | None = None,
  max_shard_bytes: int = _MAX_SHARD_BYTES,
  writes: bool = True,
) -> None:
  """Writes weights, configs and tokenizer, and replaces an earlier export.

  All processes that hold shards of the weights must call this function. One
  process calls it with `writes=True`, and the other processes send their parts
  of the weights to this process, slice by slice.

  Args:
    directory: the folder to write. If it exists, its files stay, except files
      for which `is_ours` is true.
    config: the policy's config.
    params: the policy's weights, in any sharding.
    dtype: dtype of the weights in the files; a key of `DTYPES`.
    source: the directory that the policy was read from; '' if there is none.
      Its `config.json` is copied with a new dtype, and its
      `generation_config.json` is copied.
    save_tokenizer: function that writes the tokenizer's files to a folder;
      None: no such files are written.
    max_shard_bytes: size in bytes above which weights are split into several
      files.
    writes: whether this process writes the files.

  Raises:
    OSError: writing failed, for example on a full disk; an earlier export is
      unchanged.
  """
  # To fetch a slice, all processes must run the same program. So the processes
  # that do not write also go through all slices, in the same order.
  if not writes:
    for _ in _values(params, _entries(config)):
      pass
    return
  with replace_dir(directory, ours=is_ours) as folder:
    _write_weights(folder, config, params, DTYPES[dtype], max_shard_bytes)
    text = json.dumps(_config(config, source, dtype), indent=2) + '\n'
    (folder / 'config.json').write_text(text, encoding='utf-8')
    if source and (pathlib.Path(source) / _GENERATION).is_file():
      shutil.copyfile(pathlib.Path(source) / _GENERATION, folder / _GENERATION)
    if save_tokenizer is not None:
      save_tokenizer(folder)


def is_ours(name: str) -> bool:
  """Returns whether exports write files of this name.

  A new export removes such files of an earlier export.
  """
  patterns = _OURS + TOKENIZER_FILES
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def copy_tokenizer(source: str | pathlib.Path, folder: pathlib.Path) -> None:
  """Copies the tokenizer's files of a Hugging Face directory."""
  for path in sorted(pathlib.Path(source).iterdir()):
    wanted = any(fnmatch.fnmatchcase(path.name, p) for p in TOKENIZER_FILES)
    if wanted and path.is_file():
      shutil.copyfile(path, folder / path.name)


def _config(
  config: model_config.ModelConfig, source: str | pathlib.Path, dtype: str
) -> dict[str, Any]:
  """Returns the contents of the `config.json` to write; see `export`."""
  hf = config_json.write(config)
  if source:
    hf = weight_files.read_json(pathlib.Path(source) / 'config.json')
  # The older key `torch_dtype` is kept if the file has it, because new versions
  # of `transformers` read both keys.
  return hf | {'torch_dtype' if 'torch_dtype' in hf else 'dtype': dtype}


def _write_weights(folder, config, params, dtype, max_shard_bytes) -> None:
  """Writes the weight files, and their index if there are several."""
  tensors = families.tensors(config)
  names = dict.fromkeys(entry.hf_name for entry in _entries(config))
  shapes = {n: families.tensor_shape(tensors[n], params) for n in names}
  width = safetensors_file.DTYPES[dtype].itemsize
  sizes = {name: width * math.prod(shape) for name, shape in shapes.items()}
  files: list[list[str]] = [[]]
  bytes_left = max_shard_bytes
  for tensor in names:
    if files[-1] and sizes[tensor] > bytes_left:
      files.append([])
      bytes_left = max_shard_bytes
    files[-1].append(tensor)
    bytes_left -= sizes[tensor]
  weight_map = {}
  for number, held in enumerate(files, 1):
    name = f'model-{number:05d}-of-{len(files):05d}.safetensors'
    name = name if len(files) > 1 else weight_files.SINGLE
    weight_map |= dict.fromkeys(held, name)
    promised = {tensor: shapes[tensor] for tensor in held}
    parts = [entry for tensor in held for entry in tensors[tensor]]
    with open(folder / name, 'wb') as file:
      safetensors_file.write(file, promised, dtype, _values(params, parts))
  if len(files) > 1:
    total = {'total_size': sum(sizes.values())}
    index = {'metadata': total, 'weight_map': weight_map}
    text = json.dumps(index, indent=2) + '\n'
    (folder / weight_files.INDEX).write_text(text, encoding='utf-8')


def _entries(config: model_config.ModelConfig) -> list[families.Entry]:
  """Returns the parts of all tensors in the order in which they are written.

  Tensors are ordered by leaf, so that a slice of a leaf is a consecutive range
  of a file. The parts of a tensor follow one another.
  """
  return [
    entry
    for parts in sorted(
      families.tensors(config).values(), key=lambda x: (x[0].path, x[0].index)
    )
    for entry in parts
  ]


def _values(
  params: functional.Params, entries: Sequence[families.Entry]
) -> Iterator[np.ndarray]:
  """Yields the values of the entries' tensors, in the order of the entries.

  Each yielded array is a tensor or some rows of a tensor. The host fetches one
  slice of a leaf at a time.
  """
  row = lambda entry: (entry.path, entry.index[:-1])
  for (path, outer), group in itertools.groupby(entries, key=row):
    leaf, tensors = families.leaf(params, path), list(group)
    axis = len(outer)
    row_bytes = 4 * math.prod(leaf.shape[axis + 1 :])
    step = max(1, weight_files.SLICE_BYTES // row_bytes)
    if not tensors[0].index:
      (entry,) = tensors
      # A transposed tensor is yielded in one piece, because its rows in the
      # file are columns of the leaf.
      step = len(leaf) if entry.transposed else step
      for start in range(0, len(leaf), step):
        rows = _fetch(leaf, [slice(start, min(start + step, len(leaf)))])
        yield rows.T if entry.transposed else rows
      continue
    for run in (tensors[n : n + step] for n in range(0, len(tensors), step)):
      first, last = run[0].index[-1], run[-1].index[-1]
      here = [*(slice(n, n + 1) for n in outer), slice(first, last + 1)]
      stack = _fetch(leaf, here)[(0,) * axis]
      for entry in run:
        tensor = stack[entry.index[-1] - first]
        yield tensor.T if entry.transposed else tensor


def _fetch(leaf: _Leaf, index: Sequence[slice]) -> np.ndarray:
  """Returns a slice of a leaf along its first axes, copied to the host."""
  if isinstance(leaf, np.ndarray):
    return leaf[tuple(index)]
  if not leaf.is_fully_addressable:
    return _gather(leaf, index)
  wanted = [(i.start, i.stop) for i in index]
  wanted += [(0, size) for size in leaf.shape[len(index) :]]
  result = np.empty([stop - start for start, stop in wanted], leaf.dtype)
  for shard in leaf.addressable_shards:
    if shard.replica_id:
      continue
    held = [i.indices(n)[:2] for i, n in zip(shard.index, leaf.shape)]
    overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held)]
    if any(start >= stop for start, stop in overlap):
      continue
    data = shard.data
    if overlap != held:
      # The shard is sliced on the device. If it were sliced on the host, JAX
      # would keep a host copy of the whole shard.
      starts = [start - begin for (start, _), (begin, _) in zip(overlap, held)]
      sizes = [stop - start for start, stop in overlap]
      data = jax.lax.dynamic_slice(data, starts, sizes)
    place = (slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, wanted))
    result[tuple(place)] = data
  return result


def _gather(leaf: jax.Array, index: Sequence[slice]) -> np.ndarray:
  """Returns a slice of a leaf whose shards several processes hold.

  See `_fetch`. All processes must call this function.
  """
  # Only the sizes of a slice are static arguments of the program, so that
  # slices of equal size at different starts share a program.
  rest = leaf.shape[len(index) :]
  starts = np.array([i.start for i in index] + [0] * len(rest), np.int32)
  sizes = *(i.stop - i.start for i in index), *rest
  assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
  return np.asarray(_slice(leaf.sharding.mesh)(leaf, starts, sizes))


@functools.cache
def _slice(mesh: jax.sharding.Mesh) -> Callable[..., jax.Array]:
  """Returns a program that copies a slice of an array to every device."""
  return jax.jit(
    lambda x, starts, sizes: jax.lax.dynamic_slice(x, list(starts), sizes),
    static_argnums=2,
    out_shardings=jax.NamedSharding(mesh, jax.P()),
  )


@contextlib.contextmanager
def replace_dir(
  directory: str | pathlib.Path, *, ours: Callable[[str], bool]
) -> Iterator[pathlib.Path]:
  """Yields an empty folder to fill, which then takes the place of `directory`.

  If the caller raises an error, `directory` stays as it was.

  Args:
    directory: the folder to replace or create.
    ours: function of a file's name. If the result is true, a file of this name
      in the old folder is removed. All other files of the old folder move into
      the new folder, unless the new folder has a file of the same name.
  """
  directory = pathlib.Path(directory).resolve()
  partial = directory.with_name(f'.{directory.name}.partial')
  old = directory.with_name(f'.{directory.name}.old')
  # Between the two renames below, `directory` does not exist. If a writer is
  # killed at this point, the old folder remains under the name `old`, and the
  # next writer renames it back.
  if old.is_dir():
    if directory.exists():
      _clear(old, directory, ours)
    else:
      old.rename(directory)
  if partial.is_dir():
    shutil.rmtree(partial)
  partial.mkdir(parents=True)
  try:
    yield partial
    if directory.is_dir() and any(directory.iterdir()):
      directory.rename(old)
    partial.rename(directory)
  except BaseException:
    if old.is_dir() and not directory.exists():
      old.rename(directory)
    shutil.rmtree(partial, ignore_errors=True)
    raise
  if old.is_dir():
    _clear(old, directory, ours)


def _clear(
  old: pathlib.Path, new: pathlib.Path, ours: Callable[[str], bool]
) -> None:
  """Moves files that are not `ours` to `new`, and removes the folder `old`.

  A file whose name exists in `new` is removed, too.
  """
  for path in old.iterdir():
    if not ours(path.name) and not (new / path.name).exists():
      os.rename(path, new / path.name)
  shutil.rmtree(old)
