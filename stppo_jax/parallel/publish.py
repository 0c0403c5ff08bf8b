"""Copies weights from the layout of training to the layout of decoding.

For training, a policy is sharded over the devices of all hosts. For decoding,
every host needs all weights, because it decodes its own rows (dialogues). The
weights are sharded over some of the host's devices along `tensor`. The host may
have several such sets of devices, which hold the same weights and decode
different rows.

One program on all devices copies the weights from one layout to the other. Its
results are global arrays, and every host holds all pieces of each array. From
these pieces, the host then makes arrays on its own devices only, without a
copy. `device_put` cannot replace the program: it may return the arrays of
training themselves, which the next update deletes.

If some devices of each host only collect, the program gathers the copy on the
devices that learn, and each host then moves the copy to its devices that
collect. A host that only collects receives the weights over the network, see
`transfer`, and puts them on its devices.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding

Tree = Any
# Each axis of the training mesh is split into two axes, whose sizes multiply to
# the size of the axis. The layouts of training and of decoding can both be
# written with these axes. Decoding shards rows over `_ROWS` and weights over
# `_COLUMNS`.
_ROWS = ('data_rows', 'fsdp_rows', 'expert_rows', 'tensor_rows')
_COLUMNS = ('tensor_columns', 'data_columns', 'fsdp_columns', 'expert_columns')
_SPLIT_AXES = (
  *('data_rows', 'data_columns', 'fsdp_rows', 'fsdp_columns'),
  *('expert_rows', 'expert_columns', 'tensor_columns', 'tensor_rows'),
)
# Maps an axis over which training shards weights to the split axes that take
# its place in the first layout of `Placement.stages`.
_BEGIN = {
  'fsdp': ('fsdp_rows', 'fsdp_columns'),
  'expert': ('expert_rows', 'expert_columns'),
  'tensor': ('tensor_columns', 'tensor_rows', 'data_columns'),
}


@dataclasses.dataclass(frozen=True)
class Placement:
  """Says which devices decode, and which pieces of weights each of them holds.

  Attributes:
    training: the mesh of training.
    tensor: the number of devices over which a copy of the weights is sharded.
    collecting: the devices of this host that decode and do not learn; () if the
      devices that learn also decode.
    host: the number of this host; None: `jax.process_index()`.
    spans_slice: whether all hosts run the same decoding programs, each with its
      own rows. If true, `mesh` has the devices of all hosts.
    collectors: the number of hosts that only collect, if this host only
      collects; 0 if this host learns.

  Raises:
    ValueError: the weights cannot be sharded over `tensor` devices of a host.
  """

  training: jax.sharding.Mesh
  tensor: int
  collecting: tuple[Any, ...] = ()
  host: int | None = None
  spans_slice: bool = False
  collectors: int = 0

  def __post_init__(self):
    local = [d for d in self.training.devices.flat if self._is_here(d)]
    learning = ' that learn' if self.collecting else ''
    counts = {learning: len(local), ' that collect': len(self.collecting)}
    if self.collectors:
      counts = {'': len(self.collecting)}
    for which, count in counts.items():
      if count % self.tensor:
        raise ValueError(
          f'must divide the {count} devices of this host{which}: each host '
          'decodes its own rows, with a complete copy of the weights'
        )
    # The checks below concern the layout of training. They do not apply to a
    # host that only collects, because it receives whole matrices, which can be
    # divided into any number of parts.
    if self.collectors:
      return
    trained = self.training.shape
    sizes = self._split_sizes
    if math.prod(sizes[name] for name in _COLUMNS) != self.tensor:
      raise ValueError(
        f'must divide mesh.tensor={trained["tensor"]}, or be that number times '
        f'a divisor of mesh.fsdp={trained["fsdp"]} * mesh.expert='
        f'{trained["expert"]} * mesh.data={trained["data"]}'
      )
    for group in self._groups:
      hosts = sorted({device.process_index for device in group})
      if len(hosts) > 1:
        raise ValueError(
          'each host must have a complete copy of the weights, and in this '
          f'mesh a copy is spread over hosts {hosts}'
        )

  @property
  def hosts(self) -> int:
    """The number of hosts that collect."""
    return self.collectors or mesh_lib.num_hosts(self.training)

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """The decoding mesh: training's axes, `fsdp` and `expert` of size 1."""
    devices = list(self.collecting)
    if not devices:
      groups = [
        group
        for group in self._groups
        if self.spans_slice or self._is_here(group[0])
      ]
      # Groups of the same host must be adjacent, so that the rows of a host are
      # adjacent.
      groups.sort(key=lambda group: group[0].process_index)
      devices = list(np.concatenate(groups))
    return mesh_lib.make_mesh(
      data=-1, fsdp=1, tensor=self.tensor, devices=devices
    )

  def _is_here(self, device: Any) -> bool:
    host = jax.process_index() if self.host is None else self.host
    return device.process_index == host

  @functools.cached_property
  def _split_sizes(self) -> dict[str, int]:
    """The size of each of `_SPLIT_AXES`."""
    data, fsdp, expert, tensor = self.training.devices.shape
    # Devices along `tensor` keep their shards as far as possible. If decoding
    # needs more shards, weights are also sharded over the axes whose devices
    # are closest to each other.
    columns = math.gcd(tensor, self.tensor)
    more = self.tensor // columns if columns == tensor else 1
    by_expert = math.gcd(more, expert)
    by_fsdp = math.gcd(more // by_expert, fsdp)
    by_data = math.gcd(more // by_expert // by_fsdp, data)
    return {
      'data_rows': data // by_data,
      'data_columns': by_data,
      'fsdp_rows': fsdp // by_fsdp,
      'fsdp_columns': by_fsdp,
      'expert_rows': expert // by_expert,
      'expert_columns': by_expert,
      'tensor_columns': columns,
      'tensor_rows': tensor // columns,
    }

  @functools.cached_property
  def _everywhere(self) -> jax.sharding.Mesh:
    """The mesh of training with each axis split into two axes.

    The devices have the same order as in the mesh of training, because a
    program can only mix meshes with the same order of devices.
    """
    return jax.sharding.Mesh(
      self.training.devices.reshape(
        [self._split_sizes[name] for name in _SPLIT_AXES]
      ),
      _SPLIT_AXES,
      axis_types=(jax.sharding.AxisType.Auto,) * len(_SPLIT_AXES),
    )

  @functools.cached_property
  def _groups(self) -> np.ndarray:
    """The devices of training, as an array [copies, tensor].

    The devices of one row together hold one copy of the weights for decoding.
    """
    order = [_SPLIT_AXES.index(name) for name in (*_ROWS, *_COLUMNS)]
    devices = self._everywhere.devices.transpose(order)
    return devices.reshape(-1, self.tensor)

  def stages(
    self, trained: NamedSharding, decoded: NamedSharding
  ) -> list[NamedSharding]:
    """Returns the three layouts that an array goes through, on all hosts.

    In the first layout, every device has the parts of its training shard that
    it or its neighbours along `fsdp` or `expert` need for decoding. In the
    second layout, the neighbours have exchanged these parts. The third is the
    layout of decoding, in which every device has gathered its whole shard.
    Without the first two layouts, the compiler would gather whole matrices.

    Args:
      trained: the layout of the array on the mesh of training.
      decoded: the layout of the array on `mesh`; its spec has the same length.
    """
    last = [_COLUMNS if axis == 'tensor' else None for axis in decoded.spec]
    cut = [activations.names(axes) for axes in trained.spec]
    first = [tuple(x for axis in axes for x in _BEGIN[axis]) for axes in cut]
    rows = [
      tuple(f'{axis}_rows' for axis in axes if axis != 'tensor') for axes in cut
    ]
    exchanged = [x or columns for x, columns in zip(rows, last, strict=True)]
    return [
      NamedSharding(self._everywhere, P(*spec))
      for spec in (first, exchanged, last)
    ]

  def here(self, x: jax.Array, layout: NamedSharding) -> jax.Array:
    """Returns this host's pieces of a global array as one local array."""
    if self.collecting:
      pieces = _moved(x, layout)
    else:
      pieces = [piece.data for piece in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, layout, pieces)


class Publisher:
  """Copies weights of a model to the devices that decode with them.

  One program copies the embedding, the norm and the head. For each stack of
  layers, another program then copies one layer per call. A single program for
  all layers would gather many layers before it stores its first result, and so
  hold most of the weights twice.

  Args:
    placement: the devices that decode.
    cast: a function that takes weights and returns copies in the dtype of the
      computation.
    places: for each layer, the name of its stack in the weights and its index
      in the stack.
  """

  def __init__(
    self,
    placement: Placement,
    cast: Callable[[Tree], Tree],
    *,
    places: Sequence[tuple[str, int]],
  ):
    self._placement = placement
    self._cast = cast
    self._places = tuple(places)
    self._counts = collections.Counter(name for name, _ in places)
    self._programs: dict[Any, tuple[Any, Tree]] = {}

  def program(self, part: Tree) -> tuple[Any, Tree]:
    """Returns the jitted program that copies a part, and the copy's layout.

    The program takes the part and the index of the layer to copy. If the part
    is all weights outside of stacks, the index has no effect.

    Args:
      part: either a stack of layers, or all weights outside of stacks; the
        leaves may be shapes.
    """
    # Parts with the same tree structure share a program. The structure depends
    # on whether a part is a stack, and on whether it has adapters.
    key = jax.tree.structure(part)
    if key not in self._programs:
      layout = self._layout(part, self._placement.mesh)
      # A host that only collects never runs this program, and needs only the
      # shapes of the results. So the results need no shardings there.
      sent = self._placement.collectors > 0
      copy = jax.jit(
        self._copy, out_shardings=None if sent else self._stages(part)[-1]
      )
      self._programs[key] = copy, layout
    return self._programs[key]

  def parts(self, params: Tree) -> list[tuple[Tree, int]]:
    """Returns the parts of weights, each with its number of layers.

    Weights outside of stacks, if there are any, are the first part, which
    counts as 1 layer. Every stack of layers is a further part.

    Args:
      params: the weights with stacked layers, or their shapes.
    """
    whole = {name: x for name, x in params.items() if name not in self._counts}
    stacks = [
      ({name: params[name]}, count)
      for name, count in self._counts.items()
      if name in params
    ]
    return [(whole, 1), *stacks] if whole else stacks

  def by_part(
    self, params: Tree, function: Callable[[Tree, int], Tree]
  ) -> Tree:
    """Returns a function's results for all parts, as one tree of weights.

    The results of layers are in the tuple 'layers', one tree for each layer.

    Args:
      params: the weights with stacked layers, or their shapes.
      function: takes a part and the index of a layer in this part. It is called
        for every layer of every stack. For the part that holds all weights
        outside of stacks, it is called once, with the index 0.
    """
    made: dict[str, Any] = {}
    layers: dict[tuple[str, int], Tree] = {}
    for part, count in self.parts(params):
      results = [function(part, n) for n in range(count)]
      if self._is_stack(part):
        for n, result in enumerate(results):
          layers |= {(name, n): x for name, x in result.items()}
      else:
        made |= results[0]
    # If only adapters are trained, `params` lacks every stack without adapters.
    made['layers'] = tuple(layers.get(place, {}) for place in self._places)
    return made

  def __call__(self, params: Tree) -> Tree:
    """Returns copies of weights on this host's devices.

    Args:
      params: the weights, on the devices of training, or numpy arrays if this
        host only collects.
    """

    def copied(part: Tree, layer: int) -> Tree:
      if self._placement.collectors:
        layout = self._layout(part, self._placement.mesh)
        return jax.device_put(self._of_layer(part, layer), layout)
      copy, layout = self.program(part)
      return jax.tree.map(self._placement.here, copy(part, layer), layout)

    return self.by_part(params, copied)

  def _is_stack(self, part: Tree) -> bool:
    return not self._counts.keys().isdisjoint(part)

  def _of_layer(self, part: Tree, layer: Any) -> Tree:
    is_stack = self._is_stack(part)
    return jax.tree.map(lambda x: x[layer] if is_stack else x, part)

  def _copy(self, part: Tree, layer: jax.Array) -> Tree:
    # The index of the layer is an argument, so that one program copies every
    # layer.
    copied = self._cast(self._of_layer(part, layer))
    if self._placement.training.size == 1 or self._placement.collectors:
      return copied
    # The first stage needs no exchange and comes after the cast, so devices
    # exchange the smaller dtype.
    for layout in self._stages(part):
      copied = jax.lax.with_sharding_constraint(copied, layout)
    return copied

  def _stages(self, part: Tree) -> list[Tree]:
    layout = self._layout(part, self._placement.training)
    stages = jax.tree.map(
      self._placement.stages, layout, self._layout(part, self._placement.mesh)
    )
    return [
      jax.tree.map(lambda _, x, n=n: x[n], layout, stages) for n in range(3)
    ]

  def _layout(self, part: Tree, mesh: jax.sharding.Mesh) -> Tree:
    layout = sharding.param_shardings(part, mesh)
    # The copy of a stack is one layer, so its layout lacks the axis of layers.
    if self._is_stack(part):
      layout = jax.tree.map(
        lambda x: NamedSharding(x.mesh, P(*x.spec[1:])), layout
      )
    return layout


def _moved(x: jax.Array, layout: NamedSharding) -> list[jax.Array]:
  """Returns copies of pieces of x on the devices of a layout.

  Each device of this host in the layout gets the piece that the layout assigns
  to the device. A device of this host that holds the piece is the source of the
  copy. If several devices hold the piece, they take turns as the source.
  """
  held: dict[tuple, list[jax.Array]] = {}
  for piece in x.addressable_shards:
    held.setdefault(_bounds(piece.index, x.shape), []).append(piece.data)
  sources = {bounds: itertools.cycle(held[bounds]) for bounds in held}
  places = layout.addressable_devices_indices_map(x.shape).items()
  return [
    jax.device_put(next(sources[_bounds(index, x.shape)]), device)
    for device, index in places
  ]


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple:
  """Returns a piece's begin and end in each dimension, as a hashable tuple."""
  return tuple(s.indices(size)[:2] for s, size in zip(index, shape))
