"""An algorithm as data: choices on five axes, an advantage and a KL term.

`build_algorithm` turns an entry of the table in `configs/algorithms.py` into
dataclasses. Numbers in these dataclasses are leaves of a jax pytree, so that
changing a number does not recompile. Names of choices are static. Tables map
the names to functions; no code branches on the name of an algorithm.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stppo_jax.rl import advantages
from stppo_jax.rl import aggregation
from stppo_jax.rl import bounds as bounds_lib
from stppo_jax.rl import corrections
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import objectives
from stppo_jax.rl import options
from stppo_jax.rl import ratios


@options.dataclass
class Algorithm(options.Options):
  """An algorithm; `docs/algorithms.md` has the meaning of every option.

  Attributes:
    ratio: which tokens share a ratio, and to which tokens the ratio's gradient
      flows.
    bounds: the trusted interval of the ratio, one of `bounds.BOUNDS`.
    objective: the token's loss term inside and outside the bounds, one of
      `objectives.OBJECTIVES`.
    correction: the names of the selected corrections, and the options of all
      corrections. A correction multiplies loss terms by weights.
    aggregate: how the tokens' terms become a scalar, one of
      `aggregation.AGGREGATES`.
    advantage: the estimator of advantages, one of `advantages.ADVANTAGES`.
    kl: whether, where and how the KL divergence from the reference is
      penalised.
  """

  ratio: ratios.Ratio = options.section(ratios.Ratio)
  bounds: options.Named = options.section(bounds_lib.BOUNDS)
  objective: options.Named = options.section(objectives.OBJECTIVES)
  correction: Any = options.section(corrections.Correction)
  aggregate: options.Named = options.section(aggregation.AGGREGATES)
  advantage: options.Named = options.section(advantages.ADVANTAGES)
  kl: kl_lib.Kl = options.section(kl_lib.Kl)

  @staticmethod
  def conflicts(ratio, objective, advantage, kl, **_):
    clips = ('pessimistic', 'dual_clip')
    if ratio['normalize'] == 'guard' and objective['name'] not in clips:
      # The guard multiplies the log-ratio, and so the ratio's gradient, by a
      # scale, and divides the loss terms by the same scale. So the gradient of
      # the objective must flow through the ratio, as it does in the objectives
      # that `clips` names.
      rule = "'none' when objective.name is neither " + ' nor '.join(clips)
      yield 'ratio.normalize', ratio['normalize'], rule
    name = advantage['name']
    if name in estimator_needs.TURN_REWARDS and kl['where'] == 'reward':
      rule = f"'loss' or 'nowhere' when advantage.name is {name!r}"
      yield 'kl.where', kl['where'], rule

  @property
  def uses_values(self) -> bool:
    """Whether the advantages need a value model."""
    return self.advantage.name in estimator_needs.VALUES

  @property
  def trains_values_at_observations(self) -> bool:
    """Whether the value model is trained at observation tokens, too."""
    return self.advantage.arguments().get('critic_tokens') == 'response'

  @property
  def uses_minibatch_statistics(self) -> bool:
    """Whether the loss needs statistics of the whole minibatch.

    If it needs none, the result of `losses.minibatch_statistics` has no leaves.
    """
    return any(
      choice.uses_statistics(chosen) for choice, chosen in self._choices()
    )

  def _choices(self) -> Iterator[tuple[options.Choice, options.Options]]:
    """Yields chosen table entries of the loss, each with its options.

    The entries are the ratio's normalisation, the bounds, the objective and the
    selected corrections.
    """
    yield ratios.NORMALIZATIONS[self.ratio.normalize], self.ratio
    yield bounds_lib.BOUNDS[self.bounds.name], self.bounds
    yield objectives.OBJECTIVES[self.objective.name], self.objective
    for _, choice, chosen in self.selected_corrections():
      yield choice, chosen

  def selected_corrections(
    self,
  ) -> Iterator[tuple[str, options.Choice, options.Options]]:
    """Yields name, table entry and options of the selected corrections."""
    for name in self.correction.names:
      yield name, corrections.CORRECTIONS[name], getattr(self.correction, name)

  @property
  def divides_by_bias_norm(self) -> bool:
    """Whether the clipping-bias correction divides the policy gradient."""
    correction = self.correction
    return (
      'clipping_bias' in correction.names
      and correction.clipping_bias.norm == 'gradient'
    )

  @property
  def depends_on_microbatches(self) -> bool:
    """Whether a correction's result depends on the size of microbatches."""
    correction = self.correction
    return (
      'clipping_bias' in correction.names
      and correction.clipping_bias.scope == 'microbatch'
    )

  @property
  def needs(self) -> frozenset[str]:
    """The names of the batch arrays that this loss reads beyond the usual ones.

    The usual arrays are the arrays that the loss of every algorithm reads.
    """
    # Bounds, objectives and corrections declare their arrays in their tables.
    # The ratio's level and the KL term have no table entry, so their arrays are
    # added here.
    arrays = set().union(*(choice.arrays for choice, _ in self._choices()))
    if self.ratio.level == 'sentence':
      arrays.add('sentence_ids_BL')
    if self.kl.where == 'loss':
      arrays.add('ref_logprobs_BL')
    return frozenset(arrays)


def check_algorithm(algorithm: Mapping) -> list[str]:
  """Returns the problems of an algorithm's options, one line each.

  Args:
    algorithm: nested mappings, such as a `ConfigDict` or an entry of the table.

  Returns:
    Lines such as `algorithm.bounds.clip_low=-1: must be a finite number >= 0`;
    an empty list if there is no problem.
  """
  return options.check(Algorithm, algorithm, 'algorithm')


def build_algorithm(algorithm: Mapping) -> Algorithm:
  """Returns the algorithm that nested mappings describe.

  Args:
    algorithm: nested mappings, such as a `ConfigDict` or an entry of the table.

  Raises:
    ValueError: `check_algorithm` finds problems; the message has a line for
      each of them.
  """
  problems = check_algorithm(algorithm)
  if problems:
    raise ValueError('\n'.join(problems))
  return options.build(Algorithm, algorithm)
