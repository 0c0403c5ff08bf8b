"""Compiles the programs of the local engine, and holds the policy's weights.

All lanes of an engine share its programs. Engines with an equal model,
placement and options share them too, so a process traces and compiles each
program only once.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import cached_pass
from stppo_jax.models import functional
from stppo_jax.models import lora
from stppo_jax.models import modules
from stppo_jax.parallel import compilation
from stppo_jax.parallel import distributed
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import pieces
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state as slot_state_lib
from stppo_jax.sampling import stops


class Weights(NamedTuple):
  """Holds the weights of one version of the policy.

  Attributes:
    version: the number of training steps that made the weights.
    params: the weights, in the layout and dtype that the programs read.
  """

  version: int
  params: functional.Params


class CompiledPrograms:
  """Holds the compiled programs that a `SlotDriver` calls, and the weights.

  Args:
    model: the policy; the mesh of the placement replaces its own mesh.
    placement: the devices that decode.
    automaton: the stop automaton over the tokenizer's ids.
    options: the engine's options.

  Attributes:
    page_size: the number of tokens in a page of the KV cache.
    pages_per_row: the most cache pages that a row needs.
    takes_any_number: whether one compiled program handles any number of pages.
    num_hosts: the number of hosts that call these programs together.
    shards: the number of devices of each host that the host's slots and pages
      are divided over.
    weights: the newest published weights; None before the first `publish`.
    table_ZV: the transitions of the stop automaton: for each state, the next
      state after each token id.
    empty, extend, copy, decode, expert_ids: the compiled functions of
      `slot_state` and `slot_programs`; `copy` is `slot_state.copy_prompts`.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    placement: publish_lib.Placement,
    automaton: stops.StopAutomaton,
    options: engine_options.EngineOptions,
  ):
    mesh = placement.mesh
    self._mesh = mesh
    self.page_size = options.tokens_per_page
    self.pages_per_row = options.pages_per_row
    self.takes_any_number = _takes_any_number(model, mesh, self.page_size)
    self.num_hosts = mesh_lib.num_hosts(mesh)
    self.shards = cache_lib.row_shards_of_host(model.config, mesh)
    self._by_slot = sharding.batch_sharding(mesh)
    self.weights: Weights | None = None
    self._base = self._base_copy = None
    self.table_ZV = distributed.from_local_rows(
      automaton.table(model.config.vocab_size), sharding.replicated(mesh)
    )
    (
      self._publisher,
      self.empty,
      self.extend,
      self.copy,
      self.decode,
      self.expert_ids,
    ) = build(model, placement, options.programs, stopped=automaton.stopped)

  def publish(
    self,
    params: functional.Params,
    version: int,
    *,
    base: functional.Params | None = None,
  ) -> None:
    """Copies the policy's weights from the training devices to the engine.

    Args:
      params: the trained weights.
      version: the number of training steps that made the weights.
      base: the frozen weights, if the trained weights are adapters. They are
        copied only if they are not the `base` of the previous call.
    """
    # The old weights are dropped first, so that the devices never hold both the
    # old and the new weights.
    self.weights = None
    self.weights = Weights(version, self.transferred(params, base=base))

  def transferred(
    self, params: functional.Params, *, base: functional.Params | None = None
  ) -> functional.Params:
    """Copies weights to the decoding devices, and returns the copy.

    The arguments have the same meaning as in `publish`.
    """
    # The base is compared by identity, because a comparison of values would
    # read all its arrays.
    if base is not self._base:
      self._base_copy = None
      self._base_copy = None if base is None else self._published(base)
      self._base = base
    params = self._published(params)
    if self._base_copy is not None:
      params = joined(self._base_copy, params)
    return params

  def _published(self, params: functional.Params) -> functional.Params:
    return pieces.cut(self._publisher(params), self._mesh)

  def put(self, *trees):
    """Puts this host's arrays on the devices, sharded as the slots are."""
    if self.num_hosts > 1:
      return distributed.from_local_rows(trees, self._by_slot)
    return jax.device_put(trees, self._by_slot)

  def get(self, tree):
    """Returns this host's rows of the arrays that `decode` returned."""
    if self.num_hosts > 1:
      return distributed.to_local_rows(tree)
    return jax.device_get(tree)


