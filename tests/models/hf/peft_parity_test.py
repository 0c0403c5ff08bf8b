"""Adapters that were trained here load in `peft`, and the other way round."""

import pathlib

import jax
import numpy as np
import pytest

from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models import lora
from stppo_jax.models.hf import load
from stppo_jax.models.hf import peft as ours

torch = pytest.importorskip('torch', exc_type=ImportError)
pytestmark = [
  pytest.mark.torch,
  # It calls what `transformers` is about to rename, and believes that patterns
  # for parameters match nothing.
  pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::RuntimeWarning'),
]
# They import torch.
peft = pytest.importorskip('peft')
transformers = pytest.importorskip('transformers')

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden'
_TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)
_EXPERTS = 'moe/(gate|up|down)_proj'


def _theirs(base):
  return transformers.AutoModelForCausalLM.from_pretrained(
    _GOLDEN / base, dtype=torch.float32, experts_implementation='eager'
  )


def _logits(model):
  with torch.no_grad():
    return model(torch.tensor(_TOKENS)).logits.numpy()


def _our_logits(base, folder):
  """Returns the logits of base and adapters, as `train` reads both."""
  config = load.read_config(_GOLDEN / base, remat='none')
  options = lora.Lora(**ours.options(folder))
  model = functional.Model(config, 'vocabulary', lora=options)
  shapes = jax.eval_shape(model.init_adapters, jax.random.key(0))
  adapters = ours.read(folder, config, options, shapes)
  params = model.join_params(load.read_params(_GOLDEN / base, config), adapters)
  hidden_BLD = jax.jit(model.hidden)(params, _TOKENS)
  return heads.logits(hidden_BLD, model.output_VD(params))


def _agree(found, wanted, without):
  np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
  assert np.abs(wanted - without).max() > 0.1  # the adapters count


@pytest.mark.parametrize(
  'base, targets, patterns, rslora',
  [
    ('qwen2_untied', '_proj$', ((), ()), False),
    ('llama_untied', '(q|o|down)_proj$', (('o_p=5',), ('down=7.5',)), False),
    ('qwen3_untied', '(q|o|down)_proj$', (('o_p=5',), ('down=7.5',)), True),
    ('qwen3_moe_untied', 'q_proj$', ((), ()), False),
    ('qwen3_moe_untied', _EXPERTS, ((), ()), False),
    ('qwen3_moe_untied', f'{_EXPERTS}|o_proj', (('o_p=5',), ()), True),
    ('qwen3_moe_mixed', f'{_EXPERTS}|layers/o_p', (('o_p=5',), ()), False),
  ],
)
def test_ours_load_there(base, targets, patterns, rslora, tmp_path):
  config = load.read_config(_GOLDEN / base, remat='none')
  options = lora.Lora(3, 6.0, targets, *patterns, rslora)
  model = functional.Model(config, 'vocabulary', lora=options)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(
    lambda x: (0.2 * rng.standard_normal(x.shape)).astype(np.float32),
    jax.eval_shape(model.init_adapters, jax.random.key(0)),
  )
  ours.write(
    tmp_path, config, options, adapters, base=str(_GOLDEN / base), dtype='F32'
  )
  theirs = _theirs(base)
  without = _logits(theirs)
  loaded = peft.PeftModel.from_pretrained(theirs, tmp_path)
  _agree(_our_logits(base, tmp_path), _logits(loaded), without)


@pytest.mark.parametrize(
  'base, options',
  [
    ('qwen2_untied', {'target_modules': 'all-linear'}),
    (
      'llama_untied',
      {
        'target_modules': ['q_proj', 'down_proj'],
        'rank_pattern': {'layers.0.self_attn.q_proj': 2, 'down_proj': 5},
        'alpha_pattern': {r'.*\.1\..*q_proj': 7, 'down_proj': 3},
        'layers_to_transform': [0, 1],
      },
    ),
    ('qwen3_untied', {'target_modules': ['v_proj'], 'use_rslora': True}),
    ('qwen3_moe_untied', {'target_modules': ['q_proj', 'o_proj']}),
    ('qwen3_moe_untied', {'target_parameters': ['experts.down_proj']}),
    ('qwen3_moe_untied', {'target_parameters': ['experts.gate_up_proj']}),
    (
      'qwen3_moe_mixed',
      {
        'target_modules': ['v_proj'],
        'target_parameters': ['experts.down_proj', 'experts.gate_up_proj'],
        'rank_pattern': {'experts.down_proj': 2},
        'use_rslora': True,
      },
    ),
  ],
)
def test_theirs_load_here(base, options, tmp_path):
  torch.manual_seed(0)
  model = _theirs(base)
  without = _logits(model)
  config = peft.LoraConfig(r=4, lora_alpha=6, task_type='CAUSAL_LM', **options)
  trained = peft.get_peft_model(model, config).eval()
  with torch.no_grad():
    for name, parameter in trained.named_parameters():
      if 'lora_' in name:
        parameter.copy_(0.2 * torch.randn_like(parameter))
  trained.save_pretrained(tmp_path)
  _agree(_our_logits(base, tmp_path), _logits(trained), without)


def test_adapters_that_compute_otherwise_are_refused(tmp_path):
  config = peft.LoraConfig(target_modules=['q_proj'], use_dora=True)
  peft.get_peft_model(_theirs('qwen2_untied'), config).save_pretrained(tmp_path)
  with pytest.raises(ValueError, match='use_dora=True is not supported'):
    ours.options(tmp_path)
