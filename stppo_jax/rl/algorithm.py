"""An algorithm is a row of data: five axes, an advantage and a KL term.

`build_algorithm` turns a row of `configs/algorithms.py` into dataclasses whose
numbers are the leaves of a jax pytree (another epsilon does not recompile)
and whose names are static. The functions behind the names are picked from
dict literals; nothing asks for a row's name.
"""

from collections.abc import Mapping

from stppo_jax.rl import advantages
from stppo_jax.rl import blocks
from stppo_jax.rl import bounds
from stppo_jax.rl import clipping_bias
from stppo_jax.rl import mismatch
from stppo_jax.rl import normalization
from stppo_jax.rl import options


@blocks.block
class Algorithm(blocks.Block):
  """A row; see `configs/algorithms.py` for the meaning of every option."""

  ratio: blocks.Ratio = options.nested(blocks.Ratio)
  bounds: blocks.Block = options.nested(blocks.BOUNDS)
  objective: blocks.Block = options.nested(blocks.OBJECTIVES)
  correction: blocks.Correction = options.nested(blocks.Correction)
  aggregate: blocks.Block = options.nested(blocks.AGGREGATES)
  advantage: blocks.Block = options.nested(blocks.ADVANTAGES)
  kl: blocks.Kl = options.nested(blocks.Kl)

  @staticmethod
  def conflicts(ratio, objective, advantage, kl, **_):
    clips = ('pessimistic', 'dual_clip')
    if ratio['normalize'] == 'guard' and objective['name'] not in clips:
      rule = "'none' unless objective.name is " + ' or '.join(clips)
      # It undoes a factor in the gradient of the ratio, which others lack.
      yield 'ratio.normalize', ratio['normalize'], rule
    if advantage['name'] == 'turn_group' and kl['where'] == 'reward':
      rule = "'loss' or 'nowhere' when advantage.name is 'turn_group'"
      # It would count as a reward of the turns.
      yield 'kl.where', kl['where'], rule

  @property
  def uses_values(self) -> bool:
    """Whether the advantages need a value model."""
    return self.advantage.name in advantages.USES_VALUES

  @property
  def uses_minibatch_statistics(self) -> bool:
    """Whether the loss needs numbers formed over the whole minibatch.

    Where it does not, `losses.minibatch_statistics` has no leaves.
    """
    bias = self.correction.clipping_bias
    return (
      self.ratio.normalize in normalization.USES_STATISTICS
      or self.bounds.name in bounds.USES_STATISTICS
      or (
        'clipping_bias' in self.correction.names
        and clipping_bias.uses_statistics(norm=bias.norm, scope=bias.scope)
      )
    )

  @property
  def divides_by_bias_norm(self) -> bool:
    """Whether the policy gradient is divided by the norm of the bias."""
    correction = self.correction
    return (
      'clipping_bias' in correction.names
      and correction.clipping_bias.norm == 'gradient'
    )

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
