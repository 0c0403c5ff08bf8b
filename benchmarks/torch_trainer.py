"""The whole update in plain torch, as a user of `transformers` would write it.

B rows, L tokens, V vocabulary. Policy and value model are Qwen2 of
`transformers`, attention is torch's `scaled_dot_product_attention`, logits are
computed for all tokens, and `clip_grad_norm_` and `AdamW` make the step.

A row holds a trajectory, or several packed trajectories. A row of one
trajectory is right-padded to the longest row of its microbatch. Such rows need
no attention mask, which is the fastest case of torch's attention. In packed
rows, positions begin anew with each trajectory, and `transformers` makes the
attention mask from the positions.
"""

import tempfile
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from benchmarks import learners
from benchmarks import measure
from benchmarks import torch_reference
from stppo_jax import batch as batch_lib
from stppo_jax.learner import packing
from stppo_jax.models import config as model_config
from stppo_jax.models.hf import export

# The implementations of AdamW. Which one is faster depends on the machine.
FORMS = ('fused', 'foreach')
# The tried numbers of rows of a microbatch; 0 = all rows. Gradients are
# accumulated over microbatches.
MICROBATCHES = (0, 16, 8, 4, 2)


# After the first column of these arrays is cut off, index l is about token
# l + 1, as in the outputs of a language model.
_FIELDS = (
  *('old_logprobs_BL', 'advantages_BL', 'loss_mask_BL'),
  *('values_BL', 'returns_BL', 'value_mask_BL'),
)


def _tensors(batch: batch_lib.TokenBatch, *, packed: bool) -> list[Any]:
  """Returns the tokens, their positions and `_FIELDS` as tensors of rows.

  The positions are used only if rows are packed.
  """
  B, L = batch.tokens_BL.shape
  positions_BL = np.broadcast_to(np.arange(L), (B, L))
  arrays = [batch.tokens_BL.astype(np.int64), positions_BL]
  arrays += [getattr(batch, name) for name in _FIELDS]
  if packed:
    arrays = packed_rows(batch, arrays)
  arrays[2:] = [x[:, 1:] for x in arrays[2:]]
  return [torch.tensor(np.ascontiguousarray(x)) for x in arrays]


