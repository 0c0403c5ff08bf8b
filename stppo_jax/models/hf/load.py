"""Reading a policy from a Hugging Face directory.

What can be wrong is found out from the headers of the files, before any
weight is read: every tensor there has its place here, and every leaf here its
tensors. Weights become float32 whatever they are stored as, slice by slice:
the host holds one block of a leaf at a time beside what is on its devices.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
import mmap
import pathlib
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models.hf import names as names_lib
from stppo_jax.models.hf import safetensors_file
from stppo_jax.models.hf import weight_files

# What some files have beside the weights, and nobody needs: frequencies that
# follow from the config, and the head of a model whose head is its embedding.
_FREQUENCIES = re.compile(r'\.rotary_emb\.inv_freq$')
_HEAD = 'lm_head.weight'
_SHOWN = 3  # mis-shaped tensors in an error

_Index = tuple[slice, ...]


class _Part(NamedTuple):
  """A tensor that is a part of a leaf."""

  entry: names_lib.Entry
  tensor: safetensors_file.Tensor


class _Leaf(NamedTuple):
  """A leaf before it is read: its tensors by index, and its shape."""

  parts: dict[tuple[int, ...], _Part]
  shape: tuple[int, ...]


def read_config(
  directory: str | pathlib.Path, *, dtype: str, remat: str, scan_unroll: int
) -> model_config.ModelConfig:
  """The shape in `config.json`.

  Raises:
    ValueError: no such file, no JSON, a key that it lacks or that is not what
      it may be, or an unsupported architecture; one line that names the file.
  """
  path = pathlib.Path(directory) / 'config.json'
  if not path.is_file():
    raise ValueError(f'no config.json in {directory}')
  content = weight_files.read_json(path)
  try:
    return model_config.ModelConfig.from_hf(
      content, dtype=dtype, remat=remat, scan_unroll=scan_unroll
    )
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def check_weights(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> None:
  """Whether the weights of a directory are those of a policy of this shape.

  Raises:
    ValueError: see `read_params`.
  """
  _plan(directory, config)


def read_params(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> functional.Params:
  """The weights of a policy as numpy arrays, float32.

  Raises:
    ValueError: no weights, a damaged file, a missing, extra or mis-shaped
      tensor, or one of an unsupported dtype; one line.
  """
  return _nested(
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
  """The weights of a policy, float32, straight to where they belong.

  Each host reads what its devices hold of each leaf, no more.

  Args:
    directory: of a model.
    config: its shape.
    shardings: tree of `jax.sharding.Sharding`, one for each leaf.

  Raises:
    ValueError: see `read_params`.
  """
  leaves = {}
  for path, leaf in _plan(directory, config).items():
    sharding = shardings
    for key in path:
      sharding = sharding[key]
    leaves[path] = _place(leaf, sharding)
  return _nested(leaves)


def _plan(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> dict[tuple[str, ...], _Leaf]:
  """Leaves by path, each with its tensors; raises as `read_params`."""
  tensors = weight_files.read_headers(directory)
  wanted = {entry.hf_name: entry for entry in names_lib.entries(config)}
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
  model = functional.Model(config, 'vocabulary')
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
  leaves: dict[tuple[str, ...], _Leaf] = {}
  problems = []
  for name, entry in wanted.items():
    leaf: Any = shapes
    for key in entry.path:
      leaf = leaf[key]
    part = _Part(entry, tensors[name])
    leaves.setdefault(entry.path, _Leaf({}, leaf.shape))
    leaves[entry.path].parts[entry.index] = part
    problems += _problems(part, leaf.shape)
  if problems:
    more = len(problems) - _SHOWN
    more = f'; and {more} more' if more > 0 else ''
    raise ValueError(f'{directory}: {"; ".join(problems[:_SHOWN])}{more}')
  return leaves


def _problems(part: _Part, leaf_shape: Sequence[int]) -> list[str]:
  """What is wrong with a tensor, in words."""
  (entry, tensor), problems = part, []
  expected = tuple(leaf_shape[len(entry.index) :])
  expected = expected[::-1] if entry.transposed else expected
  if tensor.shape != expected:
    problems.append(
      f'{entry.hf_name} gives shape {tensor.shape}, expected {expected}'
    )
  if tensor.dtype not in safetensors_file.DTYPES:
    supported = ', '.join(safetensors_file.DTYPES)
    problems.append(
      f'{entry.hf_name} is of dtype {tensor.dtype}, supported: {supported}'
    )
  return problems


def _place(leaf: _Leaf, sharding: jax.sharding.Sharding) -> jax.Array:
  """A leaf on its devices, in blocks along axes that are not cut."""
  local = sharding.shard_shape(leaf.shape)
  whole = [here == size for here, size in zip(local, leaf.shape)] + [False]
  blocks = list(_blocks(leaf.shape, whole.index(False)))
  if len(blocks) == 1:
    return _place_block(leaf, sharding, blocks[0], owned=True)
  zeros = jax.jit(lambda: jnp.zeros(leaf.shape), out_shardings=sharding)
  write = jax.jit(_write_block, donate_argnums=0, out_shardings=sharding)
  array = zeros()
  for block in blocks:
    starts = [i.start for i in block]
    # Waited for, and not kept: the host would hold several blocks.
    array = write(array, _place_block(leaf, sharding, block), starts)
    jax.block_until_ready(array)
  return array


def _blocks(shape: tuple[int, ...], uncut: int) -> Iterator[_Index]:
  """Cuts a leaf along its first `uncut` axes into blocks of BLOCK_BYTES."""
  rows = [4 * math.prod(shape[axis + 1 :]) for axis in range(uncut)]
  # The first axis of which a step is small enough, or the last there is.
  small = (
    axis for axis, size in enumerate(rows) if size <= weight_files.BLOCK_BYTES
  )
  axis = next(small, uncut - 1)
  if axis < 0:
    yield tuple(slice(0, size) for size in shape)
    return
  step = max(1, weight_files.BLOCK_BYTES // rows[axis])
  for outer in itertools.product(*map(range, shape[:axis])):
    for start in range(0, shape[axis], step):
      yield (
        *(slice(n, n + 1) for n in outer),
        slice(start, min(start + step, shape[axis])),
        *(slice(0, size) for size in shape[axis + 1 :]),
      )


def _write_block(array, values, starts):
  return jax.lax.dynamic_update_slice(array, values, starts)


def _place_block(
  leaf: _Leaf,
  sharding: jax.sharding.Sharding,
  block: _Index,
  *,
  owned: bool = False,
) -> jax.Array:
  """A block of a leaf; one device's slice of it is on the host at a time.

  Args:
    leaf: of which the block is.
    sharding: of the leaf, and of the block.
    block: bounds on each axis.
    owned: never on memory of the host, as the CPU backend would have it: such
      an array cannot be donated, so the program to consume it would copy it.
  """
  shape = tuple(i.stop - i.start for i in block)
  holders: dict[tuple, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = [i.indices(size)[:2] for i, size in zip(index, shape)]
    holders.setdefault(tuple(bounds), []).append(device)
  arrays: list[jax.Array] = []
  for bounds, devices in holders.items():
    values = _read(
      leaf,
      tuple(
        slice(i.start + begin, i.start + end)
        for i, (begin, end) in zip(block, bounds)
      ),
      offset=4 * owned,  # the backend takes no address like this
    )
    for device in devices:
      place = jax.sharding.SingleDeviceSharding(
        device, memory_kind=sharding.memory_kind
      )
      arrays.append(jax.device_put(values, place))
    jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(leaf: _Leaf, index: _Index, offset: int = 0) -> np.ndarray:
  """A slice of a leaf, float32; only what it covers is read."""
  result = _memory(tuple(i.stop - i.start for i in index), offset)
  depth = len(next(iter(leaf.parts)))
  leading, rest = index[:depth], index[depth:]
  for position in itertools.product(*(range(i.start, i.stop) for i in leading)):
    entry, tensor = leaf.parts[position]
    stored = tensor.view()
    stored = stored.T if entry.transposed else stored
    here = tuple(p - i.start for p, i in zip(position, leading))
    result[here] = stored[rest]
  return result


def _memory(shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
  """Zeros, float32, at `offset` bytes in pages of their own.

  They go back to the system when they are let go of; those of malloc stay.
  """
  size = 4 * math.prod(shape)
  private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  pages = mmap.mmap(-1, max(size, 1) + offset, flags=private)
  values = np.frombuffer(pages, np.float32, size // 4, offset)
  return values.reshape(shape)


def _nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for path, leaf in leaves.items():
    block = tree
    for key in path[:-1]:
      block = block.setdefault(key, {})
    block[path[-1]] = leaf
  return tree
