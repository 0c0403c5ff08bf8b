"""Calls of the lab's commands, in this process."""

import json

import numpy as np

from stppo_jax import __main__

TAU = 'correction.clipping_bias.tau'
# A config file that gives its algorithms other options than the table.
CONFIG = """
from stppo_jax.configs import base
def get_config(algorithm='st_ppo'):
  config = base.get_config(algorithm)
  config.algorithm.correction.clipping_bias.tau = 1.1
  config.algorithm.bounds.clip_low = 0.05
  if algorithm == 'st_ppo':
    config.algorithm.advantage.lambda_ = 0.5
  return config
"""


def lab(*flags) -> int:
  """Returns the exit code of `lab` with these flags."""
  return __main__.main(['lab', *map(str, flags)])


def metrics(capsys, *flags) -> dict:
  """Returns the JSON that a command prints; it must print nothing else."""
  values, warnings = metrics_and_warnings(capsys, *flags)
  assert warnings == ''
  return values


def metrics_and_warnings(capsys, *flags) -> tuple[dict, str]:
  """Returns the JSON that a command prints, and its warnings."""
  code = lab(*flags)
  out, err = capsys.readouterr()
  assert (code, out.count('\n')) == (0, 1), err

  def refuse(constant):  # NaN and Infinity are not JSON
    raise AssertionError(constant)

  return json.loads(out, parse_constant=refuse), err


def arrays(path) -> dict[str, np.ndarray]:
  """Returns all arrays of an npz file."""
  with np.load(path, allow_pickle=False) as archive:
    return dict(archive)
