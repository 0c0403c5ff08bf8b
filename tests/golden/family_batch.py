"""The batch and the options of all files in tests/golden/family."""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch

FOLDER = pathlib.Path(__file__).parent / 'family'
B, L, T = 8, 32, 4
FAILED_ROW = 7
NEVER = 1e9  # a dual clip, or a cap, that no number reaches

# The options of every implementation that has them.
OPTIONS = {
  'low': 0.2,
  'high': 0.28,
  'sequence_low': 0.05,
  'sequence_high': 0.08,
  'dual_clip': 2.0,
  'kl_coefficient': 0.05,
  'entropy_coefficient': 0.01,
  'cap': 1.5,
  'icepop_least': 0.7,
  'icepop_most': 1.4,
  'band': 0.05,
  'minirl_cap': 2.0,
  'geometric_clip': 0.4,
  'probability_low': 0.1,
  'probability_high': 0.15,
  'divergence_low': 0.02,
  'divergence_high': 0.03,
  'weight_cap': 1.4,
  'tau_positive': 1.0,
  'tau_negative': 1.5,
  'kl_cov_share': 0.1,
  'kl_cov_coefficient': 0.7,
  'clip_cov_least': 0.2,
  'clip_cov_most': 1.0,
  'gamma_positive': (2.0, 3.0),
  'gamma_negative': (3.0, 2.0),
  'value_clip': 0.5,
  'max_response_tokens': 100,
  'gamma': 0.97,
  'lambda_': 0.9,
  'alpha': 0.3,
  'threshold': 0.3,
  'turn_weight': 0.3,
  'history': 2,
}


def _layout(rng):
  """Returns turns of 1 to 7 tokens with observations of 1 to 2 between."""
  turn_ids_BL = np.zeros((B, L), np.int32)
  for b in range(B):
    start = rng.integers(0, 3)
    for turn in range(1, rng.integers(2, T + 1) + 1):
      size = rng.integers(1, 8)
      turn_ids_BL[b, start : start + size] = turn
      start += size + rng.integers(1, 3)
  loss_mask_BL = turn_ids_BL > 0
  loss_mask_BL[0, np.flatnonzero(loss_mask_BL[0])[1]] = False
  loss_mask_BL[FAILED_ROW] = False
  return turn_ids_BL, loss_mask_BL


def make_arrays():
  """Returns the inputs by our names; they are finite everywhere."""
  rng = np.random.default_rng(20)
  turn_ids_BL, loss_mask_BL = _layout(rng)
  normal = lambda scale=1.0: scale * rng.normal(size=(B, L))
  old_BL = -np.abs(normal())
  return {
    'turn_ids_BL': turn_ids_BL,
    'loss_mask_BL': loss_mask_BL,
    'old_logprobs_BL': old_BL,
    'logprobs_BL': old_BL + normal(0.6),
    'sampler_logprobs_BL': old_BL + normal(0.3),
    'ref_logprobs_BL': old_BL + normal(0.3),
    'entropy_BL': np.abs(normal()),
    'advantages_BL': normal(),
    'advantages_B': rng.normal(size=B),  # one for the whole row
    'values_BL': normal(),
    'old_values_BL': normal(),
    'rewards_BL': normal(),
    'returns_BL': normal(),
    # Two questions with three trajectories, one with one, and a failed row.
    'group_ids_B': np.asarray([0, 0, 0, 1, 1, 1, 2, 3], np.int32),
  }


def tensors(arrays):
  """Returns the arrays as attributes, the mask as numbers."""
  tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
  tensors['loss_mask_BL'] = tensors['loss_mask_BL'].to(torch.float64)
  return types.SimpleNamespace(**tensors)


def module_of_verl(path, **names):
  """Returns the module in a file that imports verl, of which it needs little.

  Args:
    path: the path of the file.
    **names: what it finds in `verl`.
  """
  functional = types.SimpleNamespace(
    masked_mean=lambda x, mask: (x * mask).sum() / mask.sum()
  )
  for name in ('verl', 'verl.utils', 'verl.utils.torch_functional'):
    sys.modules[name] = types.ModuleType(name)
  vars(sys.modules['verl']).update(names)
  vars(sys.modules['verl.utils.torch_functional']).update(vars(functional))
  spec = importlib.util.spec_from_file_location('module', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def turns(arrays):
  """Yields row, turn, its places and the sum of its rewards, in order."""
  mask_BL, ids_BL = arrays['loss_mask_BL'], arrays['turn_ids_BL']
  for b in range(B):
    for turn in sorted(set(ids_BL[b][mask_BL[b]])):
      places = np.flatnonzero(mask_BL[b] & (ids_BL[b] == turn))
      yield b, int(turn), places, arrays['rewards_BL'][b, places].sum()


def by_turn(x):
  """Returns arrays [turns, L] in which every row has the tokens of one turn."""
  written = torch.where(x.loss_mask_BL > 0, x.turn_ids_BL, 0)
  pairs = [
    (b, turn)
    for b in range(B)
    for turn in range(1, T + 1)
    if (written[b] == turn).any()
  ]
  rows = torch.tensor([b for b, _ in pairs])
  turns = torch.tensor([turn for _, turn in pairs])
  cut = {
    name: array[rows] for name, array in vars(x).items() if array.ndim == 2
  }
  cut['loss_mask_BL'] = (written[rows] == turns[:, None]).to(torch.float64)
  return types.SimpleNamespace(**cut)


def differentiated(loss, x, name='logprobs_BL'):
  """Returns a loss and its gradient with respect to an array."""
  at = getattr(x, name).clone().requires_grad_()
  value = loss(types.SimpleNamespace(**{**vars(x), name: at}))
  (gradient,) = torch.autograd.grad(value, at)
  return {'loss': value.detach().numpy(), 'gradient_BL': gradient.numpy()}


def save(source, cases):
  """Saves arrays by case and name as the file of a source."""
  numbers = {
    f'{case}.{name}': np.asarray(x)
    for case, parts in cases.items()
    for name, x in parts.items()
  }
  np.savez(FOLDER / f'{source}.npz', **numbers)
