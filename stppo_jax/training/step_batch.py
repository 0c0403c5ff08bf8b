"""Makes the batch of a step, with the rewards that need the policy.

B trajectories, L tokens, T turns.
"""

from collections.abc import Sequence

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import types
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import answer_probes
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack as pack_lib
from stppo_jax.training import components
from stppo_jax.workdir import agreement


def pack(
  trajectories: Sequence[types.Trajectory],
  state: state_lib.TrainState,
  step: int,
  *,
  config,
  tokenizer: collect.Tokenizer,
  learner: learner_lib.Learner,
  sentences: pack_lib.Sentences | None,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> tuple[batch_lib.TokenBatch, dict[str, float]]:
  """Returns the batch of a step, see `pack.pack`, and its metrics.

  Args:
    trajectories: this host's trajectories.
    state: the state whose policy is asked for information gains.
    step: the training step.
    config: the config of the run.
    tokenizer: the policy's tokenizer.
    learner: computes log-probabilities.
    sentences: see `pack.pack`.
    hosts: the hosts whose rows make a batch; all of them call this function.

  Raises:
    HostsDiffer: the arrays of the hosts have different shapes.
  """
  bucket = components.length_unit(config)
  packed = pack_lib.pack(
    trajectories,
    length_bucket=bucket,
    sentences=sentences,
    with_expert_ids=config.updates.routing_replay == 'sampler',
    hosts=hosts,
  )
  # Before the first program of the step, in which hosts would wait for ever.
  agreement.check_program(hosts, 'annotate and update', step, packed)
  weight = config.env.rewards.information_gain
  if not weight:
    return packed, {}
  num_turns = config.env.max_turns + 1
  probes = answer_probes.build(
    trajectories,
    tokenizer,
    num_turns=num_turns,
    max_length=config.env.max_length,
  )
  not_finite = 0
  asks = any(probe.turns for probe in probes)
  # A host without a probe takes part in the program of the others.
  if any(hosts.exchange('probes', asks)):
    asked = pack_lib.pack(probes, length_bucket=bucket, hosts=hosts)
    agreement.check_program(hosts, 'information gain', step, asked)
    gains_BT = answer_probes.gains(
      learner.mean_logprobs(state, asked), asked.lengths_B, num_turns
    )
    finite_BT = np.isfinite(gains_BT)
    not_finite = sum(hosts.exchange('gains', int(np.sum(~finite_BT))))
    gains_BT = np.where(finite_BT, gains_BT, 0.0)
    packed = answer_probes.rewarded(packed, gains_BT, weight)
  return packed, {'information_gain/not_finite': float(not_finite)}
