"""Rules for the values of single config keys, with their descriptions."""

import math
import re

from stppo_jax import settings


def one_of(*choices: str) -> settings.Rule:
  """Returns the rule that a value must be one of the choices."""
  return settings.Rule(
    lambda value: value in choices, 'one of ' + ', '.join(choices)
  )


def _compiles(pattern: str) -> bool:
  try:
    re.compile(pattern)
  except re.error:
    return False
  return True


def _is_pattern(text: str, number: str) -> bool:
  match = re.fullmatch(f'(.+)=({number})', str(text))
  return bool(match) and _compiles(match[1]) and float(match[2]) > 0


def some_of(*choices: str) -> settings.Rule:
  """Returns the rule that every element of a value must be a choice."""
  return settings.Rule(
    lambda names: set(names) <= set(choices), 'some of ' + ', '.join(choices)
  )


POSITIVE = settings.Rule(lambda x: 0 < x < math.inf, 'greater than 0')
AT_LEAST_2 = settings.Rule(lambda x: x >= 2, '2 or greater')
NOT_NEGATIVE = settings.Rule(lambda x: 0 <= x < math.inf, '0 or greater')
# jax takes no larger seed.
SEED = settings.Rule(lambda x: 0 <= x < 2**63, '0 or greater, and below 2**63')
STEPS = settings.Rule(
  lambda x: (
    len(x) == 2 and all(type(n) is int for n in x) and 0 <= x[0] <= x[1]
  ),
  'two whole numbers, such as (3, 5): the first step to trace, and the step '
  'before which tracing ends; the second must not be smaller than the first',
)
FRACTION = settings.Rule(lambda x: 0 <= x <= 1, 'in [0, 1]')
POSITIVE_FRACTION = settings.Rule(lambda x: 0 < x <= 1, 'in (0, 1]')
BELOW_1 = settings.Rule(lambda x: 0 <= x < 1, 'in [0, 1)')
FINITE = settings.Rule(math.isfinite, 'a finite number')
AXIS = settings.Rule(
  lambda x: x == -1 or x > 0, 'greater than 0, or -1 for all remaining devices'
)
RANGE = settings.Rule(
  lambda x: (
    not x
    or (
      len(x) == 2
      and all(type(y) in (int, float) and math.isfinite(y) for y in x)
      and x[0] < x[1]
    )
  ),
  'a smaller and a larger number, such as (0.0, 1.0), or ()',
)
AT_LEAST_2 = settings.Rule(lambda x: x >= 2, '2 or greater')
EVEN = settings.Rule(lambda x: x > 0 and x % 2 == 0, 'even and greater than 0')
HOPS = settings.Rule(
  lambda x: len(x) > 0 and all(h in (1, 2, 3) for h in x),
  'some of 1, 2 and 3, such as (1, 2)',
)
TOKEN_IDS = settings.Rule(
  lambda ids: all(type(i) is int and i >= 0 for i in ids),
  'token ids, such as (2, 7)',
)
NUMBER = settings.Rule(lambda x: not math.isnan(x), 'a number, inf or -inf')
REGEX = settings.Rule(_compiles, 'a regular expression')
LINE = settings.Rule(str.isprintable, 'one printable line')
ABOVE_256 = settings.Rule(
  lambda x: x > 256, 'greater than 256, the number of bytes'
)
LIMIT = settings.Rule(
  lambda x: x == -1 or 0 <= x < math.inf, '0 or greater, or -1'
)
TEXT = settings.Rule(
  lambda x: x == x.strip(), 'a text without white space around it'
)
SWITCH = one_of('auto', 'on', 'off')
TURN_SWAPS = one_of('never', 'keep', 'recompute')
OPTIMIZER = one_of('adamw', 'adamw_bfloat16', 'adafactor', 'muon')
RANKS = settings.Rule(
  lambda x: all(_is_pattern(text, r'\d+') for text in x),
  "texts EXPRESSION=N with whole numbers N above 0, such as ('down_proj$=8',)",
)
ALPHAS = settings.Rule(
  lambda x: all(_is_pattern(text, r'\d+(\.\d+)?(e-?\d+)?') for text in x),
  "texts EXPRESSION=X with numbers X above 0, such as ('down_proj$=8.0',)",
)
TRACKERS = some_of('wandb', 'trackio')
SERVERS = settings.Rule(
  lambda servers: all(isinstance(x, str) and x.strip() for x in servers),
  "addresses or commands, such as ('http://localhost:8000/mcp',)",
)
