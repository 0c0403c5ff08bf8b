"""Records a run in its workdir before the first step.

    WORKDIR/config.json    the config of the last start of the run
           /run.json       the run's id, see `workdir.run_folder`
           /files.json     checksums of the files that the config names
           /start/policy   the policy that the run starts from, if it makes its
                           start, see `training/starts.py`
           /config_changes.jsonl    the changes of the config by later starts

A run is a function of its config. If a run were resumed with another config, no
single config would describe the whole run. So such a start is refused, with a
line for each key that differs. `configs/schema.py` says which keys may always
change, and which keys may change only if `resume.allow_change` names them. A
file that the config names may change only if `resume.allow_change` names the
key of the file.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import logging
import pathlib
from typing import Any
import uuid

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import schema
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import named_files
from stppo_jax.workdir import run_folder

_log = logging.getLogger(__name__)

# Keys of a recorded config that are not in the config's schema. They must never
# change.
_IDENTITY = ('command', 'batch_sha256')
# A run has begun when its folder has one of these files. Before that, the user
# may change any key of the config, for example if the weights did not fit.
_PRODUCTS = (
  *('start/policy', 'start/metrics.jsonl', 'start/*.safetensors'),
  *('metrics.jsonl', 'checkpoints/*'),
)
START = 'start/policy'  # the directory of a start that a run makes
# The config keys that name files below data.root.
_DATA = ('data.train', 'data.evaluation', 'data.corpus')
_FILES = 'files.json'
_ABSENT = '(absent)'
_ALLOW = '--config.resume.allow_change'

# Keys or files that differ, with the new value and the recorded value.
_Changes = dict[str, tuple[Any, Any]]


class OtherRun(Exception):
  """The folder belongs to a run of another config; one line per difference."""

  exit_code = exits.USAGE


class CheckpointsMissing(Exception):
  """The run has begun, but its checkpoints are missing."""

  exit_code = exits.DAMAGED


def check_config(config: Mapping[str, Any], workdir: pathlib.Path) -> None:
  """Checks, without writing, that a folder has no run of another config.

  Args:
    config: the nested config, see `record_config`.
    workdir: the run's folder.

  Raises:
    OtherRun: a run of another config has begun in the folder.
  """
  config = json.loads(json.dumps(config))
  if _has_begun(workdir):
    _compare(config, _checksums(config), workdir)


def check_prompts(workdir: pathlib.Path) -> None:
  """Refuses a run that began before prompts could begin with a bos_token.

  Callers call this only if prompts would now begin with a bos_token.

  Raises:
    OtherRun: a run has begun in the folder, and its recorded config has no
      section `prompt`.
  """
  path = workdir / 'config.json'
  if path.is_file() and _has_begun(workdir) and 'prompt' not in _read(path):
    raise OtherRun(
      f'prompt.bos=auto: would put a bos_token before prompts, but the run in '
      f'{workdir} was begun by a version that put no token; to resume the run '
      f'without the token: --config.prompt.bos=off {_ALLOW}=prompt.bos'
    )


def record_config(
  config: Mapping[str, Any],
  workdir: str | pathlib.Path,
) -> None:
  """Records the config, its files and the id of a run that starts or resumes.

  The folder is made if it is missing. If keys that may change have new values,
  the new values are recorded.

  Args:
    config: the nested config, without references. Python's JSON must be able to
      write its values; infinity is allowed.
    workdir: the run's folder.

  Raises:
    OtherRun: a run of another config has begun in the folder; nothing is
      changed.
  """
  workdir = pathlib.Path(workdir)
  path = workdir / 'config.json'
  text = json.dumps(config, indent=2, sort_keys=True) + '\n'
  # The config is read back from its JSON, in which tuples are lists, as in the
  # recorded config.
  config = json.loads(text)
  has_begun, checksums = _has_begun(workdir), _checksums(config)
  changes, changed, known = {}, {}, {}
  if has_begun:
    changes, changed, known = _compare(config, checksums, workdir)
    _note_changes(changes | changed, workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  # A run that has begun keeps its id, because its checkpoints have the same id.
  if not has_begun or run_folder.read(workdir) is None:
    command = run_folder.command_of_record(config)
    run_id, digest = uuid.uuid4().hex, _digest(config)
    run = run_folder.Run(
      command, run_id, digest, has_older_checkpoints=has_begun
    )
    run_folder.write(workdir, run)
  if checksums:
    # If the new config names files with a key, the recorded files of this key
    # are dropped. `_has_moved` compares all files of a key, so later starts
    # would be refused if an outdated file stayed in the record.
    keys = set(map(_key, checksums))
    known = {name: x for name, x in known.items() if _key(name) not in keys}
    content = json.dumps(known | checksums, indent=2) + '\n'
    atomic_files.replace(workdir / _FILES, content.encode())
  atomic_files.replace(path, named_files.recorded(text).encode())
  for key, (ours, theirs) in changes.items():
    _log.info(f'note: {key}={ours} from now on; it was {theirs}')
  for name in changed:
    _log.info(f'note: {name}: has changed; its new content is used from now on')


def check_run(workdir: pathlib.Path) -> None:
  """Raises `Misconfigured` if the folder is not the folder of a `train` run."""
  if not workdir.is_dir():
    raise exits.Misconfigured(f'--workdir={workdir}: no such folder')
  if run_folder.command_of(workdir) != 'train':
    raise exits.Misconfigured(f'no run of train in {workdir}')


def check_checkpoints(workdir: pathlib.Path) -> None:
  """Checks that the checkpoints of a run exist.

  Raises:
    CheckpointsMissing: the folder of checkpoints is empty although the run has
      saved a checkpoint. Or the folder is missing although the run has written
      metrics; every run makes the folder before it writes metrics.
  """
  folder, run = workdir / 'checkpoints', run_folder.read(workdir)
  if folder.is_dir():
    is_missing = run is not None and run.has_saved and not any(folder.iterdir())
  else:
    is_missing = (workdir / 'metrics.jsonl').is_file()
  if is_missing:
    raise CheckpointsMissing(
      f'{workdir}: a run has begun here, but {folder} has no checkpoint: is it '
      'on a disk that is not mounted? Bring the checkpoints back, or begin a '
      'new run with --restart, which deletes nothing'
    )


def makes_start(config) -> bool:
  """Returns whether the run makes the weights that it starts from."""
  return bool(config.init_from or imitates(config))


def imitates(config) -> bool:
  """Returns whether a run of `train` begins by imitating demonstrations."""
  starts_elsewhere = config.model.path or config.init_from
  return config.sft.before_training and not starts_elsewhere


def made_start(workdir: pathlib.Path) -> pathlib.Path | None:
  """Returns the directory of the start that a run has made, or None."""
  # Up to version 0.2, the policy was in `start` itself.
  for path in (workdir / START, workdir / 'start'):
    if (path / 'config.json').is_file() and any(path.glob('*.safetensors')):
      return path
  return None


def with_start(config, workdir: pathlib.Path):
  """Returns the config, with `model.path` set to the start that the run made.

  If the run does not make its start, the config is returned unchanged.

  Raises:
    Misconfigured: the run makes its start, and has not made it yet.
  """
  if not makes_start(config):
    return config
  start = made_start(workdir)
  if start is None:
    raise exits.Misconfigured(
      f'{workdir / "start"}: missing, the run has not begun'
    )
  config = config.copy_and_resolve_references()
  config.model.path = str(start)
  if config.init_from:
    # The directory of the start has the tokenizer of the run in `init_from`.
    config.model.tokenizer_path = ''
  return config


def _has_begun(workdir: pathlib.Path) -> bool:
  """Returns whether the run of a folder has begun, see `_PRODUCTS`."""
  return any(any(workdir.glob(product)) for product in _PRODUCTS)


def _compare(
  config: Mapping[str, Any],
  checksums: Mapping[str, str],
  workdir: pathlib.Path,
) -> tuple[_Changes, _Changes, dict[str, str]]:
  """Compares a config and its files with the record of a run.

  Args:
    config: the new config, in the form in which it is recorded.
    checksums: the checksums of the files that the new config names.
    workdir: the folder of a run that has begun.

  Returns:
    The keys that differ, the files that have changed, and the recorded
    checksums. All three results are empty if there is no record.

  Raises:
    OtherRun: a key or a file has changed that must not change.
  """
  path = workdir / 'config.json'
  if not path.is_file():
    return {}, {}, {}
  allowed = config['resume']['allow_change']
  changes = _differences(config, _read(path))
  # Earlier versions recorded no checksums.
  files = workdir / _FILES
  known = _named(_read(files)) if files.is_file() else {}
  lines = [
    _refusal(key, *values, workdir)
    for key, values in changes.items()
    if not _has_moved(key, checksums, known)
    and (_is_fixed(key) or not _is_in(key, allowed))
  ]
  changed = {
    name: (ours, known[name])
    for name, ours in checksums.items()
    if known.get(name, ours) != ours
  }
  lines += [
    f'{name}: changed since the run in {workdir} was started; undo the change, '
    f'use another --workdir, or allow the change: {_ALLOW}={_key(name)}'
    for name in changed
    if not _is_in(_key(name), allowed)
  ]
  if lines:
    raise OtherRun('\n'.join(lines))
  return changes, changed, known


def _has_moved(
  key: str, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> bool:
  """Returns whether a changed key names files of unchanged content.

  If the key is `data.root`, this must hold for all data files of the config.

  Args:
    key: a key whose new value differs from the recorded value.
    ours, theirs: the new and the recorded checksums of files, see `_checksums`.
  """
  keys = _DATA if key == 'data.root' else (key,)
  contents = [
    [(_key(name), value) for name, value in files.items() if _key(name) in keys]
    for files in (ours, theirs)
  ]
  return bool(contents[0]) and sorted(contents[0]) == sorted(contents[1])


def _read(path: pathlib.Path) -> dict[str, Any]:
  try:
    return json.loads(named_files.here(path.read_text(encoding='utf-8')))
  except (ValueError, RecursionError) as error:
    raise OtherRun(f'{path}: not the record of a run ({error})') from error


def _digest(config: Mapping[str, Any]) -> str:
  """Returns the digest of a config, without keys that may always change.

  A key that older versions lack does not count if it has the value with which
  runs of these versions trained. So versions with and without the key compute
  the same digest.
  """
  earlier = schema.earlier().items()
  values = {
    key: value
    for key, value in settings.flatten(config).items()
    if not _is_free(key) and (key, value) not in earlier
  }
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _checksums(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns a dict from `key=path` to the checksum of each file of a config.

  A file at another path has another name in the dict. So if only the path has
  changed, the value of the config key differs, but no file counts as changed.
  """
  found = {
    f'{name.partition(":")[0]}={path}': named_files.checksum(path)
    for name, path in named_files.find(config)
  }
  return _named({name: x for name, x in found.items() if x})


