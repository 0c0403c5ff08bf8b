"""Against torch models of `transformers`, made here; needs torch.

Every architecture, tied and untied, with one, two and seven query heads to a
key head: one ratio each, the others are slow. Qwen2 has biases, the others have
none.
"""

import importlib
import itertools

import jax
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models.hf import export
from stppo_jax.models.hf import load
from tests.models import tiny

torch = pytest.importorskip('torch', exc_type=ImportError)
pytestmark = pytest.mark.torch
make_models = importlib.import_module('tests.golden.make_models')  # needs torch

_RUNTIME = {'dtype': 'float32', 'remat': 'none', 'scan_unroll': 1}
_SHAPE = (2, 11)
_HEADS = {1: (2, 2), 2: (2, 1), 7: (7, 1)}
_KINDS = tuple(itertools.product(make_models.KINDS, (True, False)))
_QUICK = dict(zip(_KINDS, itertools.cycle(_HEADS)))
_CASES = [
  pytest.param(
    *kind,
    ratio,
    {},
    marks=() if ratio == _QUICK[kind] else pytest.mark.slow,
  )
  for kind in _KINDS
  for ratio in _HEADS
] + [
  ('llama', False, 2, {'rope_scaling': make_models.LLAMA3}),
  ('qwen2', True, 7, {'rope_scaling': {'rope_type': 'linear', 'factor': 3.0}}),
  ('qwen3_moe', False, 1, {'norm_topk_prob': True, 'num_experts_per_tok': 3}),
]


def _make(directory, kind, tied, ratio, options):
  """Makes a model of `transformers` and returns its numbers and ours."""
  options = {'dtype': 'float32'} | options
  make_models.save(directory, kind, *_HEADS[ratio], tied, options)
  config = load.read_config(directory, **_RUNTIME)
  assert config.num_heads == ratio * config.num_kv_heads
  assert config.tie_embeddings is tied
  params = load.read_params(directory, config)
  numbers = make_models.numbers(directory, _SHAPE)
  return functional.Model(config, 'vocabulary'), params, numbers


@pytest.mark.parametrize(('kind', 'tied', 'ratio', 'options'), _CASES)
def test_numbers_equal_those_of_transformers(
  kind, tied, ratio, options, tmp_path
):
  model, params, golden = _make(tmp_path, kind, tied, ratio, options)
  tokens_BL = golden['tokens_BL'].astype(np.int32)

  @jax.jit
  def ours(params):
    hidden_BLD, routing = model.hidden_and_routing(params, tokens_BL)
    output_VD = model.output_VD(params)
    logprobs_BL, _ = heads.token_logprobs_and_entropy(
      hidden_BLD, output_VD, tokens_BL, temperature=1.0
    )
    return heads.logits(hidden_BLD, output_VD), logprobs_BL, routing

  logits_BLV, logprobs_BL, routing = ours(params)
  np.testing.assert_allclose(logits_BLV, golden['logits_BLV'], atol=1e-4)
  logits = torch.from_numpy(golden['logits_BLV'])[:, :-1]
  chosen = torch.from_numpy(golden['tokens_BL'])[:, 1:, None]
  expected = torch.log_softmax(logits, -1).gather(-1, chosen)[..., 0]
  np.testing.assert_allclose(logprobs_BL[:, 1:], expected, atol=1e-5)
  if routing is not None:
    np.testing.assert_array_equal(routing.expert_ids, golden['expert_ids_BLNE'])


@pytest.mark.parametrize('kind', make_models.KINDS)
def test_transformers_generates_the_same_tokens_from_an_export(kind, tmp_path):
  model, params, golden = _make(tmp_path / 'theirs', kind, False, 2, {})
  # The config does not come from a source: exports of random weights write it.
  export.export(tmp_path / 'ours', model.config, params)
  theirs = make_models.load(tmp_path / 'ours')
  prompt = torch.from_numpy(golden['tokens_BL'])
  with torch.no_grad():
    expected = theirs.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      max_new_tokens=8,
      do_sample=False,
      eos_token_id=-1,
      pad_token_id=0,
    ).numpy()
  B, L = golden['tokens_BL'].shape
  cache = cache_lib.empty(model.config, B, L + 8)
  tokens_BL = appended = golden['tokens_BL'].astype(np.int32)
  for _ in range(8):
    lengths_B = np.full(B, tokens_BL.shape[1] - appended.shape[1], np.int32)
    counts_B = np.full(B, appended.shape[1], np.int32)
    hidden_BCD, cache = tiny.read_on(
      model, params, appended, cache, lengths_B, counts_B
    )
    logits_BV = heads.logits(hidden_BCD[:, -1], model.output_VD(params))
    appended = np.argmax(logits_BV, axis=-1).astype(np.int32)[:, None]
    tokens_BL = np.concatenate([tokens_BL, appended], axis=1)
  np.testing.assert_array_equal(tokens_BL, expected)
