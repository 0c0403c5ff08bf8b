"""Encoders with random weights, as Hugging Face directories."""

import json
import pathlib

import numpy as np
from safetensors import numpy as safetensors

_WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
_WORDS += [chr(ord('a') + n) for n in range(26)]
_WORDS += [f'##{chr(ord("a") + n)}' for n in range(26)]
_WORDS += ['query', 'passage', ':', 'capital', 'of', 'the', 'paris', 'france']


def config(hidden_size=32, num_layers=2, num_heads=4, **changes):
  """Returns the fields of config.json."""
  return {
    'model_type': 'bert',
    'hidden_act': 'gelu',
    'vocab_size': len(_WORDS),
    'hidden_size': hidden_size,
    'num_hidden_layers': num_layers,
    'num_attention_heads': num_heads,
    'intermediate_size': 4 * hidden_size,
    'max_position_embeddings': 64,
    'type_vocab_size': 2,
    'layer_norm_eps': 1e-12,
  } | changes


def write(folder, fields=None, *, prefix='', seed=0):
  """Writes an encoder to a folder; returns the folder."""
  fields = fields or config()
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(fields))
  (folder / 'vocab.txt').write_text('\n'.join(_WORDS) + '\n')
  rng = np.random.default_rng(seed)
  tensors = {
    prefix + name: (
      0.2 * rng.standard_normal(shape) + name.endswith('LayerNorm.weight')
    ).astype(np.float32)
    for name, shape in _shapes(fields).items()
  }
  safetensors.save_file(tensors, folder / 'model.safetensors')
  return folder


def _shapes(fields):
  size, wide = fields['hidden_size'], fields['intermediate_size']
  shapes = {}
  for name, rows in (
    ('word', fields['vocab_size']),
    ('position', fields['max_position_embeddings']),
    ('token_type', fields['type_vocab_size']),
  ):
    shapes[f'embeddings.{name}_embeddings.weight'] = (rows, size)
  norms = ['embeddings.LayerNorm']
  products = {}
  for n in range(fields['num_hidden_layers']):
    layer = f'encoder.layer.{n}.'
    for name in ('self.query', 'self.key', 'self.value', 'output.dense'):
      products[f'{layer}attention.{name}'] = (size, size)
    products[f'{layer}intermediate.dense'] = (wide, size)
    products[f'{layer}output.dense'] = (size, wide)
    norms += [f'{layer}attention.output.LayerNorm', f'{layer}output.LayerNorm']
  for name, shape in products.items():
    shapes[f'{name}.weight'], shapes[f'{name}.bias'] = shape, shape[:1]
  for name in norms:
    shapes[f'{name}.weight'] = shapes[f'{name}.bias'] = (size,)
  return shapes
