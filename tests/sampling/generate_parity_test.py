"""Greedy dialogues equal those of `generate` in `transformers`.

The expected tokens were made by golden/make_dialogues.py, which generates each
dialogue on its own and computes it anew for every turn. Here rows share slots,
chunks and calls, and the environment answers in random order.
"""

import asyncio
import functools
import importlib
import random

import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.models import functional
from stppo_jax.models.hf import load
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from tests.golden import make_dialogues as golden
from tests.rollout import dialogues

_SCRIPTS = golden.scripts()


class _Numbers(dialogues.Letters):
  """A tokenizer whose text is the ids in decimal."""

  def encode_text(self, text, *, tags=()):
    return np.array([int(word) for word in text.split()], np.int32)

  def decode(self, ids):
    return ' '.join(map(str, ids))


class _Scripted(protocol.Environment):
  """An environment that answers from the script, in random order.

  Question n has script n.

  Attributes:
    texts: what the policy wrote, by number of the question.
  """

  tags = ()
  max_turns = max(len(script.observations) for script in _SCRIPTS)

  def __init__(self):
    self._random = random.Random(0)
    self.texts = {}

  def prompt(self, question):
    return _text(_SCRIPTS[int(question.id)].prompt)

  async def step(self, question, turn_index, text):
    self.texts.setdefault(int(question.id), []).append(text)
    observations = _SCRIPTS[int(question.id)].observations
    if turn_index == len(observations):
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    await asyncio.sleep(self._random.uniform(0, 0.01))
    body = _text(observations[turn_index])
    return protocol.Step('search', protocol.Observation('', body, ''), None)

  def rewards(self, question, prompt, texts, status):
    return {}, {}


def _text(ids):
  return ' '.join(map(str, ids))


@functools.cache
def _policy(name):
  config = load.read_config(
    golden.HERE / name, dtype='float32', remat='none', scan_unroll=1
  )
  params = load.read_params(golden.HERE / name, config)
  scale = lambda path, x: (
    x * np.float32(golden.SCALE) if path[-1].key == 'kernel' else x
  )
  return (
    functional.Model(config, 'vocabulary'),
    jax.tree_util.tree_map_with_path(scale, params),
  )


@functools.cache
def _engine(name, **options):
  return _engine_of(*_policy(name), **options)


def _engine_of(model, params, **options):
  engine = engine_lib.Engine(
    model,
    placement=publish.Placement(
      mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
      tensor=1,
    ),
    automaton=stops.build(
      golden.TOKENS, stop_strings=golden.STOP_STRINGS, eos_ids=[golden.EOS]
    ),
    options=engine_options.EngineOptions(
      max_length=golden.MAX_LENGTH,
      sampling=sampler.Sampling(temperature=1.0),
      **options,
    ),
  )
  engine.publish(params, 0)
  return engine


def _collect(engine, limit):
  """Returns the pieces of each dialogue, and the texts of its turns."""
  environment = _Scripted()
  questions = [
    types.Question(str(n), '', (), 'scripted') for n in range(len(_SCRIPTS))
  ]
  with event_loop.EventLoop() as loop:
    trajectories = collect.Collector(
      engine=engine,
      environment=environment,
      tokenizer=_Numbers(),
      loop=loop,
      max_turn_tokens=limit,
      max_observation_tokens=golden.MAX_LENGTH,
    ).collect(
      questions,
      jax.random.split(jax.random.key(0), len(questions)),
      greedy=True,
    )
  rows = []
  for trajectory in trajectories:
    pieces = [trajectory.prompt_ids]
    for turn in trajectory.turns:
      pieces += [turn.token_ids, turn.observation_ids]
    rows.append(pieces[:-1])  # no observation follows the last turn
    assert not len(pieces[-1])
  return rows, environment.texts


def _lists(rows):
  return [[ids.tolist() for ids in pieces] for pieces in rows]


def _assert_same(rows, texts, expected):
  for n, (pieces, expected_pieces) in enumerate(
    zip(_lists(rows), _lists(expected), strict=True)
  ):
    assert pieces == expected_pieces, f'row {n}'
    assert texts[n] == [_text(ids) for ids in expected_pieces[1::2]]


# Waves of four slots, all of them in every call.
_WAVES = dict(
  slots=4,
  prefill_chunk=64,
  decode_chunk=5,
  lookahead=1,
  lanes=1,
  batch_rows=0,
  page_size=0,
  pages=0,
  early_exit=0.25,
  deterministic=True,
)
_ENGINES = {
  'waves': _WAVES,
  # One wave that all rows fit into, and nothing is started ahead.
  'one wave': _WAVES
  | dict(slots=12, prefill_chunk=37, decode_chunk=16, lookahead=0),
  # Slots are refilled; programs run on three active rows, on two threads.
  'refilled': _WAVES
  | dict(
    slots=8,
    prefill_chunk=50,
    decode_chunk=3,
    lanes=2,
    batch_rows=3,
    deterministic=False,
  ),
}


# The others differ in shapes that engine_test compares with one another.
@pytest.mark.parametrize(
  ('name', 'engine'),
  [
    pytest.param('qwen2_tied', 'waves', marks=pytest.mark.slow),
    pytest.param('qwen2_untied', 'refilled', marks=pytest.mark.slow),
    pytest.param('qwen2_tied', 'refilled', marks=pytest.mark.slow),
    pytest.param('qwen2_tied', 'one wave', marks=pytest.mark.slow),
    pytest.param('qwen2_untied', 'waves', marks=pytest.mark.slow),
    pytest.param('qwen2_untied', 'one wave', marks=pytest.mark.slow),
  ],
)
def test_dialogues_equal_those_of_generate(name, engine):
  for limit in golden.LIMITS:
    rows, texts = _collect(_engine(name, **_ENGINES[engine]), limit)
    _assert_same(rows, texts, golden.read(name, limit))


@pytest.mark.torch
def test_the_stored_dialogues_are_those_of_this_transformers():
  pytest.importorskip('torch', exc_type=ImportError)
  (name, _), limit = golden.MODELS, golden.LIMITS[0]
  model = golden.load_model(name)
  made = [golden.dialogue(model, script, limit) for script in _SCRIPTS]
  assert _lists(made) == _lists(golden.read(name, limit))


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
  engine = _engine_of(
    functional.Model(config, 'vocabulary'),
    load.read_params(tmp_path, config),
    **_ENGINES['refilled'],
  )
  rows, texts = _collect(engine, 24)
  _assert_same(rows, texts, expected)
