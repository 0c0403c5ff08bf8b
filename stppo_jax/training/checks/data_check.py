"""Checks that a policy can answer the questions of a run.

A question whose prompt fills the context has no turn, so nothing is learned
from it, and its score is 0.
"""

from collections.abc import Sequence
import dataclasses
import functools

from stppo_jax import types
from stppo_jax.data import questions as questions_lib
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.retrieval import fakes
from stppo_jax.sampling import tokenizer as tokenizer_lib

_NAMED = 5  # notes about single questions that are shown


def check(
  config,
  questions: questions_lib.Questions,
  tokenizer: tokenizer_lib.Tokenizer,
) -> list[str]:
  """Returns lines about questions that a run cannot use as they are.

  Raises:
    ValueError: there are too few questions, no prompt of a data set leaves room
      for an answer, or an option of the environment has a bad value; one line.
  """
  check_count(config, questions)
  kind = environments.find(config.env.name)
  environment = kind.from_options(config.env.to_dict(), fakes.FakeRetriever({}))
  rollout = config.rollout
  count = rollout.trajectories_per_step // rollout.group_size
  groups = {'data.train': questions.training_sample(count)}
  for name, group in questions.evaluation(
    config.evaluate.num_questions
  ).items():
    groups[f'data.evaluation ({name})'] = group
  lines = list(questions.notes[:_NAMED])
  if len(questions.notes) > _NAMED:
    lines.append(f'... and {len(questions.notes) - _NAMED} more such lines')
  for name, group in groups.items():
    too_long = _too_long(group, environment, tokenizer, config.env.max_length)
    line = (
      f'{name}: {too_long} of {len(group)} prompts fill the context, '
      f'env.max_length={config.env.max_length} tokens'
    )
    if group and too_long == len(group):
      raise ValueError(f'{line}; none leaves room for an answer')
    if too_long:
      lines.append(f'{line}; they have no turn, and score 0')
  return lines


def check_count(config, questions: questions_lib.Questions) -> None:
  """Checks that questions suffice for the first step and every evaluation.

  Raises:
    ValueError: there are too few.
  """
  rollout = config.rollout
  questions.train(
    0,
    rollout.trajectories_per_step // rollout.group_size,
    resample_round=rollout.resample_rounds,
  )
  questions.evaluation(config.evaluate.num_questions)


def _too_long(
  questions: Sequence[types.Question],
  environment: protocol.Environment,
  tokenizer: tokenizer_lib.Tokenizer,
  max_length: int,
) -> int:
  """Returns the number of questions whose prompts leave no room."""
  if not questions:
    return 0
  blank = dataclasses.replace(questions[0], text='', options={})
  template = environment.prompt(blank)
  # A token takes at least one byte. So most prompts need not be tokenised,
  # which would take minutes for large files.
  encode = functools.partial(tokenizer.encode_prompt, tools=environment.tools)
  spare = max_length - len(encode(template))
  longest = len(template.encode()) + spare
  prompts = [environment.prompt(question) for question in questions]
  return sum(
    len(prompt.encode()) >= longest and len(encode(prompt)) >= max_length
    for prompt in prompts
  )
