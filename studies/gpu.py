"""The four algorithms with 39 million weights, on one GPU.

    python -m stppo_jax ablate --config=studies/gpu.py --workdir=runs/gpu \
        --jobs=8

A policy is trained from random weights to imitate the demonstrations of
studies/critic.py. The four algorithms of the paper train this policy further
under the stress of studies/collapse.py: 32 updates on each collection. A critic
of the same size first learns beside the frozen policy, for the same number of
steps in each run.

Eight runs share the GPU, because a single run leaves the GPU idle between its
kernels. The same command goes on after an interruption. For pieces of 9
minutes, which leave 40 seconds to save, put `timeout 500` before the command,
and repeat the command until its exit code is 0. Most of a run's time is
compilation, so set

    export JAX_COMPILATION_CACHE_DIR=FOLDER
    export XLA_PYTHON_CLIENT_MEM_FRACTION=.12
    export XLA_FLAGS=--xla_gpu_autotune_level=0
    export XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_triton_gemm=false"

These flags keep XLA from timing variants of each kernel, and a program of an
update compiles in 6 to 10 seconds in place of 25. With these flags, an H100
took 3 minutes for the start, 2 for the pilot and 6 for the eight commands that
`--dry_run` prints, which a script started at the same time. The script gave
each run .10 of the memory, which was too little for one run; this run went on
with more memory.

The rate of the policy is chosen before the runs, as in studies/dead_critic.py:
token PPO trains for 5 steps after the warm-up with seed 100 and each rate of
`RATES`, and all runs get the rate whose mean KL divergence of these steps is
nearest to 0.1 nats in its logarithm:

    python -m stppo_jax train --config=studies/gpu.py:token_ppo \
        --workdir=runs/gpu-pilot --config.seed=100 --config.num_steps=13 \
        --config.model.path=runs/gpu/start-imitation/policy \
        --config.policy_optimizer.learning_rate=5e-5

The pilot found .006, .035 and .262 nats, so the rate is 1.2e-4.

Two hypotheses about the area, which is the mean success of all steps: the area
of turn PPO is larger than the area of token PPO in both seeds, and the
correction changes the area by less than .1 with either ratio. Two seeds can
prove neither hypothesis. They tell whether what holds for 170 thousand weights
may hold for 230 times as many. The hypotheses, and the rule by which the rate
is chosen, were committed before the runs. The figures of the pilot, the rate,
and the shorter start (1,100 steps and not 1,600, which was decided before the
pilot) were committed with the first report.
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
  config.sft.num_steps = 1100
  config.sft.clean_one_hop_steps, config.sft.clean_steps = 400, 150
  # Wider models need smaller rates.
  config.sft.optimizer.learning_rate = 5e-4
  config.sft.optimizer.warmup_updates = 100
  # 4 minibatches x 8 epochs = 32 updates on one collection.
  config.rollout.trajectories_per_step = 128
  config.rollout.temperature = 1.0
  # One length of batches needs only one set of compiled programs.
  config.rollout.length_bucket = config.env.max_length
  config.updates.minibatch_size = 32
  config.updates.num_epochs = 8
  config.updates.value_epochs = 0
  config.policy_optimizer.learning_rate = RATES[2]  # chosen by the pilot
  config.policy_optimizer.warmup_updates = 80
  config.value_optimizer.learning_rate = 2e-4
  config.value_optimizer.warmup_updates = 80
  # The warm-up has the same length in all runs, so that all policies train for
  # the same number of steps.
  config.loss.value_warmup_steps = _WARMUP
  config.loss.value_warmup_patience = 0
  config.evaluate.every = 16
  config.evaluate.num_questions = 128
  config.checkpoint.every = 16
  config.checkpoint.keep = 1
  config.writer.tensorboard = False
  config.writer.samples = 0
  config.writer.token_details = 0
  # The study is about runs that collapse, so no run may end early.
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
