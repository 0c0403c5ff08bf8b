"""Reads a policy from a Hugging Face directory.

Most errors are found in the headers of the files, before any weight is read:
every tensor of the files must belong to a leaf of the model's parameters, and
every leaf must have all its tensors.

A model may be larger than the memory of a host, so `load_params` does not build
whole leaves on the host. Files are mapped into memory, and a leaf is placed
slice by slice into its sharding. Each host reads only the weights that its own
devices hold. It converts one slice to float32, copies it to the devices and
frees it, before it reads the next slice.
"""

from collections.abc import Iterator, Sequence
import itertools
import logging
import math
import mmap
import pathlib
import re
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import hub
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models.hf import config_json
from stppo_jax.models.hf import families
from stppo_jax.models.hf import safetensors_file
from stppo_jax.models.hf import weight_files

# Names of tensors that files may have although the model does not need them:
# rotary frequencies, which follow from the config, and the output head, if the
# model uses its embedding as the head.
_FREQUENCIES = re.compile(r'\.rotary_emb\.inv_freq$')
_HEAD = 'lm_head.weight'
_EMBEDDING = 'model.embed_tokens.weight'

_Index = tuple[slice, ...]


class _Source(NamedTuple):
  """Locates the values of a leaf, or of one layer or expert of a leaf.

  Attributes:
    entry: the tensor's name, and the place of the values in the parameter tree.
    tensor: the tensor in its file.
    row: the first of the tensor's rows that hold the values.
  """

  entry: families.Entry
  tensor: safetensors_file.Tensor
  row: int

  def read(self, index: _Index) -> np.ndarray:
    """Returns only a slice of the values, in the dtype of the file."""
    index = index[::-1] if self.entry.transposed else index
    rows = slice(index[0].start + self.row, index[0].stop + self.row)
    values = self.tensor.read((rows, *index[1:]))
    return values.T if self.entry.transposed else values


class _Leaf(NamedTuple):
  """Describes a leaf before it is read.

  Attributes:
    sources: for each index along the leaf's leading axes, the source of the
      values at this index.
    shape: the leaf's shape.
  """

  sources: dict[tuple[int, ...], _Source]
  shape: tuple[int, ...]


def read_config(
  directory: str | pathlib.Path, **computes: Any
) -> model_config.ModelConfig:
  """Returns the `ModelConfig` that a model's `config.json` describes.

  Args:
    directory: a model in Hugging Face's format. It is a directory, an address
      in a bucket, or the name of a model of the Hub.
    **computes: see `config_json.read`.

  Raises:
    ValueError: the file does not exist, is not JSON, lacks a key, has a value
      that is not allowed, or describes an architecture that is not supported.
      The message is one line and names the file.
  """
  path = hub.local_folder(directory) / 'config.json'
  if not path.is_file():
    raise ValueError(f'no config.json in {directory}')
  content = weight_files.read_json(path)
  try:
    return config_json.read(content, **computes)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def end_token_ids(directory: str | pathlib.Path) -> tuple[int, ...]:
  """Returns the ids of the tokens that end a text; () if no file gives any.

  Instruct models have several such tokens. Their ids are read from
  `generation_config.json` or, if this file gives none, from `config.json`.

  Raises:
    ValueError: a value is not a token id; the message is one line.
  """
  for name in ('generation_config.json', 'config.json'):
    path = hub.local_folder(directory) / name
    content = weight_files.read_json(path) if path.is_file() else {}
    value = content.get('eos_token_id')
    if value is None:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
      raise ValueError(
        f'{path}: eos_token_id={value!r}: must be a token id or a list of ids'
      )
    return tuple(ids)
  return ()


