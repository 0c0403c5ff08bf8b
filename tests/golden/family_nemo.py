"""Makes tests/golden/family/nemo.npz: GAE by length of NeMo-RL for the batch.

    git clone https://github.com/NVIDIA-NeMo/RL
    git -C RL checkout 7ea279abfbeb698b092856d0dab61e7cf39bc909
    PYTHONPATH=RL python tests/golden/family_nemo.py

It needs numpy, torch and pydantic. The estimator imports much of the package
for other estimators, which stands aside here.
"""

import importlib
import pathlib
import sys
from unittest import mock

import family_batch
import torch

OPTIONS = family_batch.OPTIONS


def _estimators():
  """Returns NeMo-RL's module of estimators, with stand-ins for the rest."""
  root = next(x for x in sys.path if x.endswith('RL'))
  for name in ('', '.algorithms', '.algorithms.loss', '.algorithms.utils'):
    folder = pathlib.Path(root, f'nemo_rl{name}'.replace('.', '/'))
    sys.modules[f'nemo_rl{name}'] = mock.MagicMock(
      __path__=[str(folder)], __spec__=None
    )
  return importlib.import_module('nemo_rl.algorithms.advantage_estimator')


def _advantages(x):
  estimator = _estimators().GeneralizedAdvantageEstimator(
    {
      'gae_lambda': None,
      'gae_gamma': OPTIONS['gamma'],
      'normalize_advantages': False,
      'gae_lambda_value': OPTIONS['lambda_'],
      'gae_lambda_policy': None,
      'length_adaptive_alpha': OPTIONS['alpha'],
    },
    mock.MagicMock(),
  )
  mask_BL = x.loss_mask_BL
  # Its public door takes the outcome only; rewards of tokens go behind it. It
  # forms lambda in float32, whatever the rest is in.
  with (
    mock.patch.object(
      estimator, '_build_token_level_rewards', lambda *_: x.rewards_BL * mask_BL
    ),
    mock.patch.object(torch.Tensor, 'float', torch.Tensor.double),
  ):
    return estimator.compute_advantage(None, None, mask_BL, x.old_values_BL)


def main():
  arrays = family_batch.make_arrays()
  advantages, returns = _advantages(family_batch.tensors(arrays))
  results = {'advantages_BL': advantages, 'returns_BL': returns}
  family_batch.save('nemo', {'gae_by_length': results})


if __name__ == '__main__':
  main()
