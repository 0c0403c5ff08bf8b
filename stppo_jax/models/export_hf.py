"""Writing a policy as a Hugging Face directory."""

import json
import os
import pathlib

import numpy as np
import safetensors.numpy

from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import name_map


def export(
  directory: str | pathlib.Path,
  config: model_config.ModelConfig,
  params: functional.Params,
) -> None:
  """Writes config.json and model.safetensors (float32).

  The weights appear under their final name only when they are whole.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = {}
  for entry in name_map.entries(config):
    leaf = params
    for key in entry.path:
      leaf = leaf[key]
    array = np.asarray(leaf[entry.index] if entry.index else leaf)
    array = array.T if entry.transposed else array
    tensors[entry.hf_name] = np.ascontiguousarray(array)
  partial = directory / 'model.safetensors.partial'
  safetensors.numpy.save_file(tensors, partial, metadata={'format': 'pt'})
  os.replace(partial, directory / 'model.safetensors')
  text = json.dumps(config.to_hf(), indent=2) + '\n'
  (directory / 'config.json').write_text(text, encoding='utf-8')
