"""The models' files: whether they fit the run, and their weights on devices."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax

from stppo_jax.models import config as model_config
from stppo_jax.models import export_hf
from stppo_jax.models import functional
from stppo_jax.models import load_hf
from stppo_jax.models import precision
from stppo_jax.parallel import sharding
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import keys

TRAINED = 'float32'  # what weights are trained in, whatever computes with them


def computed_as(config) -> dict[str, Any]:
  """How the models of a run are computed, whatever their shape."""
  return {
    'dtype': config.model.dtype,
    'remat': config.updates.remat,
    'scan_unroll': config.model.scan_unroll,
  }


def load_tokenizer(home: str | pathlib.Path) -> tokenizer_lib.Tokenizer:
  """The tokenizer of a directory.

  Raises:
    ValueError: it is none; one line that names the directory.
  """
  try:
    return tokenizer_lib.Tokenizer.load(home)
  except Exception as error:  # a damaged file gives any kind of them
    if str(home) in str(error):
      raise
    told = f'{type(error).__name__}: {" ".join(str(error).split())}'
    raise ValueError(
      f'{home}: its tokenizer cannot be read ({told})'
    ) from error


def shape(
  config, tokenizer: tokenizer_lib.Tokenizer | None
) -> model_config.ModelConfig:
  """The shape of a run's models, from the directory or from the config.

  Args:
    config: of the run.
    tokenizer: its size is the vocabulary where there is no directory.

  Raises:
    ValueError: no model of ours.
  """
  model, runtime = config.model, computed_as(config)
  if model.path:
    return load_hf.read_config(model.path, **runtime)
  sizes = {
    field.name: model[field.name]
    for field in dataclasses.fields(model_config.ModelConfig)
    if field.name in model and field.name not in runtime
  }
  return model_config.ModelConfig(
    vocab_size=tokenizer.vocab_size, **sizes, **runtime
  )


def check(config, tokenizer: tokenizer_lib.Tokenizer) -> None:
  """Whether the models' files are whole and fit each other.

  Reads no weight and touches no device.

  Raises:
    ValueError: they do not; one line.
  """
  model, policy = config.model, shape(config, tokenizer)
  if model.path:
    load_hf.check_weights(model.path, policy)
    if tokenizer.vocab_size > policy.vocab_size:
      home = model.tokenizer_path or model.path
      raise ValueError(
        f'{home}: the tokenizer has {tokenizer.vocab_size} tokens, the '
        f'embedding in {model.path} only {policy.vocab_size} rows'
      )
  if model.reference_path:
    _check_reference(config, policy)


def _check_reference(config, policy: model_config.ModelConfig) -> None:
  """Raises ValueError where the reference is not of the policy's shape."""
  model, path = config.model, config.model.reference_path
  reference = load_hf.read_config(path, **computed_as(config))
  ours, theirs = dataclasses.asdict(policy), dataclasses.asdict(reference)
  for name in model_config.compared(policy):
    if ours[name] != theirs[name]:
      whose = f'in {model.path}' if model.path else 'of this config'
      raise ValueError(
        f'{path}: {name}={theirs[name]}, but the policy {whose} has '
        f'{ours[name]}'
      )
  load_hf.check_weights(path, reference)


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


def frozen(
  config, path: str, policy: functional.Model, mesh: jax.sharding.Mesh
) -> functional.Params:
  """`initial`, for weights that nobody trains: the base, and the reference.

  In the dtype that they are computed in. What is merged with such a base and
  exported is what was trained, not the base of the files: where these hold more
  bits than `model.dtype`, those are gone.
  """
  params = initial(config, path, policy, mesh)
  return precision.replaced(params, policy.config.dtype)


def export(
  config,
  directory: str | pathlib.Path,
  model: functional.Model,
  params: functional.Params,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  dtype: str,
) -> None:
  """Writes a policy of a run as a directory that `transformers` loads.

  Files that the model came with are copied as they are. Where they have gone
  since the run began, what the run knows of them is written anew.

  Raises:
    OSError, ValueError: see `export_hf.export`.
  """
  source = pathlib.Path(config.model.path)
  home = pathlib.Path(config.model.tokenizer_path or config.model.path)
  save = tokenizer.save
  if home.name and (home / 'tokenizer.json').is_file():
    save = functools.partial(export_hf.copy_tokenizer, home)
  known = config.model.path and (source / 'config.json').is_file()
  export_hf.export(
    directory,
    model.config,
    params,
    dtype=dtype,
    source=source if known else '',
    save_tokenizer=save,
  )