def _named(checksums: Mapping[str, str]) -> dict[str, str]:
  """Returns checksums with `asset:` names in place of packaged files' paths."""
  return json.loads(named_files.recorded(json.dumps(checksums)))


def _key(name: str) -> str:
  """Returns the config key in a name `key=path`, see `_checksums`."""
  return name.partition('=')[0]


def _is_free(key: str) -> bool:
  return key in schema.KEYS and schema.KEYS[key].resume == schema.FREE


def _is_fixed(key: str) -> bool:
  is_key = key in schema.KEYS
  return schema.KEYS[key].resume == schema.FIXED if is_key else key in _IDENTITY


def _is_in(key: str, names: Sequence[str]) -> bool:
  """Returns whether a key or one of its sections is among the names."""
  return f'{key}.'.startswith(tuple(f'{name}.' for name in names))


def _differences(config, recorded) -> _Changes:
  """Returns the keys that differ, without keys that may always change.

  Args:
    config: the new config.
    recorded: the recorded config.
  """
  earlier = schema.earlier()
  ours = earlier | settings.flatten(config)
  theirs = earlier | schema.present(settings.flatten(recorded))
  # A key may be missing on one side. None cannot stand for a missing key,
  # because None may be the value of a key.
  return {
    key: (ours.get(key, _ABSENT), theirs.get(key, _ABSENT))
    for key in sorted(ours.keys() | theirs.keys())
    if not _is_free(key)
    and (key not in ours or key not in theirs or ours[key] != theirs[key])
  }


def _refusal(key: str, ours: Any, theirs: Any, workdir: pathlib.Path) -> str:
  """Returns the error line for a key that must not change, with advice."""
  ours, theirs = ("''" if x == '' else x for x in (ours, theirs))
  advice = '' if _is_fixed(key) else f', or allow the change: {_ALLOW}={key}'
  return (
    f'{key}={ours}: the run in {workdir} was started with {theirs}; use '
    f'another --workdir{advice}'
  )


def _note_changes(changes: _Changes, workdir: pathlib.Path) -> None:
  """Appends changes, with the newest saved step, to config_changes.jsonl."""
  newest = run_folder.newest_step(workdir)
  lines = [
    {'after_step': newest, 'key': key, 'from': theirs, 'to': ours}
    for key, (ours, theirs) in changes.items()
  ]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  if text:
    atomic_files.append(workdir / 'config_changes.jsonl', text.encode())