def _takes_any_number(
  model: functional.Model, mesh: jax.sharding.Mesh, page_size: int
) -> bool:
  """Returns whether one compiled program handles any number of pages.

  On a CPU the program decides for each page whether to read it, because
  branches are cheap there and compiling is slow. An attention kernel reads only
  the pages in use, whatever their number. In all other cases, each number of
  pages needs a compiled program of its own.
  """
  cpu = mesh_lib.platform(mesh) == 'cpu'
  return cpu or cached_pass.reads_live(model.config, page_size)


def joined(
  base: functional.Params, trained: functional.Params
) -> functional.Params:
  """Returns one tree with the frozen and the trained weights of each layer."""
  pairs = zip(base['layers'], trained['layers'], strict=True)
  return {**base, 'layers': tuple(lora.join(*pair) for pair in pairs)}


class Functions(NamedTuple):
  """Holds an engine's jitted functions and the publisher of its weights."""

  publisher: publish_lib.Publisher
  empty: Callable[..., Any]
  extend: Callable[..., Any]
  copy: Callable[..., Any]
  decode: Callable[..., Any]
  expert_ids: Callable[..., Any]


# The result is cached, so that a process that trains several algorithms decodes
# for all of them with the same programs.
@functools.lru_cache(maxsize=8)
def build(
  model: functional.Model,
  placement: publish_lib.Placement,
  options: engine_options.ProgramOptions,
  *,
  stopped: int,
) -> Functions:
  """Returns the jitted functions of an engine.

  Args:
    model: the policy; the mesh of the placement replaces its own mesh.
    placement: the devices that decode.
    options: the options that the programs depend on.
    stopped: the absorbing state of the stop automaton.
  """
  page_size, num_pages, sampling, num_tokens = options
  mesh = placement.mesh
  hosts = mesh_lib.num_hosts(mesh)
  model = dataclasses.replace(model, mesh=mesh)
  # A program must return the state in the layout in which it takes the state.
  # With another layout, the next call would compile the program again.
  layout = slot_state_lib.shardings(model, mesh)
  state: dict[str, Any] = {'out_shardings': layout}
  any_number = _takes_any_number(model, mesh, page_size)
  by_pages: dict[str, Any] = {
    'static_argnames': () if any_number else 'num_pages'
  }
  jit = functools.partial(compilation.jit, mesh=mesh, dtype=model.config.dtype)
  return Functions(
    # The weights are cast here once, to the dtype of the computation, because
    # every decoded token reads all weights. `jnp.copy` makes a copy even if the
    # cast changes nothing. Without it, an output could alias the weights of the
    # learner. The learner donates its weights to the next update, which would
    # overwrite the output while the engine still decodes with it.
    publisher=publish_lib.Publisher(
      placement,
      lambda part: jax.tree.map(
        jnp.copy, modules.cast(part, model.config.dtype)
      ),
      places=model.config.places,
    ),
    empty=jax.jit(
      lambda num_slots: slot_state_lib.empty(
        model, hosts * num_slots, hosts * num_pages, page_size
      ),
      static_argnums=0,
      **state,
    ),
    # The state is donated, so that new tokens are stored in the cache in place:
    # the cache is the largest array of the engine.
    extend=jit(
      functools.partial(slot_programs.extend, model=model),
      donate_argnums=1,
      **state,
      **by_pages,
    ),
    copy=jax.jit(
      functools.partial(slot_state_lib.copy_prompts, mesh=mesh),
      donate_argnums=0,
      **state,
    ),
    decode=jit(
      functools.partial(
        slot_programs.decode,
        model=model,
        stopped=stopped,
        sampling=sampling,
        num_tokens=num_tokens,
        captured=mesh_lib.platform(mesh) == 'gpu',
      ),
      donate_argnums=1,
      out_shardings=(layout, sharding.batch_sharding(mesh)),
      **by_pages,
    ),
    expert_ids=jax.jit(
      slot_state_lib.expert_ids, out_shardings=sharding.replicated(mesh)
    ),
  )