def check_weights(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> None:
  """Raises ValueError if a directory lacks valid weights for a policy.

  `read_params` lists the errors. Values are not read and not checked, with one
  exception. If the policy uses its embedding as the output head, and the files
  contain an output head too, the embedding and this head are compared. If they
  differ, a warning is logged.
  """
  _plan(directory, config)
  if config.tie_embeddings:
    _compare_head(directory)


def _compare_head(directory: str | pathlib.Path) -> None:
  """Logs a warning if an unused output head differs from the embedding."""
  tensors = weight_files.read_headers(directory)
  embedding, head = tensors[_EMBEDDING], tensors.get(_HEAD)
  if head is None:
    return
  same = head.shape == embedding.shape and head.dtype == embedding.dtype
  if same:
    rows, width = head.shape
    step = max(1, weight_files.SLICE_BYTES // (4 * width))
    slices = (slice(n, min(n + step, rows)) for n in range(0, rows, step))
    same = all(
      np.array_equal(embedding.read((part,)), head.read((part,)))
      for part in slices
    )
  if not same:
    logging.getLogger(__name__).warning(
      '%s: %s differs from %s and is not used, because config.json says '
      'tie_word_embeddings=true',
      directory,
      _HEAD,
      _EMBEDDING,
    )


def read_params(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> functional.Params:
  """Returns the weights of a policy as numpy arrays, float32.

  Raises:
    ValueError: there are no weights, a file is damaged, or a tensor is missing,
      unexpected, of a wrong shape, of an unsupported dtype, or not finite. The
      message is one line.
  """
  return traverse_util.unflatten_dict(
    {
      path: _read(leaf, tuple(slice(0, size) for size in leaf.shape))
      for path, leaf in _plan(directory, config).items()
    }
  )


def load_params(
  directory: str | pathlib.Path,
  config: model_config.ModelConfig,
  shardings: Any,
) -> functional.Params:
  """Returns the weights of a policy, float32, read into their shardings.

  Each host reads only the parts of each leaf that its own devices hold.

  Args:
    directory: a model in Hugging Face's format.
    config: the model's config.
    shardings: tree of `jax.sharding.Sharding`, one for each leaf.

  Raises:
    ValueError: see `read_params`.
  """
  return traverse_util.unflatten_dict(
    {
      path: _place(leaf, families.leaf(shardings, path))
      for path, leaf in _plan(directory, config).items()
    }
  )


def _plan(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> dict[tuple[str, ...], _Leaf]:
  """Returns path of a leaf -> the leaf, with the sources of its values.

  Raises:
    ValueError: see `read_params`.
  """
  tensors = weight_files.read_headers(directory)
  wanted = families.tensors(config)
  if config.tie_embeddings:
    tensors.pop(_HEAD, None)
  tensors = {
    name: tensor
    for name, tensor in tensors.items()
    if name in wanted or not _FREQUENCIES.search(name)
  }
  for kind, differing in (
    ('missing', wanted.keys() - tensors.keys()),
    ('unexpected', tensors.keys() - wanted.keys()),
  ):
    if differing:
      names = weight_files.shortened(differing)
      raise ValueError(
        f'{directory}: {kind} tensors {names}: expected {len(wanted)} '
        f'tensors, found {len(tensors)}'
      )
  shapes = functional.Model(config, 'vocabulary').abstract_params
  leaves: dict[tuple[str, ...], _Leaf] = {}
  problems = []
  for name, parts in wanted.items():
    row = 0
    for entry in parts:
      leaf = families.leaf(shapes, entry.path)
      leaves.setdefault(entry.path, _Leaf({}, leaf.shape))
      source = _Source(entry, tensors[name], row)
      leaves[entry.path].sources[entry.index] = source
      row += entry.shape(shapes)[0]
    problems += _problems(
      name, tensors[name], families.tensor_shape(parts, shapes)
    )
  if problems:
    raise ValueError(f'{directory}: {weight_files.shortened(problems)}')
  return leaves


def _problems(
  name: str, tensor: safetensors_file.Tensor, expected: Sequence[int]
) -> list[str]:
  """Returns messages about a wrong shape or dtype of a tensor."""
  problems = []
  if tensor.shape != expected:
    problems.append(f'{name} has shape {tensor.shape}, expected {expected}')
  if tensor.dtype not in safetensors_file.DTYPES:
    supported = ', '.join(safetensors_file.DTYPES)
    problems.append(f'{name} has dtype {tensor.dtype}, supported: {supported}')
  return problems


def _place(leaf: _Leaf, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns a leaf on its devices, written slice by slice.

  The leaf is cut into slices along the leading axes that are not sharded. So
  each slice contains a part of every device's shard, and writing the slice
  moves no data between devices.
  """
  local = sharding.shard_shape(leaf.shape)
  # True for each axis that is not sharded. The added False ends the search for
  # the first False if no axis is sharded.
  whole = [here == size for here, size in zip(local, leaf.shape)] + [False]
  slices = list(_slices(leaf.shape, whole.index(False)))
  if len(slices) == 1:
    return _place_slice(leaf, sharding, slices[0], owned=True)
  zeros = jax.jit(lambda: jnp.zeros(leaf.shape), out_shardings=sharding)
  write = jax.jit(
    jax.lax.dynamic_update_slice, donate_argnums=0, out_shardings=sharding
  )
  array = zeros()
  for index in slices:
    starts = [i.start for i in index]
    # Without this wait, the host would run ahead and hold several slices.
    array = write(array, _place_slice(leaf, sharding, index), starts)
    jax.block_until_ready(array)
  return array


def _slices(shape: tuple[int, ...], num_axes: int) -> Iterator[_Index]:
  """Yields slices of about SLICE_BYTES that cover a leaf, in order.

  The leaf is cut along its first `num_axes` axes only.
  """
  rows = [4 * math.prod(shape[axis + 1 :]) for axis in range(num_axes)]
  # The leaf is cut along the first axis for which the values at one index have
  # at most SLICE_BYTES, or else along the last axis that may be cut.
  small = (
    axis for axis, size in enumerate(rows) if size <= weight_files.SLICE_BYTES
  )
  axis = next(small, num_axes - 1)
  if axis < 0:
    yield tuple(slice(0, size) for size in shape)
    return
  step = max(1, weight_files.SLICE_BYTES // rows[axis])
  for outer in itertools.product(*map(range, shape[:axis])):
    for start in range(0, shape[axis], step):
      yield (
        *(slice(n, n + 1) for n in outer),
        slice(start, min(start + step, shape[axis])),
        *(slice(0, size) for size in shape[axis + 1 :]),
      )


def _place_slice(
  leaf: _Leaf,
  sharding: jax.sharding.Sharding,
  index: _Index,
  *,
  owned: bool = False,
) -> jax.Array:
  """Returns a slice of a leaf as an array in the leaf's sharding.

  The host holds the data of one device at a time.

  Args:
    leaf: the leaf.
    sharding: the sharding of the leaf, and of the slice.
    index: bounds of the slice on each axis.
    owned: whether the devices must own the memory of the array. If false, the
      CPU backend uses aligned memory of numpy without a copy. A program to
      which such an array is donated would have to copy it.
  """
  shape = tuple(i.stop - i.start for i in index)
  holders: dict[tuple, list] = {}  # bounds of a shard -> devices that hold it
  placement = sharding.addressable_devices_indices_map(shape)
  for device, held in placement.items():
    assert held is not None
    bounds = [i.indices(size)[:2] for i, size in zip(held, shape)]
    holders.setdefault(tuple(bounds), []).append(device)
  arrays: list[jax.Array] = []
  for bounds, devices in holders.items():
    values = _read(
      leaf,
      tuple(
        slice(i.start + begin, i.start + end)
        for i, (begin, end) in zip(index, bounds)
      ),
      offset=4 * owned,  # with an offset, JAX must copy the unaligned memory
    )
    for device in devices:
      place = jax.sharding.SingleDeviceSharding(
        device, memory_kind=sharding.memory_kind
      )
      arrays.append(jax.device_put(values, place))
    jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(leaf: _Leaf, index: _Index, offset: int = 0) -> np.ndarray:
  """Returns a slice of a leaf as float32; reads only this slice from the files.

  `offset` is an argument of `_memory`.
  """
  result = _memory(tuple(i.stop - i.start for i in index), offset)
  depth = len(next(iter(leaf.sources)))
  leading, rest = index[:depth], index[depth:]
  for position in itertools.product(*(range(i.start, i.stop) for i in leading)):
    source = leaf.sources[position]
    here = tuple(p - i.start for p, i in zip(position, leading))
    result[here] = source.read(rest)
    if not np.isfinite(result[here]).all():
      raise ValueError(
        f'{source.tensor.path}: {source.entry.hf_name} has a value that is not '
        'finite'
      )
  return result


def _memory(shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
  """Returns float32 zeros in memory pages that no other array uses.

  The array begins `offset` bytes after the start of its pages. The pages go
  back to the system when the array is deleted. Memory from malloc may stay with
  the process, so the slices of a large model would add up.
  """
  size = 4 * math.prod(shape)
  private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  pages = mmap.mmap(-1, max(size, 1) + offset, flags=private)
  values = np.frombuffer(pages, np.float32, size // 4, offset)
  return values.reshape(shape)
