"""Checks that refuse a run at its start, or end a run that goes wrong."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.data import questions as questions_lib
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import value_training
from stppo_jax.models import cache as cache_lib
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.retrieval import fakes
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import engines


def check_data(
  config,
  questions: questions_lib.Questions,
  tokenizer: tokenizer_lib.Tokenizer,
) -> list[str]:
  """Returns lines about questions that a run cannot fully use.

  If a prompt fills the context, its dialogue has no turn: the policy learns
  nothing from the question, and the score is 0. If the corpus lacks a gold
  passage, no search can find it.

  Raises:
    ValueError: there are too few questions, every prompt of a data set fills
      the context, or an option of the environment has a bad value. The message
      is one line.
  """
  kind = environments.find(config.env.name)
  # Only prompts are made here, so a retriever that finds nothing is enough.
  environment = kind.from_options(config.env.to_dict(), fakes.FakeRetriever({}))
  rollout = config.rollout
  count = rollout.trajectories_per_step // rollout.group_size
  # If there are too few questions, this call raises now, not in the first step.
  questions.train(0, count, resample_round=rollout.resample_rounds)
  evaluated = questions.evaluation(config.evaluate.num_questions)
  groups = {'data.train': questions.training_sample(count)}
  groups |= {f'data.evaluation ({x})': group for x, group in evaluated.items()}
  lines = [*_lacking(groups, questions)] if config.data.corpus else []
  for name, group in groups.items():
    too_long = _too_long(group, environment, tokenizer, config.env.max_length)
    line = (
      f'{name}: {too_long} of {len(group)} prompts fill the context, '
      f'env.max_length={config.env.max_length} tokens'
    )
    if group and too_long == len(group):
      raise ValueError(f'{line}; no prompt leaves room for an answer')
    if too_long:
      lines.append(f'{line}; their dialogues have no turn and the score 0')
  return lines


def _lacking(
  groups: Mapping[str, Sequence[types.Question]],
  questions: questions_lib.Questions,
) -> Iterator[str]:
  """Yields a line for each data set with gold passages that the corpus lacks.

  `groups` maps the name of a data set to the questions that the run uses.
  """
  if not any(q.gold_passages for group in groups.values() for q in group):
    return
  known = {passage.id for passage in questions.passages() or ()}
  for name, group in groups.items():
    lacking = [q for q in group if not known.issuperset(q.gold_passages)]
    if lacking:
      (first, *_) = set(lacking[0].gold_passages) - known
      yield (
        f'{name}: {len(lacking)} of {len(group)} questions have gold_pids that '
        f'data.corpus lacks, such as {first!r} of question {lacking[0].id!r}'
      )


def _too_long(
  questions: Sequence[types.Question],
  environment: protocol.Environment,
  tokenizer: tokenizer_lib.Tokenizer,
  max_length: int,
) -> int:
  """Returns the number of questions whose prompts fill the context."""
  if not questions:
    return 0
  blank = dataclasses.replace(questions[0], text='', options={})
  template = environment.prompt(blank)
  # A token has at least one byte, so a prompt with few bytes surely fits. Most
  # prompts are therefore not tokenised, which would take minutes for large
  # files.
  encode = functools.partial(tokenizer.encode_prompt, tools=environment.tools)
  spare = max_length - len(encode(template))
  longest = len(template.encode()) + spare
  prompts = [environment.prompt(question) for question in questions]
  return sum(
    len(prompt.encode()) >= longest and len(encode(prompt)) >= max_length
    for prompt in prompts
  )


_MEAN = 'mismatch/logprob_abs_diff_mean'
_TAIL = 'mismatch/logprob_abs_diff_p99'
# The largest mean difference of log-probabilities, in nats, that still counts
# as rounding, by the dtype of the computation. The limit for float32 is at
# least ten times the rounding that was measured. The limit for bfloat16 is
# twice the rounding of a model with 28 layers. See docs/models.md.
_LIMITS = {'float32': 2e-5, 'bfloat16': 0.05}
# The limit of the 99th percentile, as a multiple of the limit of the mean.
_TAIL_PER_MEAN = 10


class Disagreement(Exception):
  """The engine samples from a different policy than the trainer updates."""

  exit_code = exits.USAGE


def check_mismatch(config, metrics: Mapping[str, float]) -> None:
  """Checks that engine and trainer compute the same log-probabilities.

  The engine samples tokens, and the denominator of a token's ratio is the
  probability that the trainer computes for it. If engine and trainer use
  different weights, masks or positions, training goes wrong without an error.
  So on the first step of a run, engine and trainer must agree up to rounding.
  Later steps are not checked, because they may be collected with older weights.
  The check compares the mean and the 99th percentile of the differences with
  limits. It does not use the largest difference, which grows with the number of
  tokens.

  `rollout.mismatch_limit` is the largest mean difference over the tokens, in
  nats, that counts as rounding. With -1 the limit follows from `model.dtype`;
  with 0 there is no limit.

  Args:
    config: the config of the run.
    metrics: the metrics of the step.

  Raises:
    Disagreement: the mean is above the limit, the 99th percentile is above 10
      times the limit, or one of the two is nan.
  """
  limit, dtype = config.rollout.mismatch_limit, config.model.dtype
  source = f'rollout.mismatch_limit={limit:g}'
  if limit == -1:
    limit = _LIMITS[dtype]
    source = f'the limit for model.dtype={dtype}'
  mean, tail = metrics[_MEAN], metrics[_TAIL]
  if limit == 0 or (mean <= limit and tail <= _TAIL_PER_MEAN * limit):
    return
  enough = max(mean, tail / _TAIL_PER_MEAN)
  raise Disagreement(
    'the engine and the trainer do not compute the same policy: on the first '
    f'step, {_MEAN} is {mean:.3g} (at most {limit:g}) and {_TAIL} is '
    f'{tail:.3g} (at most {_TAIL_PER_MEAN * limit:g}), by {source}; nothing '
    'was updated. If that is rounding, for example because the engine computes '
    'in another dtype, set rollout.mismatch_limit above '
    f'{enough:.3g}; 0 = no limit'
  )


class DoesNotFit(exits.Misconfigured):
  """The run needs more memory than its devices have.

  Attributes:
    config: the config of the run.
    limit: the bytes of a device's memory that programs may use.
  """

  def __init__(self, line: str, config: Any, limit: int):
    super().__init__(line)
    self.config, self.limit = config, limit


def check_memory(
  config,
  learner: learner_lib.Learner,
  placement: publish_lib.Placement | None,
  limit: int | None,
  *,
  learns: bool = True,
) -> None:
  """Checks that models, optimisers and engine fit in a device's memory.

  The programs need more memory than is counted here, for activations above all.
  So a run that this check refuses would have failed anyway, but only after
  everything was loaded.

  Args:
    config: the config of a run, which has passed all other checks.
    learner: the learner of the run.
    placement: the devices that decode; None if this host does not decode.
    limit: the bytes of memory of a device; None if devices do not report them.
    learns: whether this host learns.

  Raises:
    DoesNotFit: the run needs more memory; the message is one line that names
      the largest arrays.
  """
  if limit is None:
    return
  held = held_memory(config, learner, placement)
  if not learns:
    held = held._replace(sizes={}, gradients=0, gathered=0)
  if held.total > limit:
    parts = sorted(
      {**held.sizes, **held.collecting}.items(), key=lambda part: -part[1]
    )
    gib = memory_lib.gib
    largest = ', '.join(f'{gib(size)} for {name}' for name, size in parts[:3])
    raise DoesNotFit(
      f'the run needs at least {gib(held.total)} of each device ({largest}), '
      f'but a device has {gib(limit)}',
      config,
      limit,
    )


# The share of a device's memory that may be full when slots are added. The rest
# is for the code of programs, and for gaps between arrays.
_FILLED = 0.9


def sized(
  config,
  learner: learner_lib.Learner,
  placement: publish_lib.Placement | None,
  limit: float | None,
) -> Any:
  """Returns the config; chooses the number of slots if `rollout.slots` is 0.

  The trajectories that a host collects in a step are divided into waves of
  equal size, and each wave fills the slots. The number of waves is the smallest
  for which the slots fit in memory. If even the smallest possible number of
  slots does not fit, that number is chosen all the same. If `placement` or
  `limit` is None, nothing is chosen.

  Args:
    config: the config of a run that fits its files and devices.
    learner: the learner of the run.
    placement: the devices that decode; None if this host does not decode.
    limit: the bytes of memory of a device; None if devices do not report them.
  """
  rollout = config.rollout
  if placement is None or limit is None or rollout.slots:
    return config
  hosts = placement.hosts
  wanted = rollout.trajectories_per_step // hosts
  unit = math.lcm(
    rollout.lanes * rollout.group_size,
    cache_lib.row_shards_of_host(learner.policy.config, placement.mesh),
  )
  held = held_memory(config, learner, placement)
  beside = sum(held.collecting.values()) - held.collecting[engines.CACHE]
  if rollout.steps_ahead and not placement.collecting:
    # Steps are collected ahead on the devices that learn, so the slots stay in
    # memory during updates.
    beside += held.gradients + held.gathered
  changed = config.copy_and_resolve_references()
  # All waves have equal size: in a smaller last wave, some slots would be idle.
  for waves in range(1, wanted + 1):
    with changed.unlocked():
      changed.rollout.slots = -(-wanted // (waves * unit)) * unit
    slots = engines.slot_memory(changed, learner.policy, placement)
    if beside + slots <= _FILLED * limit or changed.rollout.slots == unit:
      break
  return config if changed.rollout.slots == wanted else changed.lock()


def held_memory(
  config,
  learner: learner_lib.Learner,
  placement: publish_lib.Placement | None,
) -> memory_lib.Held:
  """Returns the bytes that each kind of array of a run needs on one device.

  The kinds are weights, optimiser moments, gradients, the reference, the arrays
  of the engine, and copies of the policies that collect later steps.
  """
  state, reference = learner.abstract_start()
  size_of = memory_lib.bytes_per_device
  sizes, trained = {}, 0
  for name, model in (('policy', state.policy), ('value', state.value)):
    if model is not None:
      sizes[f'{name} parameters'] = size_of(model.params)
      sizes[f'{name} optimizer'] = size_of(model.optimizer)
      trained += sizes[f'{name} parameters']
  sizes['frozen base'] = size_of(state.frozen)
  if config.model.reference_memory == 'device':
    sizes['reference'] = size_of(reference)
  ahead = config.rollout.steps_ahead
  if ahead:  # the policies of the last `ahead` steps, and the newest policy
    policies = (ahead + 1) * sizes['policy parameters']
    sizes['policies of the next steps'] = policies
  if config.updates.value_replay:
    kept = value_training.abstract_collections(config, learner.mesh)
    sizes['collections of earlier steps'] = size_of(kept)
  # If other hosts only collect, a device that learns also holds a copy of the
  # weights, which these hosts fetch. At the first fetch, the copy moves to the
  # memory of the device's host.
  if config.mesh.collectors:
    size = jnp.dtype(config.model.dtype).itemsize
    sizes['weights to be fetched'] = sizes['policy parameters'] * size // 4
  copied, collecting = 0, {}
  if placement is not None:
    engine, copied = engines.sizes(config, learner.policy, placement)
    if not placement.collecting:
      collecting = sizes | engine
      kept = engines.kept(config)
      sizes |= {name: size for name, size in engine.items() if name in kept}
    else:
      collecting = engine
      # With LoRA the policies share the base, so the weights of the next steps
      # are not counted.
      if not config.model.lora.rank:
        weights = ahead * engine[engines.WEIGHTS]
        collecting = engine | {'weights of the next steps': weights}
  return memory_lib.Held(
    {name: size for name, size in sizes.items() if size},
    {name: size for name, size in collecting.items() if size},
    gradients=trained,
    copied=copied,
    gathered=learner.models.gathered_bytes,
  )


_SHOWN = ('actor/grad_norm', 'critic/grad_norm', 'actor/lr')


class Diverged(exits.RunEnded):
  """The run ends because too many updates in a row were skipped."""

  exit_code = exits.ENDED


class SkippedUpdates:
  """Ends a run in which too many updates in a row are skipped.

  An update is skipped if its loss, gradient, new weights or new moments are not
  finite, or if the norm of its gradient is above `skip_grad_norm`. A single
  skipped update only loses a minibatch. Many skipped updates in a row mean that
  the run learns nothing any more. Skipped updates leave the state as it is, so
  the state that the run saves at its end is sound.

  Args:
    limit: the number of skipped updates in a row that ends the run; 0 stands
      for no limit.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._count = 0

  def check(
    self, step: int, updates: Sequence[Mapping[str, jax.Array]]
  ) -> None:
    """Counts the skipped updates of a step, and ends the run at the limit.

    Args:
      step: the number of steps that are done.
      updates: the metrics of the step's updates, in order.

    Raises:
      Diverged: `limit` updates in a row were skipped. The message names the
        step and the last skipped update. It gives the gradient norms and the
        learning rate of this update, and all its metrics that are not finite.
    """
    # The metrics of all updates are fetched in one transfer.
    for number, metrics in enumerate(jax.device_get(updates), start=1):
      self._count = self._count + 1 if metrics['update/skipped'] else 0
      if self._limit and self._count >= self._limit:
        numbers = ', '.join(
          f'{name} {x:g}'
          for name, x in metrics.items()
          if name in _SHOWN or not math.isfinite(x)
        )
        raise Diverged(
          f'{self._count} updates in a row were skipped, the last is update '
          f'{number} of step {step}: its loss, a gradient or a new weight is '
          f'not finite, or the gradient is above skip_grad_norm ({numbers}); '
          f'updates.max_skipped={self._limit} is the limit (0: no limit); '
          'lower the learning rate'
        )
