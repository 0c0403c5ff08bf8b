"""Every family against its torch class, in all ways to compute; needs torch.

The models are random and odd in size. Rows are computed whole, padded, packed
and from a cache: by the definition of attention, in an unrolled program and in
a loop over tiles.
"""

import functools
import importlib
import itertools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import attention
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import export
from stppo_jax.models.hf import load
from tests.models import tiny

torch = pytest.importorskip('torch', exc_type=ImportError)
pytestmark = pytest.mark.torch
make_models = importlib.import_module('tests.golden.make_models')  # needs torch

_RUNTIME = {'dtype': 'float32', 'remat': 'none', 'scan_unroll': 1}
_YARN = make_models.YARN
_MIXED = ['full_attention', 'sliding_attention', 'full_attention']
_WINDOW = {
  'use_sliding_window': True,
  'sliding_window': 90,
  'num_hidden_layers': 3,
}
_BIASES = {'attention_bias': True}
_NESTED = {
  'rope_scaling': None,
  'rope_theta': None,
  'rope_parameters': {
    'full_attention': _YARN | {'rope_theta': 300.0},
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
  },
}
# The family, whether its embedding is tied, and options.
_CASES = {
  'mistral': ('mistral', False, {'sliding_window': 90}),
  'mistral_whole': ('mistral', True, {'sliding_window': None}),
  'qwen2_late': ('qwen2', True, _WINDOW | {'max_window_layers': 1}),
  'qwen2_all': ('qwen2', False, _WINDOW | {'max_window_layers': 0}),
  'qwen3_biases': ('qwen3', False, _BIASES),
  'qwen3_mixed': ('qwen3', True, _WINDOW | {'layer_types': _MIXED}),
  'llama_biases': ('llama', False, _BIASES | {'mlp_bias': True}),
  'llama_3_2': (
    'llama',
    True,
    {'rope_scaling': make_models.LLAMA3, 'rope_theta': 5e5},
  ),
  'llama_yarn': ('llama', False, {'rope_scaling': _YARN}),
  'qwen3_mscale': (
    'qwen3',
    False,
    {
      'rope_scaling': _YARN
      | {'mscale': 0.7, 'mscale_all_dim': 0.4, 'truncate': False}
    },
  ),
  'qwen2_attention_factor': (
    'qwen2',
    True,
    {'rope_scaling': _YARN | {'attention_factor': 1.3}},
  ),
  'qwen3_moe_biases': ('qwen3_moe', False, _BIASES),
  'qwen3_moe_mixed': (
    'qwen3_moe',
    False,
    _BIASES | {'num_hidden_layers': 5, 'mlp_only_layers': [0, 3]},
  ),
  'qwen3_moe_sparse_step': (
    'qwen3_moe',
    True,
    _WINDOW | {'num_hidden_layers': 4, 'decoder_sparse_step': 2},
  ),
  'qwen3_moe_window': (
    'qwen3_moe',
    True,
    {'use_sliding_window': True, 'sliding_window': 90},
  ),
  'phi3': ('phi3', False, {}),
  'phi3_tied': (
    'phi3',
    True,
    {'sliding_window': 90, 'partial_rotary_factor': 1.0},
  ),
  'gemma3_text': ('gemma3_text', True, {'sliding_window': 90}),
  'gemma3_text_untied': (
    'gemma3_text',
    False,
    _NESTED | _BIASES | {'sliding_window': 7},
  ),
  'olmo2': ('olmo2', False, {}),
  'olmo2_tied': ('olmo2', True, _BIASES | {'rope_scaling': _YARN}),
  'olmo3': ('olmo3', False, _NESTED | {'sliding_window': 90}),
  'olmo3_tied': ('olmo3', True, {'sliding_window': 7}),
  'qwen2_linear': (
    'qwen2',
    True,
    {'rope_scaling': {'rope_type': 'linear', 'factor': 3.0}},
  ),
  'qwen3_moe_normed': (
    'qwen3_moe',
    False,
    {'norm_topk_prob': True, 'num_experts_per_tok': 3},
  ),
}
# Query heads, and those of keys. The cases take turns.
_HEADS = dict(zip(_CASES, itertools.cycle(((2, 1), (7, 1), (2, 2)))))
# By the definition, in an unrolled program of two tiles, in a loop over six.
_LENGTHS = (23, pytest.param(111, marks=pytest.mark.slow), 401)


def _make(directory, case, **options):
  """Makes a model of `transformers`, and returns ours with its weights."""
  kind, tied, more = _CASES[case]
  options = (
    {'dtype': 'float32', 'max_position_embeddings': 256} | more | options
  )
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    make_models.save(directory, kind, *_HEADS[case], tied, options)
  return _read(directory)


def _read(directory, **options):
  config = load.read_config(directory, **_RUNTIME, **options)
  load.check_weights(directory, config)
  model = functional.Model(config, 'vocabulary')
  return model, load.read_params(directory, config)


def _expected(directory, rows):
  """Returns the logits of each row, computed alone."""
  model = make_models.load(directory)
  with torch.no_grad():
    return [model(torch.tensor(row[None])).logits[0].numpy() for row in rows]


def _assert_close(ours, theirs):
  np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def _logits(model, params, tokens_BL, **rows):
  @jax.jit
  def logits(params, tokens_BL):
    hidden = model.hidden(params, tokens_BL, **rows)
    return heads.logits(hidden, model.output_VD(params))

  return logits(params, tokens_BL)


