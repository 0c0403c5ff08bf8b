"""What `docs/algorithms.md` says before its tables."""

INTRODUCTION = """\
An algorithm is a row of data. It answers five questions (which tokens share a
ratio, what interval is trusted, what happens outside it, how much each term
is believed, how tokens become a scalar) and names an advantage estimator and
a KL term. No code asks for a row's name.

    make quickstart ROW=st_ppo
    python -m stppo_jax train --config=configs/quickstart.py:st_ppo ...

Every option below is a key under `--config.algorithm.`, for example
`--config.algorithm.correction.clipping_bias.tau=5`. Another name of a block
(`bounds.name=balanced`) brings that block's own options with their defaults.
"""

NOTATION = """\
    l          log pi_theta - log pi_old of a token, clipped to [-20, 20]
    r          the ratio in the loss, at the row's level; clip(r) is
               min(max(r, low), high)
    low, high  the bounds in force
    A          the advantage; data, whatever made it
    sg         stop-gradient
    mu, ref    the sampler's probabilities; the frozen reference policy

A *policy token* is one that the policy wrote and that is trained on: never a
prompt, an observation, padding or a failed trajectory. A *turn* is one run of
policy tokens between observations. Means and counts are over the policy
tokens of the whole minibatch, on all devices.
"""

HOW_SURE = """\
Not all of this is equally established. Every entry begins with one of these
and then says what limits it.
"""

PAPER_SETTING = """\
The defaults of `token_ppo`, `turn_ppo`, `s_ppo` and `st_ppo` are the setting
of arXiv 2511.20718 where they stand in the table: the bounds, gamma and
lambda, the KL term, tau. Two differ on purpose, because cutting a batch should
change nothing and observations are not the policy's: the reference formed rho
per microbatch of one GPU (`correction.clipping_bias.scope=microbatch` is the
nearest) and did not skip observation tokens
(`advantage.observation_tokens=included`, `advantage.whiten=all`).

The rest of its setting: Qwen2.5 base models of 1.5B, 3B and 7B on NQ and
HotpotQA, top-3 passages of the 2018 Wikipedia by E5-base-v2, 3 searches and
one last answer, 500 tokens per turn and per observation, context 4096; 512
questions per step with one trajectory each, minibatches of 256 or 128, 1 or 2
epochs; learning rates 1e-6 (policy, warm-up 28.5 % of the steps) and 1e-5
(value, 1.5 %); value clip 0.5, entropy 0.001, gradient norm 1, temperature 1.

No number in this document is a result. The paper's result tables were not
available when it was written.
"""
