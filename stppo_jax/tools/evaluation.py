"""Evaluates a run, or any Hugging Face directory, on sets of questions.

    OUT/evaluation.json    the checkpoint, the number of samples, the settings
       /dialogues.jsonl    a record of each dialogue, appended in batches
       /answers.jsonl      the answer and the scores of each dialogue
       /results.json       the statistics of each data set
       /results.md         the same statistics as a table

If the command is interrupted, the same command continues after the last batch
of dialogues that was written.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import functools
import json
import logging
import os
import pathlib
import tempfile
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax import keys as keys_lib
from stppo_jax import settings
from stppo_jax import streams
from stppo_jax import types
from stppo_jax.configs import schema
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import functional
from stppo_jax.parallel import compilation
from stppo_jax.records import trajectory_metrics
from stppo_jax.records.checkpoints import checkpoint as checkpoint_lib
from stppo_jax.records.checkpoints import fingerprint
from stppo_jax.rollout import collect
from stppo_jax.rollout import steps
from stppo_jax.tools import score_report
from stppo_jax.training import checkpoint_state
from stppo_jax.training import components as components_lib
from stppo_jax.training import engines
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder
from stppo_jax.workdir import run_record

_log = logging.getLogger(__name__)
# The number of dialogues in a batch for each slot of the engine. The records of
# a batch are written together.
_BATCHES = 4
_INFRA_ERROR = types.TrajectoryStatus.INFRA_ERROR
_ANSWER_FIELDS = (
  'data_set id sample question golden_answers answer scores searches status'
).split()


class _Folder:
  """Reads and writes the folder of an evaluation.

  Args:
    path: the folder.
    identity: the content of evaluation.json, which tells this evaluation from
      others: the checkpoint, the fingerprints of its weights, and the settings
      that the dialogues depend on.
  """

  def __init__(self, path: pathlib.Path, identity: Mapping[str, Any]):
    self._path, self._identity = path, identity

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Locks the folder, and checks that it is the folder of this evaluation.

    Raises:
      Misconfigured: the folder belongs to another evaluation. Its files stay
        unchanged.
      Locked: another process writes to the folder.
    """
    with lock.held(self._path):
      self._check()
      run_folder.mark(self._path, 'evaluate')
      text = json.dumps(self._identity, indent=2) + '\n'
      self.write('evaluation.json', text)
      yield

  def _check(self) -> None:
    path = self._path / 'evaluation.json'
    if not path.is_file():
      return
    try:
      there = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
      raise exits.Misconfigured(f'{path}: not JSON: {error}') from error
    start = f'--out={self._path}: has an evaluation '
    other = [
      f'{start}with {key}={there.get(key)!r}, not {value!r}; give another '
      'folder'
      for key, value in self._identity.items()
      if key != 'weights' and there.get(key) != value
    ]
    # The message leaves out the fingerprints of the weights, because they would
    # fill the screen.
    if not other and there.get('weights') != self._identity['weights']:
      other = [f'{start}of other weights; give another folder']
    if other:
      raise exits.Misconfigured('\n'.join(other))

  def records(self) -> list[dict[str, Any]]:
    """Returns the records in the folder; removes an incomplete last line."""
    path = self._path / 'dialogues.jsonl'
    if not path.is_file():
      return []
    # A process that was killed while it appended may have left part of a line.
    content = path.read_bytes()
    whole = content[: content.rfind(b'\n') + 1]
    if whole != content:
      os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.decode().splitlines()]

  def append(self, records: Sequence[Mapping[str, Any]]) -> None:
    """Appends records to dialogues.jsonl."""
    lines = [json.dumps(record) + '\n' for record in records]
    path = self._path / 'dialogues.jsonl'
    atomic_files.append(path, ''.join(lines).encode())

  def write(self, name: str, text: str) -> None:
    """Writes a file in the folder, in place of an earlier file of this name."""
    atomic_files.replace(self._path / name, text.encode())


