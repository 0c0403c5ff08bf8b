"""The encoder of dense search: BERT with mean pooling and normalised vectors.

The encoder is read from a Hugging Face directory of a sentence encoder with the
architecture of BERT (arXiv 1810.04805), such as E5 and MiniLM. The directory
has config.json, model.safetensors, and tokenizer.json or vocab.txt.

Shape letters: B texts, L tokens, D width, N heads, H head size.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import os
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from stppo_jax import text as text_lib
from stppo_jax.models.hf import weight_files

Array = jax.Array

_MAX_LENGTH = 512  # the most tokens of a text; BERT has no more positions
_LENGTH_BUCKET = 32  # texts are padded to a multiple of so many tokens
_BATCH = 64  # the number of texts that are encoded at once
_NORM_EPS = 1e-12  # a mean state with a smaller norm is divided by this number


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
  """The sizes of an encoder, named as in config.json."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  intermediate_size: int
  max_position_embeddings: int
  type_vocab_size: int
  layer_norm_eps: float


class EncoderLayer(nnx.Module):
  """Attention and an MLP, each followed by a residual connection and a norm."""

  def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
    size, wide = config.hidden_size, config.intermediate_size
    self.num_heads = config.num_attention_heads
    self.query = nnx.Linear(size, size, rngs=rngs)
    self.key = nnx.Linear(size, size, rngs=rngs)
    self.value = nnx.Linear(size, size, rngs=rngs)
    self.output = nnx.Linear(size, size, rngs=rngs)
    self.up = nnx.Linear(size, wide, rngs=rngs)
    self.down = nnx.Linear(wide, size, rngs=rngs)
    eps = config.layer_norm_eps
    self.attention_norm = nnx.LayerNorm(size, epsilon=eps, rngs=rngs)
    self.norm = nnx.LayerNorm(size, epsilon=eps, rngs=rngs)

  def __call__(self, x_BLD: Array, mask_BL: Array) -> Array:
    heads = lambda y_BLD: y_BLD.reshape(*y_BLD.shape[:2], self.num_heads, -1)
    attended_BLNH = jax.nn.dot_product_attention(
      heads(self.query(x_BLD)),
      heads(self.key(x_BLD)),
      heads(self.value(x_BLD)),
      mask=mask_BL[:, None, None, :],
    )
    x_BLD = self.attention_norm(
      x_BLD + self.output(attended_BLNH.reshape(x_BLD.shape))
    )
    # BERT uses the exact GELU; jax's default approximates it by tanh.
    hidden = jax.nn.gelu(self.up(x_BLD), approximate=False)
    return self.norm(x_BLD + self.down(hidden))


class Encoder(nnx.Module):
  """Maps the token ids of each text to a vector of norm 1."""

  def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
    size = config.hidden_size
    self.words = nnx.Embed(config.vocab_size, size, rngs=rngs)
    self.positions = nnx.Embed(config.max_position_embeddings, size, rngs=rngs)
    self.segments = nnx.Embed(config.type_vocab_size, size, rngs=rngs)
    self.norm = nnx.LayerNorm(size, epsilon=config.layer_norm_eps, rngs=rngs)
    self.layers = nnx.List(
      EncoderLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)
    )

  def __call__(self, token_ids_BL: Array, mask_BL: Array) -> Array:
    """Returns the normalised mean of the tokens' hidden states, [B, D].

    Args:
      token_ids_BL: token ids, right-padded.
      mask_BL: True at the tokens, False at the padding.
    """
    positions_1L = jnp.arange(token_ids_BL.shape[1])[None]
    x_BLD = self.norm(
      self.words(token_ids_BL)
      + self.positions(positions_1L)
      + self.segments(jnp.zeros_like(positions_1L))  # all in segment 0
    )
    for layer in self.layers:
      x_BLD = layer(x_BLD, mask_BL)
    sums_BD = jnp.sum(jnp.where(mask_BL[..., None], x_BLD, 0.0), axis=1)
    mean_BD = sums_BD / jnp.maximum(jnp.sum(mask_BL, axis=1), 1)[:, None]
    norm_B1 = jnp.linalg.norm(mean_BD, axis=1, keepdims=True)
    return mean_BD / jnp.maximum(norm_B1, _NORM_EPS)