def packed_rows(
  batch: batch_lib.TokenBatch, arrays: list[np.ndarray]
) -> list[np.ndarray]:
  """Packs the trajectories of arrays [B, L] into rows of L tokens.

  The longest trajectory comes first; each goes into the first row with room.
  """
  B, L = batch.tokens_BL.shape
  lengths_B = np.asarray(batch.lengths_B)
  losses_B = np.asarray(batch.loss_mask_BL).sum(1)
  sizes = packing.Sizes(1, L, max_rows=0, num_workers=1)
  order_B, rows = packing.plan(np.arange(B), lengths_B, losses_B, sizes)
  packed = [np.zeros(rows.num_rows * L, x.dtype) for x in arrays]
  end = 0
  for place, start in zip(rows.rows.flat, rows.starts.flat, strict=True):
    if place == B:  # this place has no trajectory
      continue
    length = lengths_B[order_B[place]]
    end = max(end, start + length)
    for x, x_BL in zip(packed, arrays, strict=True):
      x[start : start + length] = x_BL[order_B[place], :length]
  return [x.reshape(-1, L)[: -(-end // L)] for x in packed]


class Trainer:
  """Two models, their optimisers and a batch.

  Args:
    ours: our trainer, whose batch, shape of the models and options of the
      optimisers this trainer takes.
    weights: the parameter trees of policy and value model.
    compiled: whether the losses are compiled by `torch.compile`.
    form: the implementation of AdamW, one of `FORMS`.
    microbatch: the number of rows of a microbatch; 0 = all rows.
    packed: whether several trajectories are packed into a row.

  Attributes:
    policy, value: the models as torch modules; their parameters have the names
      of Hugging Face.
  """

  def __init__(
    self,
    ours: learners.Trainer,
    weights: tuple[Any, Any],
    *,
    compiled: bool = False,
    form: str = FORMS[0],
    microbatch: int = 0,
    packed: bool = False,
  ):
    self.policy = _qwen2(ours.shape, weights[0])
    self.value = torch.nn.Module()
    self.value.model = _qwen2(ours.shape, weights[1]).model
    self.value.head = torch.nn.Linear(ours.shape.hidden_size, 1, bias=False)
    with torch.no_grad():
      self.value.head.weight.copy_(torch.tensor(weights[1]['scalar_head'].T))
    self._packed = packed
    self._data = _tensors(ours.batch, packed=packed)
    self._lengths_B = ours.batch.lengths_B
    self.split(microbatch)
    self._value_clip = ours.config.loss.value_clip
    self._losses = {'policy': self._policy_loss, 'value': self._value_loss}
    if compiled:
      self._losses = {
        name: torch.compile(loss, dynamic=False)
        for name, loss in self._losses.items()
      }
    self._options = {
      name: ours.config[f'{name}_optimizer'] for name in self._losses
    }
    self.use(form)

  def use(self, form: str) -> None:
    """Changes to another implementation of AdamW, with moments of zero."""
    self._foreach = form == 'foreach'
    self._optimizers = {
      name: torch.optim.AdamW(
        getattr(self, name).parameters(),
        lr=options.learning_rate,
        betas=(options.b1, options.b2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        **{form: True},
      )
      for name, options in self._options.items()
    }

  @property
  def rows(self) -> int:
    """The number of rows of the batch."""
    return len(self._data[0])

  def split(self, microbatch: int) -> None:
    """Splits the batch into microbatches.

    The loss of a microbatch is weighted by its share of the loss positions,
    which are the same for policy and value model.

    Args:
      microbatch: the number of rows of a microbatch; 0 = all rows.
    """
    size = microbatch or self.rows
    place = 2 + _FIELDS.index('loss_mask_BL')
    total = self._data[place].sum()
    self._microbatches = []
    for first in range(0, self.rows, size):
      data = [x[first : first + size] for x in self._data]
      if not self._packed:
        longest = int(self._lengths_B[first : first + size].max())
        data = [x[:, :longest].contiguous() for x in data[:2]] + [
          x[:, : longest - 1].contiguous() for x in data[2:]
        ]
        data[1] = None
      share = float(data[place].sum() / total)
      self._microbatches.append((share, data))

  def step(self) -> dict[str, float]:
    """Updates both models; returns losses and unclipped gradient norms."""
    metrics = {}
    for name, loss_of in self._losses.items():
      optimizer = self._optimizers[name]
      optimizer.zero_grad()
      total = 0.0
      for share, data in self._microbatches:
        loss = share * loss_of(*data)
        loss.backward()
        total += float(loss.detach())
      norm = torch.nn.utils.clip_grad_norm_(
        getattr(self, name).parameters(),
        self._options[name].max_grad_norm,
        foreach=self._foreach,
      )
      optimizer.step()
      metrics[f'{name}_loss'] = total
      metrics[f'{name}_norm'] = float(norm)
    return metrics

  def moments(self, name: str) -> dict[str, np.ndarray]:
    """Returns Adam's first moment of each parameter of a model."""
    state = self._optimizers[name].state
    return {
      key: state[parameter]['exp_avg'].numpy()
      for key, parameter in getattr(self, name).named_parameters()
    }

  def _policy_loss(
    self, tokens_BL, positions_BL, old_BL, advantages_BL, mask_BL, *_
  ):
    logits_BLV = self.policy(
      tokens_BL, position_ids=positions_BL, use_cache=False
    ).logits
    log_softmax_BLV = torch.log_softmax(logits_BLV, dim=-1)
    # The token ids are rolled, and the last column of the result is cut off.
    # To cut the logits instead would copy them.
    next_BL1 = tokens_BL.roll(-1, 1)[..., None]
    logprobs_BL = log_softmax_BLV.gather(-1, next_BL1)[:, :-1, 0]
    entropy_BL = -(log_softmax_BLV.exp() * log_softmax_BLV).sum(-1)[:, :-1]
    return torch_reference.policy_loss(
      logprobs_BL, old_BL, advantages_BL, entropy_BL, mask_BL
    )

  def _value_loss(self, tokens_BL, positions_BL, *others):
    *_, old_BL, returns_BL, mask_BL = others
    hidden_BLD = self.value.model(
      tokens_BL, position_ids=positions_BL, use_cache=False
    ).last_hidden_state
    values_BL = self.value.head(hidden_BLD)[:, :-1, 0]
    return torch_reference.value_loss(
      values_BL, old_BL, returns_BL, mask_BL, clip=self._value_clip
    )


class Fastest(NamedTuple):
  """The settings with which torch is the fastest.

  Attributes:
    threads: the number of threads.
    microbatch: the number of rows of a microbatch; 0 = all rows.
    form: the implementation of AdamW, one of `FORMS`.
  """

  threads: int
  microbatch: int
  form: str

  def __str__(self):
    rows = f'{self.microbatch} rows' if self.microbatch else 'all rows'
    return f'{self.threads}, {rows}, {self.form}'


def use_fastest(trainer: Trainer) -> Fastest:
  """Sets the threads, microbatch and AdamW with which torch is the fastest.

  The three settings are chosen one after the other. The time of a choice is the
  shorter of two samples. Small models are slower with more threads, especially
  on a busy machine.
  """
  case = measure.single(trainer.step)

  def fastest(choices, use):
    seconds = {}
    for choice in choices:
      use(choice)
      seconds[choice] = min(measure.once(case)[0] for _ in range(2))
    chosen = min(seconds, key=seconds.get)
    use(chosen)
    return chosen

  threads = fastest(
    dict.fromkeys((1, torch.get_num_threads())), torch.set_num_threads
  )
  rows = trainer.rows
  microbatch = fastest([x for x in MICROBATCHES if x < rows], trainer.split)
  return Fastest(threads, microbatch, fastest(FORMS, trainer.use))


def _qwen2(shape: model_config.ModelConfig, params) -> torch.nn.Module:
  with tempfile.TemporaryDirectory() as directory:
    export.export(directory, shape, params)
    return transformers.Qwen2ForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation='sdpa'
    )