def evaluate(
  config, checkpoint: pathlib.Path, *, samples: int, out: pathlib.Path | None
) -> int:
  """Evaluates a checkpoint on the evaluation questions of a config.

  Nothing in the folder of a run is changed, so the run may still be training.

  Args:
    config: the config that the run recorded; a default config for a Hugging
      Face directory.
    checkpoint: the folder of a run of `train`, or a Hugging Face directory.
    samples: the number of dialogues that are sampled for each question; 0 to
      decode one dialogue of each question greedily.
    out: the folder of the results; None to print the results only.

  Returns:
    The exit code: 75 if the infrastructure failed some dialogues, otherwise 0.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  config, run = of_checkpoint(config, checkpoint)
  components = components_lib.build(config)
  groups = components.questions.evaluation(config.evaluate.num_questions)
  questions = [question for group in groups.values() for question in group]
  for note in components.notes:
    streams.show_beside(f'note: {note}')
  if not questions:
    raise exits.Misconfigured(
      "data.evaluation='': there are no questions to evaluate on"
    )
  address = run_folder.address(checkpoint)
  decoding = f'{samples} samples each' if samples else 'greedy'
  with (
    opened(config, run, components) as (services, done, params),
    tempfile.TemporaryDirectory() as temporary,
  ):
    identity = {
      'checkpoint': address or str(checkpoint.resolve()),
      'step': done,
      # The step alone does not identify the weights: a run may have been made
      # again in the same folder, and a directory can be overwritten.
      'weights': fingerprint.fingerprints(jax.tree.leaves(params)),
      'samples': samples,
      **_read_settings(config),
    }
    # Without --out, the same code writes to a temporary folder.
    folder = _Folder(out or pathlib.Path(temporary), identity)
    with folder.held():
      records = _collect_all(
        config, services, components, params, questions, samples, folder
      )
      step = f', step {done}' if run else ''
      title = f'{(run and address) or checkpoint}{step}, {decoding}'
      _report(title, records, services.environment.main_score, folder)
  missing = len(questions) * max(samples, 1) - len(records)
  if missing:
    streams.show_beside(
      f'{missing} dialogues failed for reasons of the infrastructure; they are '
      'not counted' + ('; the same command collects them again' if out else '')
    )
    return exits.TRY_AGAIN
  return 0


def of_checkpoint(
  config, checkpoint: pathlib.Path
) -> tuple[Any, pathlib.Path | None]:
  """Returns the config of a checkpoint, and the folder of its run.

  Some runs make the weights that they start from. In the returned config of
  such a run, `model.path` is the directory of these weights. For a Hugging Face
  directory, the config is returned unchanged and the folder is None.

  Args:
    config: the config that the run recorded; a default config for a Hugging
      Face directory.
    checkpoint: the folder of a run of `train`, or a Hugging Face directory.

  Raises:
    Misconfigured: the run makes the weights that it starts from, and has not
      made them yet.
    CheckpointsMissing: the run has saved checkpoints, but its folder has none.
  """
  if run_folder.command_of(checkpoint) != 'train':
    return config, None
  run_record.check_checkpoints(checkpoint)
  return run_record.with_start(config, checkpoint), checkpoint


@contextlib.contextmanager
def opened(
  config, run: pathlib.Path | None, components: components_lib.Components
) -> Iterator[tuple[steps.Services, int, functional.Params]]:
  """Starts the services that dialogues need, and reads the policy's weights.

  Yields:
    The services, the number of training steps that are done, and the weights.
    The weights come from the newest checkpoint of the run. If there is no run
    or no checkpoint, the weights come from the model that the config names, and
    the number of steps is 0.
  """
  with (
    streams.logged(streams.show_beside),
    compilation.announced(),
    components_lib.build_services(config, components.questions) as services,
  ):
    with exits.as_misconfigured():
      done, params = _load_weights(config, run, components.learner)
    yield services, done, params


def build_collector(
  config,
  services: steps.Services,
  components: components_lib.Components,
  params: functional.Params,
) -> collect.Collector:
  """Returns a collector whose engine has the given weights of the policy."""
  tokenizer, policy = components.tokenizer, components.learner.policy
  engine = engines.build(
    components.config, services, tokenizer, policy, components.placement
  )
  engine.publish(params, 0)
  return engines.build_collector(config, services, tokenizer, engine)


def _load_weights(
  config, run: pathlib.Path | None, learner: learner_lib.Learner
) -> tuple[int, functional.Params]:
  """Returns the number of steps that are done and the weights, see `opened`."""
  load = functools.partial(
    weights_lib.load_merged, config, config.model.path, learner.models.policy
  )
  if run is None:
    return 0, load()
  with contextlib.closing(
    checkpoint_lib.Checkpointer(run, read_only=True)
  ) as checkpoints:
    restored = checkpoint_state.policy_params(checkpoints, learner, step=None)
  return restored[:2] if restored else (0, load())


def _collect_all(
  config,
  services: steps.Services,
  components: components_lib.Components,
  params: functional.Params,
  questions: Sequence[types.Question],
  samples: int,
  folder: _Folder,
) -> list[dict[str, Any]]:
  """Returns the records of all dialogues, without dialogues that failed.

  Dialogues without a record in the folder are collected, and their records are
  appended there. A dialogue gets no record if the infrastructure failed.
  """
  # A dialogue is identified by its question and the number of its sample. So
  # the dialogues that an interrupted command has left out can be found.
  rows = [
    (question, sample)
    for question in questions
    for sample in range(max(samples, 1))
  ]
  records = folder.records()
  known = {(r['data_set'], r['id'], r['sample']) for r in records}
  left = [
    n
    for n, (question, sample) in enumerate(rows)
    if (question.data_set, question.id, sample) not in known
  ]
  if not left:
    return records
  collector = build_collector(config, services, components, params)
  # The random key of a dialogue depends on the seed and on the dialogue's
  # number in `rows`, so an interruption does not change the key.
  key = keys_lib.step_key(config.seed, 0, keys_lib.Purpose.EVALUATE)
  row_keys = keys_lib.row_keys(key, 0, len(rows))
  record = functools.partial(record_of, config, services, components.tokenizer)
  # At the end of a batch, slots stay idle until the longest dialogue of the
  # batch has ended. With several dialogues for each slot, less time is wasted.
  size = _BATCHES * components_lib.num_slots(components.config, 1)
  for first in range(0, len(left), size):
    part = left[first : first + size]
    asked = [rows[n][0] for n in part]
    part_keys = row_keys[jax.numpy.asarray(part)]
    trajectories = steps.collect_until_valid(
      lambda: collector.collect(asked, part_keys, greedy=not samples),
      services,
      min_valid_fraction=config.rollout.min_valid_fraction,
      what='evaluation',
    )
    new = [
      record(trajectory, rows[n][1])
      for n, trajectory in zip(part, trajectories)
      if trajectory.status is not _INFRA_ERROR
    ]
    folder.append(new)
    records += new
    _log.info(f'{len(records):,} of {len(rows):,} dialogues')
  return records


def record_of(
  config,
  services: steps.Services,
  tokenizer,
  trajectory: types.Trajectory,
  sample: int,
) -> dict[str, Any]:
  """Returns a trajectory in the form of a record of dialogues.jsonl."""
  question = trajectory.question
  texts = [tokenizer.decode(turn.token_ids) for turn in trajectory.turns]
  find_answer = rewards.SCOPES[config.env.reward_scope]
  return {
    **trajectory_metrics.record(trajectory, tokenizer),
    'sample': sample,
    'answer': find_answer(services.environment.prompt(question), texts),
    'options': dict(question.options),
    'searches': sum(protocol.asks(turn.action) for turn in trajectory.turns),
    'passages': [list(turn.passages) for turn in trajectory.turns],
    'gold_passages': list(question.gold_passages),
  }


def _report(
  title: str,
  records: Sequence[Mapping[str, Any]],
  main_score: str,
  folder: _Folder,
) -> None:
  """Prints the statistics of all records, and writes the result files."""
  by_set: dict[str, list[Mapping[str, Any]]] = {}
  for record in records:
    by_set.setdefault(record['data_set'], []).append(record)
  reports = [
    score_report.report(name, group, main_score)
    for name, group in by_set.items()
  ]
  if not reports:
    return
  table = score_report.rows(reports)
  print(title)
  print(score_report.as_text(table))
  folder.write('results.md', f'{title}\n\n{score_report.as_markdown(table)}')
  content = {'title': title, 'sets': score_report.as_json(reports)}
  folder.write('results.json', json.dumps(content, indent=2) + '\n')
  lines = [
    json.dumps({key: r[key] for key in _ANSWER_FIELDS}, ensure_ascii=False)
    for r in records
  ]
  folder.write('answers.jsonl', '\n'.join(lines) + '\n')


def _read_settings(config) -> dict[str, Any]:
  """Returns the config values that dialogues depend on, as read from JSON."""
  values = {
    key: value
    for key, value in settings.flatten(config).items()
    if key in schema.KEYS and schema.KEYS[key].asked
  }
  # JSON turns tuples into lists. After this round trip, the values equal the
  # values that are read from evaluation.json.
  return json.loads(json.dumps(values))
