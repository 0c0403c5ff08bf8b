"""Writes docs/algorithms.md from the table: `make docs`."""

import pathlib

from docs import texts
from stppo_jax.analysis import algorithm_docs
from stppo_jax.configs import algorithms
from stppo_jax.configs import base

PATH = pathlib.Path(__file__).with_name('algorithms.md')


def text() -> str:
  """The document."""
  return algorithm_docs.markdown(
    algorithms.ALGORITHMS,
    algorithms.BLOCKS,
    algorithms.GROUP_ADVANTAGES,
    base.get_config().preference.to_dict(),
    texts,
  )


if __name__ == '__main__':
  PATH.write_text(text(), encoding='utf-8')
