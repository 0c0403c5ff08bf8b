"""Which models a run trains: their heads, backbones and adapters."""

import jax

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import lora


def build(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  uses_values: bool,
) -> dict[str, functional.Model | None]:
  """The models 'policy' and 'value'.

  A value model has layers, or adapters, of its own. With a shared backbone it
  is None, and the policy has both heads.

  Args:
    config: of the run.
    shape: of both.
    mesh: of the run.
    uses_values: whether the row's advantages need values.

  Raises:
    ValueError: options of adapters that make no sense.
  """
  options = config.model.lora.to_dict()
  adapters = lora.Lora(**options) if options['rank'] else None
  chunk = config.updates.head_chunk
  model = lambda head: functional.Model(shape, head, mesh, adapters, chunk)
  if not uses_values:
    return {'policy': model('vocabulary'), 'value': None}
  if config.model.value_backbone == 'shared':
    return {'policy': model('both'), 'value': None}
  return {'policy': model('vocabulary'), 'value': model('scalar')}
