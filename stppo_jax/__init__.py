"""Train language models that search, with token- and turn-level PPO."""

__version__ = '0.2.0'


def console() -> None:
  """Runs the command `stppo`, which does the same as `python -m stppo_jax`."""
  import runpy
  import sys

  sys.path.insert(0, '')  # imports from the current folder, like `python -m`
  runpy.run_module('stppo_jax', run_name='__main__', alter_sys=True)