@pytest.mark.parametrize('length', _LENGTHS)
@pytest.mark.parametrize('case', _CASES)
def test_every_pass_gives_the_logits_of_transformers(case, length, tmp_path):
  model, params = _make(tmp_path, case)
  rng = np.random.default_rng(length)
  lengths = (length, length // 3)
  rows = [rng.integers(1, model.config.vocab_size, n) for n in lengths]
  expected = _expected(tmp_path, rows)
  assert np.ptp(expected[0], axis=-1).min() > 0.1

  padded_BL = np.zeros((2, length), np.int32)
  for row, ids in zip(padded_BL, rows):
    row[: len(ids)] = ids
  lengths_B = np.array(lengths, np.int32)
  padded = _logits(model, params, padded_BL, lengths_B=lengths_B)
  for logits, theirs in zip(padded, expected, strict=True):
    _assert_close(logits[: len(theirs)], theirs)

  packed_1L = np.concatenate([*rows, [0, 0]]).astype(np.int32)[None]
  ids = np.repeat([1, 2, 0], (*lengths, 2)).astype(np.int32)
  places = np.concatenate([np.arange(n) for n in (*lengths, 2)])
  segments = attention.Segments(
    jnp.array(ids[None]), jnp.array(places[None], jnp.int32), 2, length
  )
  packed = _logits(model, params, packed_1L, segments=segments)[0]
  _assert_close(packed[: sum(lengths)], np.concatenate(expected))


@pytest.mark.parametrize('case', _CASES)
def test_reading_from_a_cache_gives_the_logits_of_transformers(case, tmp_path):
  model, params = _make(tmp_path, case, sliding_window=7)
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, model.config.vocab_size, (2, 24)).astype(np.int32)
  expected = _expected(tmp_path, tokens_BL)
  # A window then begins among the recent tokens, in this page or in an earlier.
  cache = tiny.cache_of(model.config, 8, 8)
  hidden_BLD, _ = tiny.read_in_chunks(model, params, tokens_BL, cache, 6)
  _assert_close(heads.logits(hidden_BLD, model.output_VD(params)), expected)


def _long_factors(pairs):
  return {
    'rope_type': 'longrope',
    'short_factor': np.linspace(1.0, 2.0, pairs).tolist(),
    'long_factor': np.linspace(1.0, 9.0, pairs).tolist(),
  }


_LONG = {
  'llama': {'rope_scaling': make_models.LLAMA3},
  'qwen3': {'rope_scaling': _YARN | {'original_max_position_embeddings': 512}},
  'qwen2': {'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}},
  'mistral': {
    'rope_scaling': {'rope_type': 'linear', 'factor': 4.0},
    'sliding_window': 3000,
  },
  'phi3': {
    'rope_scaling': _long_factors(7),
    'original_max_position_embeddings': 1024,
    'max_position_embeddings': 8192,
  },
  'gemma3_text': {
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
    'sliding_window': 512,
  },
  'olmo2': {'rope_scaling': _YARN},
  'olmo3': _NESTED | {'sliding_window': 1000},
  'qwen3_moe': {'rope_scaling': _YARN, 'mlp_only_layers': [0]},
}


def _make_long(directory, kind, length):
  """Makes a model, and returns ours, its weights, a row, and its logits."""
  sizes = {'max_position_embeddings': 2048, 'rope_theta': 10000.0}
  options = {'dtype': 'float32'} | sizes | _LONG[kind]
  make_models.save(directory, kind, 2, 1, False, options)
  model, params = _read(directory, longest=length)
  rng = np.random.default_rng(0)
  tokens_BL = rng.integers(0, model.config.vocab_size, (1, length))
  (expected,) = _expected(directory, tokens_BL)
  return model, params, tokens_BL.astype(np.int32), expected


@pytest.mark.parametrize(
  ('kind', 'length'),
  [
    *((kind, 4200) for kind in _LONG),
    ('phi3', 900),  # the other factors
  ],
)
def test_logits_beyond_4096_positions(kind, length, tmp_path):
  model, params, tokens_BL, expected = _make_long(tmp_path, kind, length)
  _assert_close(_logits(model, params, tokens_BL)[0], expected)


@pytest.mark.parametrize(
  'kind',
  [
    # Windows in some layers, and scaled positions in the others.
    pytest.param(kind, marks=() if kind == 'olmo3' else pytest.mark.slow)
    for kind in _LONG
  ],
)
def test_reading_from_a_cache_beyond_4096_positions(kind, tmp_path):
  length = 4200
  model, params, tokens_BL, expected = _make_long(tmp_path, kind, length)
  cache = tiny.cache_of(model.config, -(-length // 512), 512)
  hidden_BLD, _ = tiny.read_in_chunks(model, params, tokens_BL, cache, 600)
  logits_BLV = heads.logits(hidden_BLD, model.output_VD(params))
  _assert_close(logits_BLV[0], expected)


@pytest.mark.parametrize('case', _CASES)
def test_transformers_reads_an_export(case, tmp_path, caplog):
  model, params = _make(tmp_path / 'theirs', case)
  # Without a source, so that the config is written from the shape.
  export.export(tmp_path / 'ours', model.config, params)
  read = functools.partial(
    make_models.transformers.AutoModelForCausalLM.from_pretrained,
    output_loading_info=True,
  )
  with caplog.at_level(logging.WARNING):
    theirs, info = read(tmp_path / 'ours')
  assert type(theirs).config_class.model_type == _CASES[case][0]
  wrong = 'missing_keys', 'unexpected_keys', 'mismatched_keys'
  assert not any(info[name] for name in wrong), info
  ids = np.arange(120) % model.config.vocab_size
  before, after = (
    _expected(tmp_path / name, ids[None])[0] for name in ('theirs', 'ours')
  )
  np.testing.assert_allclose(after, before, atol=1e-5, rtol=1e-5)
  again, _ = _read(tmp_path / 'ours')
  assert again.config == model.config
  assert again.config.family == model.config.family
