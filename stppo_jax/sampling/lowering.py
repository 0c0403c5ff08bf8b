"""Lowers the engine's programs from the shapes of arrays, without any data.

`extend` and `decode` are lowered in the largest form that a run compiles: for
the most rows, with all pages of each row. The devices need not be present, see
`parallel/topology.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import pieces
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state


class Lowering:
  """Lowers the programs of an engine.

  Args:
    model: the policy.
    placement: the devices that decode.
    options: the engine's options.
    num_states: the number of states of the stop automaton.
    trained: the shapes and shardings of the policy's trained weights.
    base: the shapes and shardings of the frozen weights, if the trained weights
      are adapters.

  Attributes:
    weights: the shapes and shardings of the published weights.
    state: the shapes and shardings of the state of a lane's slots.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    placement: publish_lib.Placement,
    options: engine_options.EngineOptions,
    num_states: int,
    trained: functional.Params,
    base: functional.Params | None = None,
  ):
    mesh = placement.mesh
    self._functions = compiled_programs.build(
      model, placement, options.programs, stopped=num_states - 1
    )
    self._mesh = mesh
    self._options = options
    self._trained = trained
    self.weights = self._published(trained)
    if base is not None:
      self.weights = compiled_programs.joined(
        self._published(base), self.weights
      )
    self._slots_layout = slot_state.shardings(model, mesh)
    # A program works on the slots of all hosts that call it.
    hosts = mesh_lib.num_hosts(mesh)
    slots = hosts * options.slots_per_lane
    self.state = sharding.with_layout(
      jax.eval_shape(
        lambda: slot_state.empty(
          model,
          slots,
          hosts * options.pages_per_lane,
          options.tokens_per_page,
        )
      ),
      self._slots_layout,
    )
    # The number of rows in the largest call. With `batch_rows` it may be
    # smaller than the number of slots. No program runs on more rows, so the
    # programs for this number need the most memory.
    self._shards = cache_lib.row_shards(model.config, mesh)
    self._rows = hosts * options.largest_call(self._shards // hosts)
    self._table_ZV = jax.ShapeDtypeStruct(
      (num_states, model.config.vocab_size),
      jnp.int16,
      sharding=sharding.replicated(mesh),
    )

  def extend(self) -> Any:
    """Lowers the program that appends tokens to slots."""
    appended = slot_programs.AppendBatch(
      self._by_row(jnp.int32, self._options.prefill_chunk),
      self._by_row(jnp.int32),
      self._by_row(jnp.bool_),
      self._by_row(jnp.bool_),
      self._by_row(jnp.int32),
    )
    return self._functions.extend.lower(
      self.weights,
      self.state,
      appended,
      self._by_row(jnp.int32, self._options.pages_per_row),
      slots_A=self._active(),
      num_pages=self._options.pages_per_row,
    )

  def decode(self) -> Any:
    """Lowers the program that decodes a chunk of tokens."""
    return self._functions.decode.lower(
      self.weights,
      self.state,
      self._by_row(jnp.uint32, 2),
      self._by_row(jnp.bool_),
      self._by_row(jnp.int32, self._options.pages_per_row),
      self._table_ZV,
      slots_A=self._active(),
      greedy=False,
      enough=self._rows,
      num_pages=self._options.pages_per_row,
    )

  def publish(self) -> list[tuple[Any, int]]:
    """Lowers the programs that copy the trained weights for the engine.

    These programs run on the devices of training.

    Returns:
      Pairs of a program and the number of times that it runs.
    """
    publisher = self._functions.publisher
    return [
      (publisher.program(part)[0].lower(part, 0), count)
      for part, count in publisher.parts(self._trained)
    ]

  def _published(self, params: functional.Params) -> functional.Params:
    publisher = self._functions.publisher

    def shapes(part, layer):
      copy, layout = publisher.program(part)
      return sharding.with_layout(jax.eval_shape(copy, part, layer), layout)

    return pieces.cut(publisher.by_part(params, shapes), self._mesh)

  # The result stands for an array whose first axis counts the rows. Lowering
  # needs only the shape, the dtype and the sharding of such an array.
  def _by_row(self, dtype, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(
      (self._rows, *shape), dtype, sharding=self._slots_layout.lengths
    )

  def _active(self) -> Any:
    """Returns the shape of `slots_A`; None if the programs run on all slots."""
    if self._rows == len(self.state.lengths):
      return None
    if self._shards == 1:
      return self._by_row(jnp.int32)
    return jax.ShapeDtypeStruct(
      (self._shards, self._rows // self._shards),
      jnp.int32,
      sharding=self._slots_layout.lengths,
    )
