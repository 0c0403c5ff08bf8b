"""The option blocks of an algorithm: which numbers and names each may hold.

A block is a frozen dataclass and a jax pytree: its numbers are leaves, its
names are static. The rules of its fields stand beside them.
"""

import dataclasses
import typing

import jax

from stppo_jax.rl import advantages
from stppo_jax.rl import aggregation
from stppo_jax.rl import bounds
from stppo_jax.rl import clipping_bias
from stppo_jax.rl import corrections
from stppo_jax.rl import group_advantages
from stppo_jax.rl import kl
from stppo_jax.rl import mismatch
from stppo_jax.rl import normalization
from stppo_jax.rl import objectives
from stppo_jax.rl import options
from stppo_jax.rl import ratios
from stppo_jax.rl import segments


def block(cls):
  """A frozen dataclass and pytree whose fields know their rules."""
  cls = dataclasses.dataclass(frozen=True)(cls)
  return jax.tree_util.register_dataclass(cls)


class Block:
  """Base of the option blocks."""

  def arguments(self) -> dict[str, typing.Any]:
    """All options by name, to be passed on as keywords."""
    return {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
    }


@block
class Ratio(Block):
  """Which tokens share a ratio, and where its gradient goes."""

  level: str = options.choice(segments.LEVELS)
  gradient: str = options.choice(ratios.GRADIENTS)
  reduce: str = options.choice(ratios.REDUCES)
  normalize: str = options.choice(normalization.NORMALIZATIONS)


@block
class FixedBounds(Block):
  """Options of `bounds.fixed`."""

  name: str = options.choice(bounds.BOUNDS)
  clip_low: float = options.number()
  clip_high: float = options.number()


@block
class EntropyScaledBounds(Block):
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


@block
class BalancedBounds(Block):
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
  def conflicts(low, high, low_limit, high_limit, low_step, high_step, **_):
    steps = {
      'low_step': (low_step, (low_limit - low) / low_step),
      'high_step': (high_step, (high_limit - high) / high_step),
    }
    for name, (step, count) in steps.items():
      if count > bounds.MAX_STEPS:
        rule = f'large enough to reach its limit in {bounds.MAX_STEPS} steps'
        yield name, step, rule
    if high < 1:
      yield 'high', high, '1 or greater'
    if low_limit < low:
      yield 'low_limit', low_limit, f'{low} or greater, as low is'
    if high_limit < high:
      yield 'high_limit', high_limit, f'{high} or greater, as high is'


@block
class Objective(Block):
  """What happens outside the bounds; an objective without options."""

  name: str = options.choice(objectives.OBJECTIVES)


@block
class DualClip(Block):
  """Options of `objectives.dual_clip`."""

  name: str = options.choice(objectives.OBJECTIVES)
  c: float = options.number(above=1.0)


@block
class ClippingBias(Block):
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


@block
class Tis(Block):
  """Options of `mismatch.tis`."""

  cap: float = options.number(above=0.0)
  level: str = options.choice(mismatch.LEVELS)
  truncated: str = options.choice(mismatch.TRUNCATED)


@block
class Mis(Block):
  """Options of `mismatch.mis`."""

  cap: float = options.number(above=0.0)
  level: str = options.choice(mismatch.LEVELS)


@block
class Icepop(Block):
  """Options of `mismatch.icepop`."""

  least: float = options.number(at_most=1.0)
  most: float = options.number()

  @staticmethod
  def conflicts(most, **_):
    if most < 1:
      yield 'most', most, '1 or greater'


@block
class GeoRs(Block):
  """Options of `mismatch.geo_rs`."""

  band: float = options.number()


@block
class Correction(Block):
  """How much each term is believed; the selected ones multiply."""

  names: tuple[str, ...] = options.choices(corrections.CORRECTIONS)
  clipping_bias: ClippingBias = options.nested(ClippingBias)
  tis: Tis = options.nested(Tis)
  mis: Mis = options.nested(Mis)
  icepop: Icepop = options.nested(Icepop)
  geo_rs: GeoRs = options.nested(GeoRs)


@block
class Aggregate(Block):
  """How tokens become a scalar; an aggregate without options."""

  name: str = options.choice(aggregation.AGGREGATES)


@block
class ConstantLength(Block):
  """Options of the aggregate of that name."""

  name: str = options.choice(aggregation.AGGREGATES)
  max_response_tokens: float = options.number(above=0.0)


@block
class Gae(Block):
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
  def conflicts(steps, observation_tokens, **_):
    if steps != 'token' and observation_tokens == 'included':
      rule = f"'skipped' when steps is {steps!r}"
      yield 'observation_tokens', observation_tokens, rule


@block
class MonteCarlo(Block):
  """Options of `advantages.monte_carlo`."""

  name: str = options.choice(advantages.ADVANTAGES)
  gamma: float = options.number(at_most=1.0)
  whiten: str = options.choice(advantages.WHITENS)


@block
class Group(Block):
  """Options of `group_advantages.{group_centered,leave_one_out}`."""

  name: str = options.choice(advantages.ADVANTAGES)
  whiten: str = options.choice(advantages.WHITENS)


@block
class GroupNormalized(Block):
  """Options of `group_advantages.group_normalized`."""

  name: str = options.choice(advantages.ADVANTAGES)
  epsilon: float = options.number(above=0.0)
  whiten: str = options.choice(advantages.WHITENS)


@block
class TurnGroup(Block):
  """Options of `group_advantages.turn_group`."""

  name: str = options.choice(advantages.ADVANTAGES)
  turn_weight: float = options.number()
  epsilon: float = options.number(above=0.0)
  whiten: str = options.choice(advantages.WHITENS)


@block
class Gigpo(Block):
  """Options of `group_advantages.gigpo`."""

  name: str = options.choice(advantages.ADVANTAGES)
  omega: float = options.number()
  gamma: float = options.number(at_most=1.0)
  normalize: str = options.choice(group_advantages.NORMALIZATIONS)
  epsilon: float = options.number(above=0.0)
  whiten: str = options.choice(advantages.WHITENS)


@block
class Kl(Block):
  """Where the divergence from the reference enters, and how."""

  where: str = options.choice(kl.KL_PLACES)
  estimator: str = options.choice(kl.KL_ESTIMATORS)
  coefficient: float = options.number()
  controller: str = options.choice(kl.CONTROLLERS)
  target: float = options.number(above=0.0)
  horizon: float = options.number(above=0.0)


# A block whose options depend on its name is a table of dataclasses.
BOUNDS = {
  'fixed': FixedBounds,
  'entropy_scaled': EntropyScaledBounds,
  'balanced': BalancedBounds,
}
OBJECTIVES = {name: Objective for name in objectives.OBJECTIVES} | {
  'dual_clip': DualClip
}
AGGREGATES = {name: Aggregate for name in aggregation.AGGREGATES} | {
  'constant_length': ConstantLength
}
ADVANTAGES = {
  'gae': Gae,
  'monte_carlo': MonteCarlo,
  'group_normalized': GroupNormalized,
  'group_centered': Group,
  'leave_one_out': Group,
  'turn_group': TurnGroup,
  'gigpo': Gigpo,
}
