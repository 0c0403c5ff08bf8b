"""Adapters in the format of PEFT: files, and what is refused."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from stppo_jax.models import lora
from stppo_jax.models.hf import peft
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from tests.models import tiny

_LORA = lora.Lora(
  rank=3,
  alpha=6.0,
  targets='(q|o|down)_proj$',
  rank_pattern=('o_proj$=5',),
  alpha_pattern=('down_proj$=4.5',),
)
_PATTERNS = 'rank_pattern or alpha_pattern: '
_OF_EXPERTS = lora.Lora(rank=2, alpha=3.0, targets='moe/|q_proj')


def _model(options=_LORA, **changes):
  return dataclasses.replace(tiny.model(**changes), lora=options)


def _adapters(model, scale=0.3):
  rng = np.random.default_rng(5)
  shapes = jax.eval_shape(model.init_adapters, jax.random.key(0))
  return jax.tree.map(
    lambda x: (scale * rng.standard_normal(x.shape)).astype(np.float32), shapes
  )


def _write(folder, model, adapters):
  folder.mkdir(exist_ok=True)
  peft.write(
    folder, model.config, model.lora, adapters, base='/base', dtype='F32'
  )
  return folder


def _read(folder, model):
  shapes = jax.eval_shape(model.init_adapters, jax.random.key(0))
  return peft.read(folder, model.config, model.lora, shapes)


def _edit(folder, **changes):
  path = folder / peft.CONFIG
  content = json.loads(path.read_text()) | changes
  path.write_text(json.dumps(content))


@pytest.mark.parametrize(
  'options, changes',
  [
    (_LORA, {}),
    (dataclasses.replace(_LORA, rslora=True), {}),
    (_OF_EXPERTS, tiny.MIXTURE),
  ],
  ids=['plain', 'rslora', 'experts'],
)
def test_what_is_written_is_read_again(options, changes, tmp_path):
  model = _model(options, **changes)
  adapters = _adapters(model)
  folder = _write(tmp_path / 'adapters', model, adapters)
  found = lora.Lora(**peft.options(folder))
  kernels = {
    '/'.join(str(part.key) for part in path[:-1])
    for path, _ in jax.tree_util.tree_leaves_with_path(adapters)
  }
  for name in kernels:
    assert found.adapts(name)
    assert found.rank_of(name) == options.rank_of(name)
    assert np.isclose(found.scale_of(name), options.scale_of(name))
  again = _read(folder, dataclasses.replace(model, lora=found))
  jax.tree.map(np.testing.assert_allclose, again, adapters)


def test_matrices_of_a_layer_may_have_ranks_and_alphas_of_their_own(tmp_path):
  """Stacked, they still compute x W + alpha/rank (x A) B for each."""
  model = _model()
  folder = _write(tmp_path / 'adapters', model, _adapters(model))
  rng = np.random.default_rng(0)
  stems = [f'model.layers.{n}.self_attn.q_proj' for n in range(2)]
  tensors, products = {}, []
  for stem, rank, alpha in zip(stems, (2, 4), (8.0, 6.0)):
    a, b = rng.standard_normal((rank, 16)), rng.standard_normal((16, rank))
    for key, value in zip('AB', (a, b)):
      name = f'base_model.model.{stem}.lora_{key}.weight'
      tensors[name] = value.astype(np.float32)
    products.append(alpha / rank * a.T @ b.T)
  safetensors.numpy.save_file(tensors, folder / peft.WEIGHTS)
  _edit(
    folder,
    r=2,
    lora_alpha=8.0,
    rank_pattern={'layers.1.self_attn.q_proj': 4},
    alpha_pattern={r'.*layers\.1.*': 6.0},
  )
  options = lora.Lora(**peft.options(folder))
  assert options == lora.Lora(
    rank=2,
    alpha=8.0,
    targets='^(layers/q_proj)$',
    rank_pattern=('^layers/q_proj$=4',),
    alpha_pattern=('^layers/q_proj$=16.0',),
  )
  model = dataclasses.replace(model, lora=options)
  adapters = _read(folder, model)
  assert adapters['layers']['q_proj']['lora_a'].shape == (2, 16, 4)
  base = tiny.params(model)
  merged = model.merge_adapters(model.join_params(base, adapters))
  change = (
    merged['layers']['q_proj']['kernel'] - base['layers']['q_proj']['kernel']
  )
  np.testing.assert_allclose(change, products, atol=1e-5)


@pytest.mark.parametrize(
  'changes, line',
  [
    ({'use_dora': True}, 'use_dora=True is not supported; supported: none'),
    ({'peft_type': 'IA3'}, "peft_type='IA3' is not supported; supported: 'LO"),
    ({'bias': 'all'}, "bias='all' is not supported; supported: 'none'"),
    ({'modules_to_save': ['lm_head']}, r"modules_to_save=\['lm_head'\] is not"),
    ({'init_lora_weights': 'pissa'}, "init_lora_weights='pissa' is not"),
    ({'some_later_option': 3}, 'some_later_option=3 is not supported'),
    ({'r': 0}, 'r=0: must be an integer from 1 to '),
    ({'r': None}, 'r=None: must be an integer from 1 to '),
    ({'r': math.inf}, 'r=inf: must be an integer from 1 to '),
    ({'r': 0.5}, 'r=0.5: must be an integer from 1 to '),
    ({'r': True}, 'r=True: must be an integer from 1 to '),
    ({'r': 10**400}, 'r=1(0){400}: must be an integer from 1 to '),
    ({'rank_pattern': {'q': 0}}, 'rank_pattern.q=0: must be an integer from'),
    ({'rank_pattern': {'q': 2.0}}, 'rank_pattern.q=2.0: must be an integer'),
    ({'lora_alpha': math.inf}, 'lora_alpha=inf: must be a finite number gre'),
    ({'lora_alpha': math.nan}, 'lora_alpha=nan: must be a finite number gre'),
    ({'lora_alpha': 10**400}, 'lora_alpha=10+: must be a finite number gre'),
    ({'alpha_pattern': {'q': True}}, 'alpha_pattern.q=True: must be a finite'),
    ({'use_rslora': 'false'}, "use_rslora='false': must be true or false"),
    ({'use_rslora': 0}, 'use_rslora=0: must be true or false'),
    (
      {'target_parameters': [1]},
      r'target_parameters=\[1\]: must be a string or a l',
    ),
    ({'target_parameters': 3}, 'target_parameters=3: must be a string or a l'),
    ({'rank_pattern': {'(?i)q': 1}}, f'{_PATTERNS}global flags not at the sta'),
    ({'rank_pattern': {f'a{{{2**40}}}': 1}}, f'{_PATTERNS}the repetition numb'),
    ({'rank_pattern': {'(': 1}}, f'{_PATTERNS}missing '),
    ({'alpha_pattern': [1]}, _PATTERNS),
  ],
)
def test_what_would_compute_otherwise_is_refused_by_name(
  changes, line, tmp_path
):
  model = _model()
  folder = _write(tmp_path, model, _adapters(model))
  _edit(folder, **changes)
  with pytest.raises(
    ValueError, match=f'{re.escape(str(folder))}.*: {line}'
  ) as caught:
    peft.options(folder)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'name, line',
  [
    ('model.layers.0.mlp.qkv_proj.lora_A', 'has lora_A only'),
    ('model.embed_tokens.lora_embedding_A', 'is not supported; supp'),
    ('model.layers.0.self_attn.q_proj.lora_magnitude_vector', 'is not supp'),
  ],
)
def test_other_tensors_are_refused_by_name(name, line, tmp_path):
  model = _model()
  folder = _write(tmp_path, model, _adapters(model))
  tensors = safetensors.numpy.load_file(folder / peft.WEIGHTS)
  tensors[f'base_model.model.{name}.weight'] = np.zeros((3, 16), np.float32)
  safetensors.numpy.save_file(tensors, folder / peft.WEIGHTS)
  with pytest.raises(
    ValueError, match=f'{name.removesuffix(".lora_A")}.* {line}'
  ):
    peft.options(folder)


def test_adapters_of_another_model_are_refused_by_name(tmp_path):
  model = _model()
  adapters = _adapters(model)
  folder = _write(tmp_path, model, adapters)
  wider = _model(num_heads=4)
  with pytest.raises(
    ValueError, match=r'lora_. of model.layers.0.self_attn.\w_proj must be fin'
  ):
    _read(folder, wider)
  with pytest.raises(ValueError, match=r'no adapter for model.layers.1.'):
    _read(folder, _model(num_layers=1))
  adapters['layers']['o_proj']['lora_a'][1, 2, 3] = np.nan
  _write(tmp_path, model, adapters)
  with pytest.raises(ValueError, match='lora_A of .*1.*o_proj must be finite'):
    _read(folder, model)


@pytest.mark.parametrize('name', ['self_attn.qkv_proj', 'mlp.gate_up_proj'])
def test_adapters_of_a_tensor_of_several_layers_are_refused(name, tmp_path):
  """One file has place for one of their A alone."""
  line = f'model.layers.0.{name} is one tensor for .*without --adapters$'
  targets = '(k|v)_proj$' if 'qkv' in name else 'up_proj$'
  phi3 = _model(
    lora.Lora(2, 2.0, targets), family='phi3', qkv_bias=False, num_layers=1
  )
  with pytest.raises(ValueError, match=f'^{line}'):
    _write(tmp_path / 'written', phi3, _adapters(phi3))
  others = _model(lora.Lora(2, 2.0, 'o_proj$'), family='phi3', qkv_bias=False)
  folder = _write(tmp_path / 'read', others, _adapters(others))
  assert peft.options(folder)['targets'] == '^(layers/o_proj)$'
  tensors = safetensors.numpy.load_file(folder / peft.WEIGHTS)
  for key in 'AB':
    tensors[f'base_model.model.model.layers.0.{name}.lora_{key}.weight'] = (
      np.zeros((2, 2), np.float32)
    )
  safetensors.numpy.save_file(tensors, folder / peft.WEIGHTS)
  with pytest.raises(ValueError, match=f'{peft.WEIGHTS}: {line}'):
    peft.options(folder)


def test_adapters_that_peft_takes_for_those_of_experts_are_refused(tmp_path):
  mixed = {'family': 'qwen3_moe', **tiny.MIXED}
  attention = _model(lora.Lora(2, 2.0, '[qkv]_proj$'), **mixed)
  folder = _write(tmp_path / 'attention', attention, _adapters(attention))
  found = _read(folder, attention)
  assert found.keys() == {'layers', 'dense_layers'}
  others = _model(lora.Lora(2, 2.0, '_proj$'), **mixed)
  line = '^model.layers.1.mlp.*_proj: PEFT would read .*merged weights$'
  with pytest.raises(ValueError, match=line):
    _write(tmp_path / 'mlp', others, _adapters(others))


def test_experts_have_adapters_only_where_they_are_named():
  shapes = lambda targets: jax.eval_shape(
    _model(lora.Lora(2, 2.0, targets), **tiny.MIXTURE).init_adapters,
    jax.random.key(0),
  )['layers']
  assert 'moe' not in shapes('(q|k|v|o|gate|up|down)_proj$')
  assert shapes('moe/(gate|up|down)_proj').keys() == {'moe'}
  assert shapes('.*')['moe'].keys() == {'gate_proj', 'up_proj', 'down_proj'}


@pytest.mark.parametrize(
  'kind', ['dense', pytest.param('grouped', marks=pytest.mark.slow)]
)
def test_adapters_of_experts_compute_what_merged_weights_do(kind):
  model = _model(_OF_EXPERTS, moe=kind, **tiny.MIXTURE)
  base, adapters = tiny.params(model), _adapters(model)
  tokens = np.array([[1, 5, 2, 7], [3, 3, 9, 0]], np.int32)
  joined = model.join_params(base, adapters)
  hidden = jax.jit(model.hidden)
  merged = hidden(model.merge_adapters(joined), tokens)
  np.testing.assert_allclose(hidden(joined, tokens), merged, atol=2e-5)
  assert np.abs(merged - hidden(base, tokens)).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['dense', 'grouped'])
def test_adapters_of_experts_are_divided_over_a_mesh(kind):
  changes = {**tiny.MIXTURE, 'vocab_size': 12, 'num_kv_heads': 2, 'moe': kind}
  model = _model(_OF_EXPERTS, **changes)
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  on_mesh = dataclasses.replace(model, mesh=mesh)
  joined = model.join_params(tiny.params(model), _adapters(model))
  tokens = np.arange(16, dtype=np.int32).reshape(4, 4) % 11

  def loss(model, params, tokens):
    return jnp.mean(jnp.square(model.hidden(params, tokens)))

  compute = lambda model: jax.jit(
    jax.value_and_grad(functools.partial(loss, model))
  )
  alone = compute(model)(joined, tokens)
  layout = sharding.param_shardings(joined, mesh)
  divided = compute(on_mesh)(jax.device_put(joined, layout), tokens)
  spec = layout['layers']['moe']['down_proj']['lora_a'].spec
  assert tuple(spec) == (None, 'expert', 'tensor')
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), divided, alone
  )
