"""The values that the source of an algorithm uses."""

from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

CODE = 'read in code'
PAPER = 'read in the paper'
DEFINITION = 'a definition'

# Why a key differs, for the keys that differ in several algorithms.
SHARED_WHY = {
  'rollout.group_size': (
    'Ours is that of all algorithms with groups except `so_grpo`.'
  ),
  'loss.entropy_coefficient': (
    'Ours is the same for all algorithms, for comparisons.'
  ),
}


class Source(NamedTuple):
  """The values that a source uses; None where it does not say.

  Attributes:
    where: the paper, or the file of its code.
    sure: how the values are known.
    clip: options of `algorithm` that say what is clipped.
    aggregate: the name of the aggregate.
    std: options of `algorithm` that say what advantages are divided by.
    group: trajectories of a question.
    kl: options of `algorithm` that say where the divergence enters.
    entropy: the weight of the entropy bonus.
    others: other keys of the config.
    why: for every key whose default differs, why it does.
    notes: differences that no key expresses, as sentences.
  """

  where: str
  sure: str
  clip: Mapping[str, Any] | None = None
  aggregate: str | None = None
  std: Mapping[str, Any] | None = None
  group: int | None = None
  kl: Mapping[str, Any] | None = None
  entropy: float | None = None
  others: Mapping[str, Any] = {}
  why: Mapping[str, str] = {}
  notes: tuple[str, ...] = ()

  def values(self) -> dict[str, Any]:
    """Returns what the source says, by the key of the config."""
    options = {
      **(self.clip or {}),
      'aggregate.name': self.aggregate,
      **(self.std or {}),
      **(self.kl or {}),
    }
    keys = {
      **{f'algorithm.{key}': value for key, value in options.items()},
      'rollout.group_size': self.group,
      'loss.entropy_coefficient': self.entropy,
      **self.others,
    }
    return {key: value for key, value in keys.items() if value is not None}

  def silent(self) -> list[str]:
    """Returns the topics about which the source says nothing."""
    topics = ('clip', 'aggregate', 'std', 'group', 'kl', 'entropy')
    return [topic for topic in topics if getattr(self, topic) is None]
