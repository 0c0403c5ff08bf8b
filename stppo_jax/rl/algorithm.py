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
from stppo_jax.rl import bounds
from stppo_jax.rl import clipping_bias
from stppo_jax.rl import corrections
from stppo_jax.rl import kl
from stppo_jax.rl import mismatch
from stppo_jax.rl import normalization
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
  normalize: str = options.choice(normalization.NORMALIZATIONS)


@_block
class FixedBounds(_Block):
  """Options of `bounds.fixed`."""

  name: str = options.choice(bounds.BOUNDS)
  clip_low: float = options.number()
  clip_high: float = options.number()


@_block
class EntropyScaledBounds(_Block):
  """Options of `bounds.entropy_scaled`."""

  name: str = options.choice(bounds.BOUNDS)
  clip_low: float = options.number()
  clip_high: float = options.number()
  least: float = options.number()
  most: float = options.number()

  @staticmethod
  def conflicts(least, most, **_):
    if most < least:
      yield 'most', most, f'{least} or greater, as least is'


@_block
class BalancedBounds(_Block):
  """Options of `bounds.balanced`."""

  name: str = options.choice(bounds.BOUNDS)
  low: float = options.number(at_most=1.0)
  high: float = options.number()
  low_step: float = options.number(above=0.0)
  high_step: float = options.number(above=0.0)
  low_limit: float = options.number(at_most=1.0)
  high_limit: float = options.number()
  positive_share: float = options.number(at_most=1.0)

  @staticmethod
  def conflicts(low, high, low_limit, high_limit, **_):
    if high < 1:
      yield 'high', high, '1 or greater'
    if low_limit < low:
      yield 'low_limit', low_limit, f'{low} or greater, as low is'
    if high_limit < high:
      yield 'high_limit', high_limit, f'{high} or greater, as high is'


@_block
class Objective(_Block):
  """What happens outside the bounds; an objective without options."""

  name: str = options.choice(objectives.OBJECTIVES)


@_block
class DualClip(_Block):
  """Options of `objectives.dual_clip`."""

  name: str = options.choice(objectives.OBJECTIVES)
  c: float = options.number(above=1.0)


@_block
class ClippingBias(_Block):
  """Options of `clipping_bias.clipping_bias`."""

  norm: str = options.choice(clipping_bias.NORMS)
  tau: float = options.number(above=0.0, infinite=True)
  scope: str = options.choice(clipping_bias.SCOPES)
  level: str = options.choice(clipping_bias.RATIO_LEVELS)
  applies_to: tuple[str, ...] = options.choices(
    clipping_bias.LOSSES, at_least=1
  )
  floor: float = options.number(above=0.0)

  @staticmethod
  def conflicts(norm, applies_to, **_):
    if norm == 'gradient' and set(applies_to) != {'policy'}:
      yield 'applies_to', applies_to, "('policy',) when norm is 'gradient'"


@_block
class Tis(_Block):
  """Options of `mismatch.tis`."""

  cap: float = options.number(above=0.0)
  level: str = options.choice(mismatch.LEVELS)
  truncated: str = options.choice(mismatch.TRUNCATED)


@_block
class Mis(_Block):
  """Options of `mismatch.mis`."""

  cap: float = options.number(above=0.0)
  level: str = options.choice(mismatch.LEVELS)


@_block
class Icepop(_Block):
  """Options of `mismatch.icepop`."""

  least: float = options.number(at_most=1.0)
  most: float = options.number()

  @staticmethod
  def conflicts(most, **_):
    if most < 1:
      yield 'most', most, '1 or greater'


@_block
class GeoRs(_Block):
  """Options of `mismatch.geo_rs`."""

  band: float = options.number()


@_block
class Correction(_Block):
  """How much each term is believed; the selected ones multiply."""

  names: tuple[str, ...] = options.choices(corrections.CORRECTIONS)
  clipping_bias: ClippingBias = options.nested(ClippingBias)
  tis: Tis = options.nested(Tis)
  mis: Mis = options.nested(Mis)
  icepop: Icepop = options.nested(Icepop)
  geo_rs: GeoRs = options.nested(GeoRs)


@_block
class Aggregate(_Block):
  """How tokens become a scalar; an aggregate without options."""

  name: str = options.choice(aggregation.AGGREGATES)


@_block
class ConstantLength(_Block):
  """Options of the aggregate of that name."""

  name: str = options.choice(aggregation.AGGREGATES)
  max_response_tokens: float = options.number(above=0.0)


