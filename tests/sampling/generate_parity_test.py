"""Greedy dialogues equal those of `generate` in `transformers`.

The expected tokens were made by golden/make_dialogues.py, which generates each
dialogue on its own and computes it anew for every turn. Here rows share slots,
chunks and calls, and the environment answers in random order.
"""

import importlib

import jax
import numpy as np
import pytest

from stppo_jax.models import functional
from stppo_jax.models.hf import load
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import stops
from tests.golden import make_dialogues as golden
from tests.sampling import tiny_engine

_SCRIPTS = golden.scripts()


def _policy(name):
  config = load.read_config(
    golden.HERE / name, dtype='float32', remat='none', scan_unroll=1
  )
  scale = lambda path, x: (
    x * np.float32(golden.SCALE) if path[-1].key == 'kernel' else x
  )
  params = load.read_params(golden.HERE / name, config)
  params = jax.tree_util.tree_map_with_path(scale, params)
  return functional.Model(config, 'vocabulary'), params


def _engine(model, params, **options):
  engine = engine_lib.Engine(
    model,
    placement=tiny_engine.placement(),
    automaton=stops.build(
      golden.TOKENS, stop_strings=golden.STOP_STRINGS, eos_ids=[golden.EOS]
    ),
    options=tiny_engine.options(
      max_length=golden.MAX_LENGTH, page_size=0, early_exit=0.25, **options
    ),
  )
  engine.publish(params, 0)
  return engine


def _observe(row, turns):
  observations = _SCRIPTS[row].observations
  return observations[turns - 1] if turns <= len(observations) else None


def _assert_same(engine, limit, expected):
  """Asserts that the engine writes the expected turns, in random order."""
  found = tiny_engine.run_dialogues(
    engine,
    [script.prompt for script in _SCRIPTS],
    tiny_engine.keys(len(_SCRIPTS)),
    greedy=True,
    max_turn_tokens=limit,
    delays=0,
    observe=_observe,
  )
  for row, pieces in enumerate(expected):
    assert found[row].tokens == np.concatenate(pieces).tolist(), f'row {row}'
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    assert found[row].spans == list(zip(ends[::2], ends[1::2])), f'row {row}'


_ENGINES = {
  'waves': dict(slots=4, prefill_chunk=64, decode_chunk=5),
  # Slots are refilled; programs run on three active rows, on two threads.
  'refilled': dict(
    slots=8, prefill_chunk=50, lanes=2, batch_rows=3, deterministic=False
  ),
}


# engine_test compares other shapes with one another.
@pytest.mark.slow
@pytest.mark.parametrize('engine', _ENGINES)
@pytest.mark.parametrize('name', ['qwen2_tied', 'qwen2_untied'])
def test_dialogues_equal_those_of_generate(name, engine):
  made = _engine(*_policy(name), **_ENGINES[engine])
  for limit in golden.LIMITS:
    _assert_same(made, limit, golden.read(name, limit))


@pytest.mark.torch
def test_the_stored_dialogues_are_those_of_this_transformers():
  pytest.importorskip('torch', exc_type=ImportError)
  (name, _), limit = golden.MODELS, golden.LIMITS[0]
  model = golden.load_model(name)
  made = [golden.dialogue(model, script, limit) for script in _SCRIPTS]
  for ours, stored in zip(made, golden.read(name, limit), strict=True):
    for piece, expected in zip(ours, stored, strict=True):
      np.testing.assert_array_equal(piece, expected)


_LAYERS = {
  'num_hidden_layers': 3,
  'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention'],
  'sliding_window': 40,
}
# Windows begin in the middle of pages and of turns.
_FAMILIES = {
  'mistral': {'sliding_window': 150},
  'qwen3': _LAYERS | {'use_sliding_window': True, 'attention_bias': True},
  'qwen3_moe': {'num_hidden_layers': 3, 'mlp_only_layers': [1]},
  'phi3': {},
  'gemma3_text': _LAYERS,
  'olmo2': {},
  'olmo3': _LAYERS,
  'llama': {
    'mlp_bias': True,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 4.0,
      'original_max_position_embeddings': 160,
    },
  },
}

# With others, two tokens come too close to each other.
_SEEDS = {'mistral': 1, 'gemma3_text': 2}


@pytest.mark.torch
@pytest.mark.parametrize(
  'kind',
  [
    # Mixed layers and norms of all kinds; the others take as long again.
    pytest.param(kind, marks=() if kind == 'gemma3_text' else pytest.mark.slow)
    for kind in _FAMILIES
  ],
)
def test_dialogues_of_every_family_equal_those_of_generate(kind, tmp_path):
  pytest.importorskip('torch', exc_type=ImportError)
  make_models = importlib.import_module('tests.golden.make_models')
  sizes = {
    'vocab_size': 61,
    'dtype': 'float32',
    'eos_token_id': golden.EOS,
    'max_position_embeddings': golden.MAX_LENGTH,
  }
  options = sizes | _FAMILIES[kind]
  seed = _SEEDS.get(kind, 0)
  make_models.save(tmp_path, kind, 2, 1, True, options, seed)
  theirs = golden.load_scaled(tmp_path)
  theirs.save_pretrained(tmp_path)
  expected = [golden.dialogue(theirs, script, 24) for script in _SCRIPTS]
  assert len({token for row in expected for x in row[1::2] for token in x}) > 9
  config = load.read_config(
    tmp_path, dtype='float32', remat='none', scan_unroll=1
  )
  engine = _engine(
    functional.Model(config, 'vocabulary'),
    load.read_params(tmp_path, config),
    **_ENGINES['refilled'],
  )
  _assert_same(engine, 24, expected)
