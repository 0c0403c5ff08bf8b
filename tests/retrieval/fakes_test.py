"""The fake retriever follows the protocol of a retriever."""

import asyncio

import pytest

from stppo_jax import types
from stppo_jax.retrieval import fakes
from stppo_jax.retrieval import protocol

_PASSAGE = types.Passage('1', 'T', 'x')


def test_a_table_a_function_and_failures():
  async def run():
    table = fakes.FakeRetriever({'a': [_PASSAGE]}, fail_on=['bad'])
    assert await table.retrieve('a') == [_PASSAGE]
    assert await table.retrieve('b', corpus='worlds/1') == []
    with pytest.raises(protocol.RetrievalError, match='bad'):
      await table.retrieve('bad')
    assert table.calls == [('', 'a'), ('worlds/1', 'b'), ('', 'bad')]
    function = fakes.FakeRetriever(lambda q: [types.Passage(q, q, q)])
    assert (await function.retrieve('z'))[0].id == 'z'

  asyncio.run(run())