@_block
class Gae(_Block):
  """Options of `advantages.gae_estimator`."""

  name: str = options.choice(advantages.ADVANTAGES)
  gamma: float = options.number(at_most=1.0)
  lambda_: float = options.number(at_most=1.0)
  gamma_turn: float = options.number(at_most=1.0)
  lambda_turn: float = options.number(at_most=1.0)
  steps: str = options.choice(advantages.STEPS)
  observation_tokens: str = options.choice(advantages.OBSERVATION_TOKENS)
  whiten: str = options.choice(advantages.WHITENS)

  @staticmethod
  def conflicts(steps, observation_tokens, whiten, **_):
    included = observation_tokens == 'included'
    if steps != 'token' and included:
      rule = f"'skipped' when steps is {steps!r}"
      yield 'observation_tokens', observation_tokens, rule
    if whiten == 'all' and not included:
      rule = "none or policy when observation_tokens is 'skipped'"
      yield 'whiten', whiten, rule


@_block
class MonteCarlo(_Block):
  """Options of `advantages.monte_carlo`."""

  name: str = options.choice(advantages.ADVANTAGES)
  gamma: float = options.number(at_most=1.0)
  whiten: str = options.choice(('none', 'policy'))


@_block
class Group(_Block):
  """Options of `group_advantages.{group_centered,leave_one_out}`."""

  name: str = options.choice(advantages.ADVANTAGES)
  whiten: str = options.choice(advantages.WHITENS)


@_block
class GroupNormalized(_Block):
  """Options of `group_advantages.group_normalized`."""

  name: str = options.choice(advantages.ADVANTAGES)
  epsilon: float = options.number(above=0.0)
  whiten: str = options.choice(advantages.WHITENS)


@_block
class TurnGroup(_Block):
  """Options of `group_advantages.turn_group`."""

  name: str = options.choice(advantages.ADVANTAGES)
  turn_weight: float = options.number()
  epsilon: float = options.number(above=0.0)
  whiten: str = options.choice(advantages.WHITENS)


@_block
class Gigpo(_Block):
  """Options of `group_advantages.gigpo`."""

  name: str = options.choice(advantages.ADVANTAGES)
  omega: float = options.number()
  gamma: float = options.number(at_most=1.0)
  normalize: str = options.choice(('std', 'none'))
  epsilon: float = options.number(above=0.0)
  whiten: str = options.choice(advantages.WHITENS)


@_block
class Kl(_Block):
  """Where the divergence from the reference enters, and how."""

  where: str = options.choice(kl.KL_PLACES)
  estimator: str = options.choice(kl.KL_ESTIMATORS)
  coefficient: float = options.number()
  controller: str = options.choice(kl.CONTROLLERS)
  target: float = options.number(above=0.0)
  horizon: float = options.number(above=0.0)


# A block whose options depend on its name is a table of dataclasses.
BOUNDS_BLOCKS = {
  'fixed': FixedBounds,
  'entropy_scaled': EntropyScaledBounds,
  'balanced': BalancedBounds,
}
OBJECTIVE_BLOCKS = {name: Objective for name in objectives.OBJECTIVES} | {
  'dual_clip': DualClip
}
AGGREGATE_BLOCKS = {name: Aggregate for name in aggregation.AGGREGATES} | {
  'constant_length': ConstantLength
}
ADVANTAGE_BLOCKS = {
  'gae': Gae,
  'monte_carlo': MonteCarlo,
  'group_normalized': GroupNormalized,
  'group_centered': Group,
  'leave_one_out': Group,
  'turn_group': TurnGroup,
  'gigpo': Gigpo,
}


@_block
class Algorithm(_Block):
  """A row; see `configs/algorithms.py` for the meaning of every option."""

  ratio: Ratio = options.nested(Ratio)
  bounds: _Block = options.nested(BOUNDS_BLOCKS)
  objective: _Block = options.nested(OBJECTIVE_BLOCKS)
  correction: Correction = options.nested(Correction)
  aggregate: _Block = options.nested(AGGREGATE_BLOCKS)
  advantage: _Block = options.nested(ADVANTAGE_BLOCKS)
  kl: Kl = options.nested(Kl)

  @property
  def uses_values(self) -> bool:
    """Whether the advantages need a value model."""
    return self.advantage.name in advantages.USES_VALUES

  @property
  def needs(self) -> frozenset[str]:
    """The optional arrays of `TokenBatch` that the row reads."""
    found = set()
    if self.ratio.level == 'sentence':
      found.add('sentence_ids_BL')
    if self.kl.where == 'loss':
      found.add('ref_logprobs_BL')
    if set(self.correction.names) & mismatch.NAMES:
      found.add('sampler_logprobs_BL')
    return frozenset(found)


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
