"""Answers questions that a person types, with a policy that can search."""

from collections.abc import Iterator
import logging
import pathlib
import sys
from typing import TextIO

import jax

from stppo_jax import keys as keys_lib
from stppo_jax import streams
from stppo_jax import types
from stppo_jax.records import dialogues
from stppo_jax.tools import evaluation
from stppo_jax.training import components as components_lib

_log = logging.getLogger(__name__)
_INFRA_ERROR = types.TrajectoryStatus.INFRA_ERROR


def chat(config, checkpoint: pathlib.Path, questions: TextIO) -> int:
  """Answers each line of a stream as a question, until the stream ends.

  The policy decodes greedily and searches as in training. The searches, the
  passages found and the answer of each question are printed. Nothing in the
  folder of a run is changed, so the run may still be training.

  Args:
    config: the config that the run recorded; a default config for a Hugging
      Face directory.
    checkpoint: the folder of a run of `train`, or a Hugging Face directory.
    questions: the stream of questions, one on each line.

  Returns:
    The exit code 0.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  config, run = evaluation.of_checkpoint(config, checkpoint)
  config = config.copy_and_resolve_references()
  # Nothing is trained here, so all devices collect. Each of these devices needs
  # a slot, although one question at a time fills only one slot.
  config.mesh.collect_fraction = 0.0
  config.rollout.slots = jax.local_device_count()
  config.rollout.lanes = 1
  components = components_lib.build(config)
  example = components.questions.train(0, 1, resample_round=0)[0]
  with evaluation.opened(config, run, components) as (services, step, params):
    collector = evaluation.build_collector(config, services, components, params)
    after = f', step {step}' if run else ''
    _log.info(f'{checkpoint}{after}; ask one question per line; Ctrl-D ends')
    _log.info(f'for example: {streams.escape(example.text)}')
    # Greedy decoding draws no random numbers, so all questions share a key.
    keys = keys_lib.row_keys(jax.random.key(config.seed), 0, 1)
    for number, text in enumerate(_lines(questions)):
      question = types.Question(
        str(number), text, (), 'chat', corpus=example.corpus
      )
      (trajectory,) = collector.collect([question], keys, greedy=True)
      if trajectory.status is _INFRA_ERROR:
        _log.info(
          f'the infrastructure failed: {streams.escape(trajectory.cause)}'
        )
        continue
      record = evaluation.record_of(
        config, services, components.tokenizer, trajectory, 0
      )
      colour = sys.stdout.isatty()
      print(dialogues.render_reply(record, colour=colour), flush=True)
  return 0


def _lines(stream: TextIO) -> Iterator[str]:
  """Yields a stream's lines that are not blank, stripped of outer white space.

  If the stream is a terminal, a prompt is printed before each line is read.
  """
  while True:
    if stream.isatty():
      print('? ', end='', flush=True)
    line = stream.readline()
    if not line:
      return
    if line.strip():
      yield line.strip()
