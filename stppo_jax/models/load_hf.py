"""Reading a policy from a Hugging Face directory."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import name_map


def read_config(
  directory: str | pathlib.Path, *, dtype: str, remat: str, scan_unroll: int
) -> model_config.ModelConfig:
  """The shape in `config.json`.

  Raises:
    ValueError: no such file, or an unsupported architecture.
  """
  path = pathlib.Path(directory) / 'config.json'
  if not path.is_file():
    raise ValueError(f'no config.json in {directory}')
  return model_config.ModelConfig.from_hf(
    json.loads(path.read_text(encoding='utf-8')),
    dtype=dtype,
    remat=remat,
    scan_unroll=scan_unroll,
  )


def weights_file(directory: str | pathlib.Path) -> pathlib.Path:
  """Where the weights are.

  Raises:
    ValueError: nowhere.
  """
  path = pathlib.Path(directory) / 'model.safetensors'
  if not path.is_file():
    raise ValueError(f'no model.safetensors in {directory}')
  return path


def read_params(
  directory: str | pathlib.Path, config: model_config.ModelConfig
) -> functional.Params:
  """The weights of a policy as numpy arrays, float32.

  Raises:
    ValueError: no weights, a missing, extra or mis-shaped tensor.
  """
  path = weights_file(directory)
  model = functional.Model(config, 'vocabulary')
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  params = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), shapes)
  wanted = name_map.entries(config)
  with safetensors.safe_open(path, framework='numpy') as tensors:
    found = set(tensors.keys())
    names = {entry.hf_name for entry in wanted}
    for kind, differing in (
      ('missing', names - found),
      ('unexpected', found - names),
    ):
      if differing:
        raise ValueError(f'{path}: {kind} tensors {sorted(differing)}')
    for entry in wanted:
      _fill(params, entry, tensors.get_tensor(entry.hf_name), path)
  return params


def _fill(params: Any, entry: name_map.Entry, tensor: np.ndarray, path) -> None:
  for key in entry.path[:-1]:
    params = params[key]
  leaf = params[entry.path[-1]]
  target = leaf[entry.index]
  tensor = tensor.T if entry.transposed else tensor
  if tensor.shape != target.shape:
    raise ValueError(
      f'{path}: {entry.hf_name} gives shape {tensor.shape}, '
      f'expected {target.shape}'
    )
  target[...] = tensor
