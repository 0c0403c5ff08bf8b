"""Writes docs/algorithms.md from the table: `make docs`."""

import pathlib

from configs import algorithms
from configs import base
from configs import descriptions
from stppo_jax.analysis import algorithm_docs

PATH = pathlib.Path(__file__).with_name('algorithms.md')


def text() -> str:
  """The document."""
  return algorithm_docs.markdown(
    algorithms.ALGORITHMS,
    algorithms.BLOCKS,
    algorithms.GROUP_ADVANTAGES,
    base.get_config().preference.to_dict(),
    descriptions,
  )


if __name__ == '__main__':
  PATH.write_text(text(), encoding='utf-8')
