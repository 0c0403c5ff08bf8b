"""The compiled programs of a learner.

Learners of the same models, optimisers and sizes share them, so that each
program is traced and compiled once in a process.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.learner import annotate as annotate_lib
from stppo_jax.learner import cpu_parallel
from stppo_jax.learner import forward
from stppo_jax.learner import loss as loss_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import token_details
from stppo_jax.learner import update as update_lib
from stppo_jax.models import functional
from stppo_jax.parallel import compilation
from stppo_jax.parallel import sharding


class Programs(NamedTuple):
  """Jitted functions, and the layout of the state that they work on.

  Attributes:
    layout: the shardings of the state.
    init: makes the state of weights, which it donates, and a random key.
    copy: copies the policy's trained weights.
    merge: returns the policy's weights of its base and its adapters.
    token_outputs: see `forward.token_outputs`.
    annotate: see `annotate.annotate`.
    update: see `update.update_rows`; it donates the state.
    update_minibatch: `update`, or the same on several cores of a CPU.
    token_details: see `token_details.measure_tokens`; all hosts get all rows.
  """

  layout: state_lib.TrainState
  init: Callable[..., Any]
  copy: Callable[..., Any]
  merge: Callable[..., Any]
  token_outputs: Callable[..., Any]
  annotate: Callable[..., Any]
  update: Any
  update_minibatch: Callable[..., Any]
  token_details: Callable[..., Any]


# A process that trains several algorithms needs few: most of them differ in
# numbers only.
@functools.lru_cache(maxsize=8)
def build(
  spec: loss_lib.UpdateSpec,
  mesh: jax.sharding.Mesh,
  *,
  microbatch_size: int,
  routing_replay: str,
  uses_cores: bool,
  core_unit: int,
) -> Programs:
  """Returns the programs for these static values.

  Args:
    spec: the models, their optimisers and the sizes of an update.
    mesh: the mesh of training.
    microbatch_size: rows that are annotated at once.
    routing_replay: see `annotate.annotate`.
    uses_cores: whether the cores of a CPU share the microbatches.
    core_unit: see `cpu_parallel.Updater`, to which it is the unit.

  Raises:
    ValueError: the targets of the adapters match no layer.
  """
  models = model_roles.Models(spec.policy, spec.value)
  init = init_state(spec)
  key = jax.random.key(0)
  weights = spec.policy.plain_policy.abstract_params
  layout = sharding.param_shardings(jax.eval_shape(init, weights, key), mesh)
  jit = functools.partial(
    compilation.jit, mesh=mesh, dtype=spec.policy.config.dtype
  )
  # The layout is pinned. The compiler might lay out an updated state other
  # than a new or restored one, and then the update would compile twice.
  updated = dataclasses.replace(layout, frozen=None)
  update = jit(
    functools.partial(
      update_lib.update_rows,
      mesh=mesh,
      spec=spec,
    ),
    donate_argnums=0,
    out_shardings=(updated, None),
  )
  update_minibatch = update
  num_workers = cpu_parallel.num_workers(spec.num_microbatches)
  # One core gains only if it saves padding.
  gains = num_workers > 1 or core_unit > 0
  if uses_cores and spec.num_microbatches > 1 and gains:
    update_minibatch = cpu_parallel.Updater(
      spec, num_workers=num_workers, unit=core_unit, out_shardings=updated
    ).update
  return Programs(
    layout=layout,
    # Donated, so that no second copy of the weights is made.
    init=jit(init, donate_argnums=0, out_shardings=layout),
    copy=jit(
      lambda params: jax.tree.map(jnp.copy, params),
      out_shardings=layout.policy.params,
    ),
    merge=jit(
      functools.partial(merge_adapters, spec.policy),
      out_shardings=sharding.param_shardings(weights, mesh),
    ),
    token_outputs=jit(
      functools.partial(
        forward.token_outputs, models=models, temperature=spec.temperature
      )
    ),
    annotate=jit(
      functools.partial(
        annotate_lib.annotate,
        models=models,
        temperature=spec.temperature,
        num_turns=spec.num_turns,
        microbatch_size=microbatch_size,
        routing_replay=routing_replay,
      )
    ),
    update=update,
    update_minibatch=update_minibatch,
    token_details=jit(
      functools.partial(
        token_details.measure_tokens,
        models=models,
        mesh=mesh,
        temperature=spec.temperature,
        num_turns=spec.num_turns,
        microbatch_size=microbatch_size,
      ),
      out_shardings=sharding.replicated(mesh),
    ),
  )


def init_state(spec: loss_lib.UpdateSpec) -> Callable[..., Any]:
  """Returns `state.init` of the models, a function of weights and a key."""
  return functools.partial(
    state_lib.init,
    policy=spec.policy,
    value=spec.value,
    policy_optimizer=spec.policy_optimizer,
    value_optimizer=spec.value_optimizer,
  )


def merge_adapters(
  policy: functional.Model,
  frozen: functional.Params | None,
  params: functional.Params,
) -> functional.Params:
  """Returns weights of `policy.plain_policy`; without adapters, no copies."""
  return policy.merge_adapters(state_lib.join_frozen(policy, frozen, params))
