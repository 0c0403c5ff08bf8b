"""Writes docs/algorithms.md and docs/choices/ from the table: `make docs`."""

import pathlib
from typing import Any

from docs import algorithm_pages
from docs import descriptions
from docs import sources
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import defaults

FOLDER = pathlib.Path(__file__).parent


def pages() -> dict[pathlib.Path, str]:
  """Returns the text of every generated page."""
  config: Any = base.get_config()
  made = algorithm_pages.pages(
    algorithms.ALGORITHMS,
    defaults.DEFAULTS,
    config.preference.to_dict(),
    descriptions,
    sources,
  )
  return {FOLDER / path: text for path, text in made.items()}


if __name__ == '__main__':
  for path, text in pages().items():
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding='utf-8')
