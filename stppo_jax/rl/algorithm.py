"""An algorithm is a row of data: five axes, an advantage and a KL term.

`build_algorithm` turns a row of `configs/algorithms.py` into dataclasses whose
numbers are the leaves of a jax pytree (another epsilon does not recompile)
and whose names are static. The functions behind the names are picked from
dict literals; nothing asks for a row's name.
"""

from collections.abc import Mapping
import dataclasses
import typing

import jax

from stppo_jax.rl import advantages
from stppo_jax.rl import aggregation
from stppo_jax.rl import corrections
from stppo_jax.rl import kl
from stppo_jax.rl import objectives
from stppo_jax.rl import options
from stppo_jax.rl import ratios
from stppo_jax.rl import segments


def _block(cls):
  """A frozen dataclass and pytree whose fields know their rules."""
  cls = dataclasses.dataclass(frozen=True)(cls)
  return jax.tree_util.register_dataclass(cls)


class _Block:
  """Base of the option blocks."""

  def arguments(self) -> dict[str, typing.Any]:
    """All options by name, to be passed on as keywords."""
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
    }


@_block
class Ratio(_Block):
  """Which tokens share a ratio, and where its gradient goes."""

  level: str = options.choice(segments.LEVELS)
  gradient: str = options.choice(ratios.GRADIENTS)
  reduce: str = options.choice(ratios.REDUCES)


@_block
class FixedBounds(_Block):
  """[1 - clip_low, 1 + clip_high]."""

  name: str = options.choice(('fixed',))
  clip_low: float = options.number()
  clip_high: float = options.number()


@_block
class Objective(_Block):
  """What happens outside the bounds."""

  name: str = options.choice(objectives.OBJECTIVES)


@_block
class ClippingBias(_Block):
  """Options of `corrections.clipping_bias`."""

  norm: str = options.choice(corrections.NORMS)
  tau: float = options.number(above=0.0, infinite=True)
  scope: str = options.choice(corrections.SCOPES)
  level: str = options.choice(corrections.RATIO_LEVELS)
  applies_to: tuple[str, ...] = options.choices(corrections.LOSSES, at_least=1)
  floor: float = options.number(above=0.0)

  @staticmethod
  def conflicts(norm, applies_to, **_):
    if norm == 'gradient' and set(applies_to) != {'policy'}:
      yield 'applies_to', applies_to, "('policy',) when norm is 'gradient'"


@_block
class Correction(_Block):
  """How much each term is believed; the selected ones multiply."""

  names: tuple[str, ...] = options.choices(corrections.CORRECTIONS)
  clipping_bias: ClippingBias = options.nested(ClippingBias)


@_block
class Aggregate(_Block):
  """How tokens become a scalar."""

  name: str = options.choice(aggregation.AGGREGATES)


@_block
class Gae(_Block):
  """Options of `advantages.estimate_advantages` with the GAE estimator."""

  name: str = options.choice(('gae',))
  gamma: float = options.number(at_most=1.0)
  lambda_: float = options.number(at_most=1.0)
  steps: str = options.choice(advantages.STEPS)
  observation_tokens: str = options.choice(advantages.OBSERVATION_TOKENS)
  whiten: str = options.choice(advantages.WHITENS)

  @staticmethod
  def conflicts(steps, observation_tokens, **_):
    if steps == 'turn' and observation_tokens != 'skipped':
      yield (
        'observation_tokens',
        observation_tokens,
        "'skipped' when steps is 'turn'",
      )


@_block
class Kl(_Block):
  """Where the divergence from the reference enters, and how."""

  where: str = options.choice(kl.KL_PLACES)
  estimator: str = options.choice(kl.KL_ESTIMATORS)
  coefficient: float = options.number()


# A block whose options depend on its name is a table of dataclasses.
BOUNDS_BLOCKS = {'fixed': FixedBounds}
ADVANTAGE_BLOCKS = {'gae': Gae}


@_block
class Algorithm(_Block):
  """A row; see `configs/algorithms.py` for the meaning of every option."""

  ratio: Ratio = options.nested(Ratio)
  bounds: FixedBounds = options.nested(BOUNDS_BLOCKS)
  objective: Objective = options.nested(Objective)
  correction: Correction = options.nested(Correction)
  aggregate: Aggregate = options.nested(Aggregate)
  advantage: Gae = options.nested(ADVANTAGE_BLOCKS)
  kl: Kl = options.nested(Kl)


def check_algorithm(row: Mapping) -> list[str]:
  """All problems of a row, one line each; empty if there are none.

  Args:
    row: nested mappings, such as a `ConfigDict` or a row of the table.

  Returns:
    Lines such as `algorithm.bounds.clip_low=-1: must be a finite number >= 0`.
  """
  return options.check(Algorithm, row, 'algorithm')


def build_algorithm(row: Mapping) -> Algorithm:
  """The algorithm of a row.

  Raises:
    ValueError: every problem of `check_algorithm`, one line each.
  """
  problems = check_algorithm(row)
  if problems:
    raise ValueError('\n'.join(problems))
  return options.build(Algorithm, row)