class TextEncoder:
  """An encoder with its tokenizer.

  Attributes:
    size: the width D of the vectors.
    sha256: the checksum of the weights, which an index stores to identify its
      encoder.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Reads a Hugging Face directory.

    Raises:
      ValueError: if a file is missing, damaged, or from another kind of model;
        the message is one line.
    """
    directory = pathlib.Path(directory)
    config = read_config(directory)
    self.size = config.hidden_size
    self.sha256 = _checksum(directory)
    self._tokenizer = _read_tokenizer(
      directory, min(config.max_position_embeddings, _MAX_LENGTH)
    )
    graph, self._params = nnx.split(read_encoder(directory, config))
    self._encode = jax.jit(
      lambda params, ids_BL, mask_BL: nnx.merge(graph, params)(ids_BL, mask_BL)
    )

  def encode(self, texts: Sequence[str]) -> np.ndarray:
    """Returns the vectors of texts, [B, D] in float32."""
    # `whole` replaces halves of surrogate pairs. JSON can contain them, and the
    # tokenizer fails on them.
    encodings = self._tokenizer.encode_batch([text_lib.whole(t) for t in texts])
    ids = [encoding.ids for encoding in encodings]
    vectors_BD = np.empty((len(ids), self.size), np.float32)
    # Texts of similar length share a batch, so that there is little padding.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for begin in range(0, len(order), _BATCH):
      rows = order[begin : begin + _BATCH]
      longest = max(len(ids[i]) for i in rows)
      # Shapes are rounded up, so that few programs are compiled.
      height = 1 << (len(rows) - 1).bit_length()
      length = -(-longest // _LENGTH_BUCKET) * _LENGTH_BUCKET
      ids_BL = np.zeros((height, length), np.int32)
      mask_BL = np.zeros((height, length), bool)
      for row, i in enumerate(rows):
        ids_BL[row, : len(ids[i])] = ids[i]
        mask_BL[row, : len(ids[i])] = True
      vectors = self._encode(self._params, ids_BL, mask_BL)
      vectors_BD[rows] = np.asarray(vectors)[: len(rows)]
    return vectors_BD


def read_config(directory: pathlib.Path) -> EncoderConfig:
  """Returns the sizes in config.json; raises ValueError with one line."""
  path = directory / 'config.json'
  if not path.is_file():
    raise ValueError(f'{directory}: no encoder: config.json is missing')
  fields = weight_files.read_json(path)
  for name, expected in (
    ('model_type', 'bert'),
    ('hidden_act', 'gelu'),
    ('position_embedding_type', 'absolute'),
  ):
    if name in fields and fields[name] != expected:
      raise ValueError(
        f'{path}: {name}={fields[name]!r}: only {expected!r} is supported'
      )
  # This file of sentence-transformers says how hidden states are pooled. If it
  # is missing, the mean is assumed, which E5 and MiniLM use.
  pooling = directory / '1_Pooling' / 'config.json'
  if pooling.is_file():
    modes = weight_files.read_json(pooling)
    if not modes.get('pooling_mode_mean_tokens', True):
      raise ValueError(f'{pooling}: only the mean over tokens is supported')
  try:
    sizes = {
      field.name: fields[field.name]
      for field in dataclasses.fields(EncoderConfig)
    }
  except KeyError as error:
    raise ValueError(f'{path}: {error.args[0]} is missing') from None
  if not all(
    isinstance(size, int | float) and size > 0 for size in sizes.values()
  ):
    raise ValueError(f'{path}: sizes must be numbers greater than 0')
  if sizes['hidden_size'] % sizes['num_attention_heads']:
    raise ValueError(
      f'{path}: hidden_size={sizes["hidden_size"]} must be a multiple of '
      f'num_attention_heads={sizes["num_attention_heads"]}'
    )
  return EncoderConfig(**sizes)


def read_encoder(directory: pathlib.Path, config: EncoderConfig) -> Encoder:
  """Returns the encoder with the weights of a directory, in float32.

  Raises:
    ValueError: if a tensor is missing or has another shape; the message is one
      line.
  """
  tensors = weight_files.read_headers(directory)
  # In some files, the encoder is a part of a larger model, and the names of its
  # tensors begin with `bert.`.
  prefix = 'bert.' if any(name.startswith('bert.') for name in tensors) else ''
  # Only shapes are made, because the weights are read from the file.
  graph, state = nnx.split(
    nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))
  )

  def read(path: tuple, leaf: Any) -> Array:
    name, transposed = _name(path)
    name = prefix + name
    if name not in tensors:
      raise ValueError(f'{directory}: the tensor {name} is missing')
    values = tensors[name].read()
    values = values.T if transposed else values
    if values.shape != leaf.shape:
      raise ValueError(
        f'{directory}: {name} has shape {list(values.shape)}, expected '
        f'{list(leaf.shape)}'
      )
    return jnp.asarray(np.asarray(values, np.float32))

  flat = nnx.to_flat_state(state)
  read_state = nnx.from_flat_state(
    [(path, leaf.replace(read(path, leaf.get_value()))) for path, leaf in flat]
  )
  return nnx.merge(graph, read_state)


