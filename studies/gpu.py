"""The four algorithms with 39 million weights, on one GPU.

    python -m stppo_jax ablate --config=studies/gpu.py --workdir=runs/gpu \
        --jobs=4

A policy is trained from random weights to imitate the demonstrations of
studies/critic.py. From it the four algorithms of the paper train under the
stress of studies/collapse.py: 32 updates on each collection. A critic of the
same size first learns beside the frozen policy, for as many steps in each run.

The four algorithms have not been run. Of two tries on a lent H100, the first
was cut off in the pilot below and the second before the first step. They showed
what to expect: a start of 1,600 steps takes 5 minutes and succeeds in .47 to
.54 of its sampled dialogues; at a rate of 1e-3 in place of 5e-4 its loss was
.63, and not .25, after 630 steps. A run compiles for 100 seconds, because
minibatches have four numbers of packed rows, and takes 2.5 seconds a step with
two others beside it. So all of it takes some 20 minutes.

The same command goes on after an interruption. For pieces of 9 minutes, which
leave 40 seconds to save, put `timeout 500` before it and repeat it until its
exit code is 0. Set JAX_COMPILATION_CACHE_DIR, so that a piece does not compile
again, and XLA_PYTHON_CLIENT_MEM_FRACTION=.15, because four runs share the GPU:
one alone leaves it idle between its kernels.

The rate of the policy is chosen before the runs, as in studies/dead_critic.py:
token PPO trains for 5 steps after the warm-up with seed 100 and each rate of
`RATES`, and all runs get the rate whose mean KL divergence of these steps is
nearest to 0.1 nats in its logarithm:

    python -m stppo_jax train --config=studies/gpu.py:token_ppo \
        --workdir=runs/gpu-pilot --config.seed=100 --config.num_steps=13 \
        --config.model.path=runs/gpu/start-imitation/policy \
        --config.policy_optimizer.learning_rate=5e-5

Hypotheses, of the area, which is the mean success of all steps: that of turn
PPO is larger than that of token PPO in both seeds, and the correction changes
the area by less than .1 beside either ratio. Two seeds can prove neither. They
tell whether what holds for 170 thousand weights may hold for 230 times as many.
"""

from stppo_jax.configs import base
from studies import critic

_LEVELS = ('token_ppo', 's_ppo', 'turn_ppo', 'st_ppo')
_WARMUP = 8  # steps in which the policy is frozen
RATES = (2e-5, 5e-5, 1.2e-4)


def get_config(algorithm: str = 'st_ppo') -> base.Config:
  config = critic.get_config(algorithm)
  config.num_steps = _WARMUP + 24
  config.model.update(
    hidden_size=512,
    intermediate_size=1408,
    num_layers=12,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    scan_unroll=1,
    dtype='bfloat16',  # a GPU multiplies float32 ten times more slowly
  )
  config.sft.num_steps = 1600
  # Wider models need smaller rates.
  config.sft.optimizer.learning_rate = 5e-4
  config.sft.optimizer.warmup_updates = 100
  # 4 minibatches x 8 epochs = 32 updates on one collection.
  config.rollout.trajectories_per_step = 128
  config.rollout.length_bucket = config.env.max_length  # one set of programs
  config.updates.minibatch_size = 32
  config.updates.num_epochs = 8
  config.updates.value_epochs = 0
  config.policy_optimizer.learning_rate = RATES[1]
  config.policy_optimizer.warmup_updates = 80
  config.value_optimizer.learning_rate = 2e-4
  config.value_optimizer.warmup_updates = 80
  # All runs train their policies for the same number of steps.
  config.loss.value_warmup_steps = _WARMUP
  config.loss.value_warmup_patience = 0
  config.evaluate.every = 16
  config.evaluate.num_questions = 128
  config.checkpoint.every = 16
  config.checkpoint.keep = 1
  config.writer.tensorboard = False
  config.writer.samples = 0
  config.writer.token_details = 0
  # A run that collapses is what is looked for: it must not end early.
  config.alarms.stop = ()
  config.updates.max_skipped = 0
  return config


def studies():
  """Returns the study; docs/your_own_study.md has its form."""
  return {
    'gpu': {
      'title': 'Level of the ratio, and correction, with 39 million weights',
      'seeds': 2,
      'arms': {'': {name: {'start': 'imitation'} for name in _LEVELS}},
      'starts': {'imitation': {'sft.before_training': False}},
    },
  }
