"""Models small enough to compile in a second, with weights that matter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import cached_pass
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models.hf import families

# Fields of a config with a mixture of experts, as in Qwen3-MoE.
MIXTURE = dict(
  qkv_bias=False,
  qk_norm=True,
  num_experts=6,
  num_experts_per_tok=2,
  moe_intermediate_size=8,
)
# Its first and its last layer have experts, and the one between them has none.
MIXED = MIXTURE | dict(num_layers=3, dense_layers=(1,))


def of_family(kind: str, window: int = 4) -> dict[str, Any]:
  """Returns fields of a config with two layers of a family.

  Args:
    kind: a key of `FAMILIES`.
    window: the window of the first layer, if the family has windows, and of
      the second one if it cannot differ.
  """
  family = families.FAMILIES[kind]
  fields = {'qkv_bias': False, **family.blocks, 'family': kind}
  fields |= MIXTURE if family.experts else {}
  if family.windows is not None:
    fields['windows'] = (window, 0 if family.windows.typed else window)
  if family.local_rope:
    fields['local_rope_theta'] = 30.0
  numbers = {'partial_rotary_factor': 0.5, 'query_pre_attn_scalar': 24.0}
  fields |= {n: x for n, x in numbers.items() if n in family.options}
  return fields


def model(head: str = 'vocabulary', **changes) -> functional.Model:
  """Returns a model of width 16, 2 layers and 2 heads.

  Args:
    head: see `functional.Model`.
    **changes: fields of the config with other values.
  """
  shape = dict(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=100.0,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=False,
  )
  config = model_config.ModelConfig(**(shape | changes))
  return functional.Model(config, head)


@functools.cache
def _shapes(model):
  return jax.eval_shape(model.init, jax.random.key(0))


@functools.cache
def _adapter_shapes(model):
  return jax.eval_shape(model.init_adapters, jax.random.key(0))


def params(model: functional.Model, seed: int = 0, scale: float = 0.4):
  """Returns normal weights, also of biases and heads, without compiling."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: (scale * rng.standard_normal(s.shape)).astype(np.float32),
    _shapes(model),
  )


def adapters(model: functional.Model, scale: float = 0.3):
  """Returns normal adapters, also those that are zero at first."""
  rng = np.random.default_rng(5)
  return jax.tree.map(
    lambda s: (scale * rng.standard_normal(s.shape)).astype(np.float32),
    _adapter_shapes(model),
  )


def cache_of(config, pages: int, size: int, content: float = 0):
  """Returns a cache with the same number everywhere, without compiling."""
  return jax.tree.map(
    lambda s: np.full(s.shape, content, s.dtype),
    jax.eval_shape(lambda: cache_lib.empty(config, pages, size)),
  )


@functools.partial(jax.jit, static_argnums=0)
def read_on(
  model: functional.Model,
  params,
  tokens_BC,
  cache: cache_lib.Cache,
  lengths_B,
  counts_B,
  *,
  num_pages: int | None = None,
):
  """Returns hidden states of further tokens, and the cache with these tokens.

  `num_pages` is how many pages of each row are looked at; None: all.
  """
  B, C = tokens_BC.shape
  table_BN = jnp.asarray(table(cache, B))
  hidden_BCD, recent = model.extend(
    split_layers(model, params),
    tokens_BC,
    cached=cached_pass.read(
      model.config,
      cache,
      table_BN,
      lengths_B,
      count=table_BN.shape[1] if num_pages is None else num_pages,
      once=True,
      mesh=None,
    ),
    lengths_B=lengths_B,
    recent=cache_lib.nothing_recent(model.config, B, C),
    first=0,
  )
  stored = cache_lib.store(cache, recent, table_BN, lengths_B, counts_B)
  return hidden_BCD, stored


def read_in_chunks(model, params, tokens_BL, cache, size):
  """Returns hidden states of tokens that are read on from an empty cache.

  Also returns the cache with all of them.
  """
  B, L = tokens_BL.shape
  found = []
  for start in range(0, L, size):
    count = min(size, L - start)
    tokens_BC = np.zeros((B, size), np.int32)
    tokens_BC[:, :count] = tokens_BL[:, start : start + count]
    lengths_B, counts_B = (np.full(B, n, np.int32) for n in (start, count))
    hidden_BCD, cache = read_on(
      model, params, tokens_BC, cache, lengths_B, counts_B
    )
    found.append(np.asarray(hidden_BCD)[:, :count])
  return np.concatenate(found, axis=1), cache


def split_layers(model: functional.Model, params):
  """Returns the same weights with a tree for each layer."""
  layers = (
    jax.tree.map(lambda x: x[n], params[name])
    for name, n in model.config.places
  )
  whole = {n: x for n, x in params.items() if n not in model.config.stacks}
  return {**whole, 'layers': tuple(layers)}


def table(cache: cache_lib.Cache, rows: int) -> np.ndarray:
  """Returns pages of rows that share all pages of a cache [rows, N].

  No two pages of a row are neighbours.
  """
  numbers = np.arange(cache[0][0].shape[0], dtype=np.int32)
  return numbers.reshape(-1, rows).T


@functools.cache
def hidden(model: functional.Model):
  """Returns `model.hidden`, compiled once per model and shape."""
  return jax.jit(model.hidden)
