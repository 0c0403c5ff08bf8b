"""Where a policy's weights come from, laid out on the devices of a run."""

import jax

from stppo_jax.models import functional
from stppo_jax.models import load_hf
from stppo_jax.parallel import sharding
from stppo_jax.training import keys


def initial(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> functional.Params:
  """A policy's weights: those of a directory, or random ones where path is ''.

  No host and no device ever holds more of them than its part.

  Raises:
    ValueError: files that do not fit the model.
  """
  key = keys.step_key(config.seed, 0, keys.Purpose.INIT)
  layout = sharding.param_shardings(jax.eval_shape(policy.init, key), mesh)
  if path:
    return load_hf.load_params(path, policy.config, layout)
  return jax.jit(policy.init, out_shardings=layout)(key)
