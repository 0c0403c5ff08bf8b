"""The general paragraphs of `docs/algorithms.md` and `docs/choices/`."""

INTRODUCTION = """\
An algorithm is plain data. It answers five questions: which tokens share a
ratio, which interval of the ratio is trusted, what happens outside it, which
corrections weigh the terms of the loss, and how the terms of the tokens become
a scalar. It also names an advantage estimator and a KL term. No code depends on
the name of an algorithm.

    make quickstart ALGORITHM=st_ppo
    python -m stppo_jax train --config=configs/quickstart.py:st_ppo ...

Every option is a key under `--config.algorithm.`, for example
`--config.algorithm.correction.clipping_bias.tau=5`. Setting the name of a
section, such as `--config.algorithm.bounds.name=balanced`, also sets the
options of that choice to their defaults. Each section, or *axis*, has a page
with all of its choices:
"""

NOTATION = """\
    l          log pi_theta - log pi_old of a token, clipped to [-20, 20]
    r          the ratio in the loss, at the level of the algorithm; clip(r) is
               min(max(r, low), high)
    low, high  the bounds in force
    A          the advantage, through which no gradient flows
    R          the sum of a trajectory's rewards
    V          the value before the token
    sg         stop-gradient
    mu, ref    the sampler's probabilities; the frozen reference policy

A *policy token* is a token that the policy wrote and that is trained on, so no
token of a prompt, an observation, padding or a failed trajectory is one. A
*turn* is the contiguous policy tokens between two observations. A *segment* is
the tokens that share one ratio. The *outcome* is the reward of the whole
trajectory, without the rewards of turns. k1 and k3 are the estimates of the
divergence that [the KL term](choices/kl.md) defines. Means and counts are over
the policy tokens of the whole minibatch, on all devices.
"""

HOW_SURE = """\
Not everything here is equally well established. Under "How sure", every entry
begins with one of these phrases, and may then say what the phrase does not
cover.
"""

PAPER_SETTING = """\
The defaults of `token_ppo`, `turn_ppo`, `s_ppo` and `st_ppo` are the setting of
arXiv 2511.20718: the bounds, gamma and lambda, the KL term, tau. They differ
from it in two ways, on purpose. The reference implementation computes rho per
microbatch of one GPU; here rho is computed over the whole minibatch, so that
cutting a batch changes nothing
(`correction.clipping_bias.scope=microbatch` is the nearest to the reference).
The reference implementation also includes the tokens of observations, which the
policy did not write, in GAE and in whitening, and trains the value model at
them (`advantage.observation_tokens=included`,
`advantage.critic_tokens=response` and `advantage.whiten=all` do the same).

The rest of the paper's setting: Qwen2.5 base models of 1.5B, 3B and 7B on NQ
and HotpotQA, top-3 passages of the 2018 Wikipedia by E5-base-v2, 3 searches
and one last answer, 500 tokens per turn and per observation, context 4096; 512
questions per step with one trajectory each, minibatches of 256 or 128, 1 or 2
epochs; learning rates 1e-6 (policy, warm-up 28.5 % of the steps) and 1e-5
(value, 1.5 %); value clip 0.5, entropy 0.001, gradient norm 1, temperature 1.

`configs/reference.py` has the choices of the authors' implementation in which
ours differs; [the authors' run](reference_run.md) lists them.

No number on this page is a result. The paper's tables of results were not
available.
"""

PREFERENCES = """\
These losses are trained offline on pairs of trajectories, by
`python -m stppo_jax prefer`. Their options are keys under
`--config.preference.`.
"""

CHOICES = """\
This page lists every option of this axis whose value is a name, with all of its
choices. The notation is that of [the algorithms](../algorithms.md#notation),
and the options are keys under `--config.algorithm.`.
"""
