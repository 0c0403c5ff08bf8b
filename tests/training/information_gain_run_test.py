"""Runs whose turns are rewarded for what their observations tell the policy."""

import numpy as np
import pytest

from stppo_jax.envs import rewards
from stppo_jax.rollout import pack
from stppo_jax.rollout import steps
from stppo_jax.tools.lab import collection
from stppo_jax.training import components
from tests.training import runs

_WEIGHT = 1e4  # the policy has learned nothing, and gains are tiny


def _gains(trajectory, components_of_run, state):
  """Returns the gains of all turns but the last, from whole prefixes."""
  tokenizer = components_of_run.tokenizer
  golden = rewards.golden_texts(trajectory.question)[0]
  answer = tokenizer.encode_text(f' {golden}')
  tag = tokenizer.encode_text('<answer>', tags=('<answer>',))
  read, probabilities = trajectory.prompt_ids, []
  for turn in trajectory.turns:
    asked = np.concatenate([read, tag, answer])
    tokens_BL = np.zeros((1, 128), np.int32)
    tokens_BL[0, : len(asked)] = asked
    out = components_of_run.learner.token_outputs(state, tokens_BL)
    of_answer = np.asarray(out.logprobs_BL[0], np.float64)
    of_answer = of_answer[len(asked) - len(answer) : len(asked)]
    probabilities.append(np.exp(of_answer.mean()))
    read = np.concatenate([read, turn.token_ids, turn.observation_ids])
    if len(read) + len(tag) + len(answer) > 128:
      break
  gains = np.zeros(len(trajectory.turns) - 1)
  gains[: len(probabilities) - 1] = np.diff(probabilities)
  return gains


@pytest.mark.slow
def test_gains_are_those_of_prefixes(monkeypatch):
  kept, collect = [], steps.StepCollector.collect

  def recorded(self, step):
    found = collect(self, step)
    kept.append(found[0])
    return found

  monkeypatch.setattr(steps.StepCollector, 'collect', recorded)
  config = runs.config('turn_rloo', env__rewards__information_gain=_WEIGHT)
  saved = collection.collect(config, workdir=None, num_updates=0)
  (trajectories,) = kept
  parts = components.build(config)
  state = parts.learner.start()
  expected = [_gains(x, parts, state) for x in trajectories]
  plain = pack.pack(trajectories, length_bucket=128)
  added_BL = (saved['rewards_BL'] - plain.rewards_BL) / _WEIGHT
  turn_ids_BL = saved['turn_ids_BL']
  for b, gains in enumerate(expected):
    for turn, gain in enumerate(gains, 1):
      last = np.flatnonzero(turn_ids_BL[b] == turn)[-1]
      np.testing.assert_allclose(added_BL[b, last], gain, rtol=1e-3, atol=1e-8)
      added_BL[b, last] = 0
  assert not added_BL.any()
  assert max(np.abs(gains).max(initial=0) for gains in expected) > 1e-5
