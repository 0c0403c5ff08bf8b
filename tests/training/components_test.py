"""The retriever that a config describes: recorded, replayed, with faults."""

import asyncio

from stppo_jax.training import components
from tests.training import runs

_QUERIES = ['capital', 'river of the north', 'nothing at all xyzzy']


def _ask(**changes):
  """Returns the answers to questions about worlds, and the statistics."""
  config = runs.config(**changes)
  questions = components.build_questions(config)
  with components.build_services(config, questions) as services:
    retriever = services.retriever
    assert retriever is not None

    async def ask():
      return await asyncio.gather(
        *(
          retriever.retrieve(query, corpus=f'worlds/{world}')
          for query in _QUERIES
          for world in (0, 1)
        ),
        return_exceptions=True,
      )

    return services.loop.run(ask()), retriever.statistics()
