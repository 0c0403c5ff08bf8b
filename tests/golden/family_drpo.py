"""Makes tests/golden/family/drpo.npz: the loss of DRPO for the batch.

    git clone https://github.com/Tencent-Hunyuan/UniRL
    git -C UniRL checkout 1a7b501e8fe8517b432a130220d2ff462f9b5afa
    python tests/golden/family_drpo.py UniRL/unirl/algorithms/drpo.py

Nothing is used of what that file imports of its package.
"""

import importlib.util
import sys
import types

import family_batch


def _module(path):
  """Returns the module in a file, with empty classes for all it imports."""
  for name in ('', '.algorithms', '.algorithms.base', '.algorithms.grpo') + (
    *('.types', '.types.conditions', '.types.segments'),
    '.types.segments.text',
  ):
    module = types.ModuleType(f'unirl{name}')
    module.__path__ = []
    module.__getattr__ = lambda name: type(name, (), {})
    sys.modules[f'unirl{name}'] = module
  spec = importlib.util.spec_from_file_location('unirl.algorithms.drpo', path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


def main(path):
  module = _module(path)

  def loss(x):
    mask = x.loss_mask_BL > 0
    losses, _ = module._drpo_loss(
      new_logp=x.logprobs_BL[mask],
      old_logp=x.old_logprobs_BL[mask],
      advantages=x.advantages_BL[mask],
      epsilon=family_batch.OPTIONS['threshold'],
    )
    return losses.mean()

  x = family_batch.tensors(family_batch.make_arrays())
  results = family_batch.differentiated(loss, x)
  family_batch.save('drpo', {'drpo': results})


if __name__ == '__main__':
  main(sys.argv[1])
