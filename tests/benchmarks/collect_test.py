"""The benchmark of collecting: its dialogues, and that it runs.

No time is looked at.
"""

import dataclasses
import re

import numpy as np
import pytest

from benchmarks import collect
from benchmarks import collectors
from benchmarks import dialogues
from stppo_jax.rollout import event_loop

_ROWS = 8
_SHAPE = dialogues.Shape(
  prompt=dialogues.between(3, 9),
  turn=dialogues.between(1, 5),
  observation=dialogues.between(1, 6),
  max_searches=2,
)


@pytest.fixture(scope='module')
def policy():
  return collectors.policy('tiny')


@pytest.fixture
def small(monkeypatch):
  """Makes dialogues of a few tokens, answered within milliseconds."""
  monkeypatch.setattr(collect, 'TURNS', _SHAPE)
  monkeypatch.setattr(collect, 'UNEVEN', _SHAPE)
  monkeypatch.setattr(collectors, 'MAX_LENGTH', 64)
  monkeypatch.setattr(collectors, 'MAX_TURN_TOKENS', 8)
  monkeypatch.setattr(
    collect,
    'LATENCIES',
    {name: lambda rng: 0.001 * rng.random() for name in collect.LATENCIES}
    | {'0 s': lambda rng: 0.0},
  )


@pytest.fixture(scope='module')
def loop():
  with event_loop.EventLoop() as running:
    yield running


def _scripts(policy, count=_ROWS, **options):
  return dialogues.scripts(count, _SHAPE, filler=policy.filler, **options)


@pytest.mark.slow
def test_scripts_have_the_lengths_that_were_drawn(policy):
  constant = dialogues.Shape(*(lambda rng, n=n: n for n in (7, 4, 5)), 3)
  scripts = dialogues.scripts(
    40, constant, filler=policy.filler, latency=lambda rng: rng.random()
  )
  encode = policy.tokenizer.encode_prompt
  for script in scripts:
    searches = len(script.inputs) - 1
    lengths = [len(encode(text)) for text in script.inputs]
    assert lengths == [7] + [5] * searches
    assert {len(encode(text)) for text in script.turns} == {4}
    assert [x.count('<') for x in script.turns[:-1]] == [1] * searches
    assert script.turns[-1] == ' r3 r2 r1</answer>'
    assert len(script.latencies) == searches
  assert {len(script.latencies) for script in scripts} == {1, 2, 3}
  # The same dialogues, whatever the latency.
  again = dialogues.scripts(40, constant, filler=policy.filler)
  assert [s.inputs for s in again] == [s.inputs for s in scripts]


@pytest.mark.slow
def test_the_policy_counts_down_and_depends_on_the_history(policy, loop, small):
  """The token is certain, but its log-probability depends on the history."""
  collector = collectors.SlotCollector(
    policy, loop, slots=_ROWS, deterministic=True
  )
  before, after = (
    collector.collect(dialogues.Scripted(scripts))
    for scripts in (_scripts(policy), [_other(s) for s in _scripts(policy)])
  )
  moved = [
    np.abs(one.sampler_logprobs - other.sampler_logprobs).max()
    for a, b in zip(before, after, strict=True)
    for one, other in zip(a.turns, b.turns, strict=True)
  ]
  assert np.median(moved) > 100 * collectors.PARITY
  with pytest.raises(AssertionError, match='log-probabilities of row 0'):
    collectors.assert_parity(before, after)
  with pytest.raises(AssertionError):
    collectors.assert_parity(before, before[::-1])
  collectors.assert_parity(before, before)


def _other(script):
  """Returns the same turns after another first token of the prompt."""
  inputs = list(script.inputs)
  inputs[0] = ' w1' + inputs[0][inputs[0].index(' ', 1) :]
  assert inputs[0] != script.inputs[0]
  return dataclasses.replace(script, inputs=inputs)


@pytest.mark.slow
def test_latency_and_refilled_slots_are_measured(policy, loop, small):
  report = collect.latency(policy, loop, rows=_ROWS, repeats=2)
  assert re.search(r'^0 s / 0.2 s: \d\S+ .* goal: at least 0.85$', report, re.M)
  report = collect.refill(policy, loop, rows=_ROWS, repeats=2)
  assert re.findall(r'^\| (\w+)', report, re.M) == ['case', 'refilled', 'waves']
  assert re.search(r'^waves / refilled: \d\S+ .* at least 1.4$', report, re.M)


@pytest.mark.torch
def test_a_peer_writes_the_same(policy, loop, small):
  pytest.importorskip('torch', exc_type=ImportError)
  report = collect.generate(policy, loop, rows=4, repeats=2)
  assert re.search(r'^generate / ours: \d\S+ .* least 5', report, re.M)
  assert re.search(r'^torch .*: \d threads, batches of 4 rows', report, re.M)