_NAMES: Mapping[str, str] = {
  'words': 'embeddings.word_embeddings',
  'positions': 'embeddings.position_embeddings',
  'segments': 'embeddings.token_type_embeddings',
  'norm': 'embeddings.LayerNorm',
}
_LAYER_NAMES: Mapping[str, str] = {
  'query': 'attention.self.query',
  'key': 'attention.self.key',
  'value': 'attention.self.value',
  'output': 'attention.output.dense',
  'attention_norm': 'attention.output.LayerNorm',
  'up': 'intermediate.dense',
  'down': 'output.dense',
  'norm': 'output.LayerNorm',
}


def _name(path: tuple) -> tuple[str, bool]:
  """Returns the name of a leaf's tensor, and whether it must be transposed."""
  *place, leaf = path
  suffix = 'bias' if leaf == 'bias' else 'weight'
  if place[0] == 'layers':
    name = f'encoder.layer.{place[1]}.{_LAYER_NAMES[place[2]]}'
  else:
    name = _NAMES[place[0]]
  # PyTorch stores a linear layer as [out, in], and flax as [in, out].
  return f'{name}.{suffix}', leaf == 'kernel'


def _checksum(directory: pathlib.Path) -> str:
  digest = hashlib.sha256()
  for file in sorted(directory.glob('*.safetensors')):
    with open(file, 'rb') as opened:
      digest.update(hashlib.file_digest(opened, 'sha256').digest())
  return digest.hexdigest()


def _read_tokenizer(
  directory: pathlib.Path, max_length: int
) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a directory; raises ValueError with one line."""
  path = directory / 'tokenizer.json'
  try:
    if path.is_file():
      tokenizer = tokenizers.Tokenizer.from_file(str(path))
    else:
      path = directory / 'vocab.txt'
      if not path.is_file():
        raise ValueError('no tokenizer.json and no vocab.txt')
      tokenizer = tokenizers.BertWordPieceTokenizer(
        str(path), lowercase=_is_lower_case(directory)
      )
  except Exception as error:  # The library raises nothing more specific.
    raise ValueError(f'{path}: no tokenizer: {error}') from error
  tokenizer.no_padding()
  tokenizer.enable_truncation(max_length)
  return tokenizer


def _is_lower_case(directory: pathlib.Path) -> bool:
  path = directory / 'tokenizer_config.json'
  if not path.is_file():
    return True
  fields = weight_files.read_json(path)
  # True is the default of BERT's own tokenizer.
  return bool(fields.get('do_lower_case', True))
