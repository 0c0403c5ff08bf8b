"""The engine reports the experts that a whole pass over the dialogue visits."""

import jax
import numpy as np
import pytest

from tests.models import tiny
from tests.sampling import tiny_engine

_MODEL = tiny.model(**tiny.MIXED)
_ROWS, _GROUP = 9, 3


def _dialogues(**options):
  """Returns the dialogue of each row, and the experts that `close` reported."""
  engine, _ = tiny_engine.new_engine(
    model=_MODEL,
    slots=3,  # odd: both modes have the same programs
    early_exit=0.25,
    **options,
  )
  reported, close = {}, engine.close
  engine.close = lambda row: reported.setdefault(row, close(row))
  dialogues = tiny_engine.dialogues(engine, _ROWS, group_size=_GROUP, delays=1)
  return dialogues, reported


@pytest.mark.slow
@pytest.mark.parametrize('deterministic', (True, False))
def test_the_experts_of_every_token_are_reported(deterministic):
  # Slots are used again, and two of three prompts are copied.
  dialogues, reported = _dialogues(
    deterministic=deterministic, return_expert_ids=True
  )
  assert dialogues.keys() == reported.keys() == set(range(_ROWS))
  tokens = np.zeros((_ROWS, tiny_engine.MAX_LENGTH), np.int32)
  for row, dialogue in dialogues.items():
    tokens[row, : len(dialogue.tokens)] = dialogue.tokens
  _, routing = jax.jit(_MODEL.hidden_and_routing)(tiny.params(_MODEL), tokens)
  for row, dialogue in dialogues.items():
    count = len(dialogue.tokens)
    assert reported[row].dtype == np.int16
    np.testing.assert_array_equal(
      reported[row], routing.expert_ids[row, :count]
    )


@pytest.mark.slow
def test_experts_are_reported_on_request_only():
  _, reported = _dialogues()
  assert set(reported.values()) == {None}
