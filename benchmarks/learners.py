"""Makes the whole update of a run, for the policy and the value model.

B trajectories, L tokens, M loss positions. The state is donated. Weights and
batch are random. Some ratios and values are clipped, others are not.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import batches
from benchmarks import waste
from stppo_jax import batch as batch_lib
from stppo_jax.configs import quickstart
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import step as step_lib
from stppo_jax.models import config as model_config
from stppo_jax.parallel import sharding
from stppo_jax.rollout import pack
from stppo_jax.training import components

ALGORITHM = 'token_ppo'
NUM_TURNS = 4
_MEDIAN = 1300  # the median tokens of a dialogue of up to `waste.LONGEST`
_WEIGHT_DECAY = 0.01


class Sizes(NamedTuple):
  """The sizes of both models and of the batch.

  Attributes:
    vocabulary: the number of vocabulary entries.
    width: the width of the models.
    layers: the number of layers of a model.
    rows: the number of trajectories of the batch.
    length: the number of tokens of a row with its padding.
    chunk: the value of the config key `updates.head_chunk`.
    core_rows: the value of the config key `updates.core_rows`.
    dialogues: whether trajectories have random lengths of at most `length`, in
      proportion to the lengths of `waste`. If not, all have `length` tokens.
  """

  vocabulary: int
  width: int
  layers: int
  rows: int
  length: int
  chunk: int = 8192
  core_rows: int = 0
  dialogues: bool = False

  @property
  def shape(self) -> model_config.ModelConfig:
    """The shape of both models; from width 256 on, a head has size 64."""
    head_dim = 64 if self.width >= 256 else min(32, self.width // 2)
    return model_config.ModelConfig(
      vocab_size=self.vocabulary,
      hidden_size=self.width,
      intermediate_size=11 * self.width // 4,
      num_layers=self.layers,
      num_heads=self.width // head_dim,
      num_kv_heads=2,
      head_dim=head_dim,
      rope_theta=10000.0,
      rms_norm_eps=1e-6,
      qkv_bias=True,
      tie_embeddings=True,
      scan_unroll=self.layers,
    )

  def __str__(self):
    return (
      f'{self.width} x {self.layers}, [{self.rows}, {self.length}], '
      f'{self.vocabulary}' + ', dialogues' * self.dialogues
    )


def run_config(sizes: Sizes):
  """Returns the quickstart's config with models and batches of these sizes."""
  config = quickstart.get_config(ALGORITHM)
  config.model.path = ''
  config.updates.minibatch_size = sizes.rows
  config.updates.core_rows = sizes.core_rows
  config.updates.num_epochs = 1
  config.updates.head_chunk = sizes.chunk
  config.env.max_length = sizes.length
  config.rollout.trajectories_per_step = sizes.rows
  config.env.max_turns = NUM_TURNS - 1
  for name in ('policy', 'value'):
    config[f'{name}_optimizer'].update(
      warmup_updates=0, weight_decay=_WEIGHT_DECAY
    )
  return config


def random_batch(sizes: Sizes) -> batch_lib.TokenBatch:
  """Returns an annotated batch with random tokens.

  The log-probabilities of the old policy are near those that a model with
  random weights gives.
  """
  batch, _, _ = batches.token_batch(
    rows=sizes.rows, length=sizes.length, num_turns=NUM_TURNS
  )
  if sizes.dialogues:
    batch = _with_lengths_of_dialogues(batch, sizes)
  rng = np.random.default_rng(1)
  shape = batch.tokens_BL.shape
  normal = lambda: rng.normal(size=shape).astype(np.float32)
  return batch.replace(
    tokens_BL=rng.integers(0, sizes.vocabulary, shape).astype(np.int32),
    loss_positions_BM=pack.loss_positions(np.asarray(batch.loss_mask_BL)),
    old_logprobs_BL=0.2 * normal() - np.float32(math.log(sizes.vocabulary)),
    values_BL=normal(),
    returns_BL=normal(),
    value_mask_BL=batch.loss_mask_BL,
  )


def _with_lengths_of_dialogues(
  batch: batch_lib.TokenBatch, sizes: Sizes
) -> batch_lib.TokenBatch:
  lengths_B = waste.lengths(_MEDIAN, seed=0, count=sizes.rows)
  lengths_B = lengths_B * sizes.length // waste.LONGEST
  ids_BL = batches.dialogue_ids(
    np.random.default_rng(0), lengths_B, sizes.length, NUM_TURNS
  )
  return batch.replace(
    lengths_B=lengths_B.astype(np.int32),
    turn_ids_BL=ids_BL,
    loss_mask_BL=ids_BL > 0,
  )


class Trainer:
  """A learner with its state, updated on the same batch again and again.

  Attributes:
    config: the config of the run.
    shape: the shape of both models.
    batch: the batch, on the host.
    state: the training state of both models; the next step donates it.
  """

  def __init__(self, sizes: Sizes):
    self.config = run_config(sizes)
    self.shape = sizes.shape
    self.batch = random_batch(sizes)
    mesh = components.build_mesh(self.config)
    self._learner = learner_lib.Learner(self.config, self.shape, mesh)
    self._rows = sharding.batch_sharding(mesh)
    self._placed = jax.device_put(self.batch, self._rows)
    self.state = _with_head(self._learner.start())

  def step(self) -> dict[str, float]:
    """Updates both models on the batch; returns the metrics."""
    self.state, metrics = update_epochs(
      self._learner, self.state, self._placed, 0
    )
    jax.block_until_ready(self.state)
    return metrics

  def weights(self) -> tuple[Any, Any]:
    """Returns copies on the host of the weights of policy and value model."""
    return jax.tree.map(
      lambda x: np.array(x), (self.state.policy.params, self.state.value.params)
    )


def update_epochs(
  learner: learner_lib.Learner,
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  step: int,
) -> tuple[state_lib.TrainState, dict[str, float]]:
  """Makes all updates of a step; returns the new state and the metrics."""
  outputs = []
  for rows in learner.minibatches(len(batch.lengths_B), step):
    state, output = learner.update(state, batch, rows, step)
    outputs.append(output)
  return state, step_lib.summarize(outputs)


def _with_head(state: state_lib.TrainState) -> state_lib.TrainState:
  """Returns the state with a random value head.

  With the head's initial value 0, the layers below would have no gradient.
  """
  head_D1 = state.value.params['scalar_head']
  drawn_D1 = 0.1 * np.random.default_rng(2).normal(size=head_D1.shape)
  head_D1 = jax.device_put(drawn_D1.astype(np.float32), head_D1.sharding)
  params = {**state.value.params, 'scalar_head': head_D1}
  value = dataclasses.replace(state.value, params=params)
  return dataclasses.replace(state, value=value)
