"""Examines the machine, and the files and services that a run would use.

Each check yields findings. A finding is a grade and one line, which says what
was found or what to do. Nothing is changed on the machine: to test whether a
folder can be written, a file without a name is made, which disappears when it
is closed.
"""

import asyncio
from collections.abc import Generator, Iterator, Mapping, Sequence
import glob
import importlib.metadata
import math
import os
import pathlib
import platform
import shutil
import tomllib
from typing import Any, NamedTuple

import jax
from packaging import requirements as requirements_lib
from packaging import specifiers

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.envs import environments
from stppo_jax.learner import learner as learner_lib
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.tools import retriever_check
from stppo_jax.training import checkpoint_state
from stppo_jax.training import components
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

OK, NOTE, WRONG = 'ok', 'note', 'WRONG'

# The free bytes of memory and of disk that every run needs.
_LEAST_MEMORY = memory_lib.GIB
_LEAST_DISK = memory_lib.GIB
# Packages whose versions are always printed. Other packages are printed only if
# they are missing or have a wrong version.
_SHOWN = ('jax', 'flax', 'orbax-checkpoint', 'transformers')
# The device files of NVIDIA GPUs, of older TPUs and of newer TPUs.
_ACCELERATORS = ('/dev/nvidia[0-9]*', '/dev/accel[0-9]*', '/dev/vfio/[0-9]*')


class Finding(NamedTuple):
  """The result of a check: `OK`, `NOTE` or `WRONG`, and one line."""

  grade: str
  line: str


def examine(
  config: Any, workdir: str, folders: Mapping[str, pathlib.Path]
) -> Iterator[Finding]:
  """Yields the findings of all checks.

  Args:
    config: the config of a run; None to check the machine only.
    workdir: the folder of the run; '' if it is not known.
    folders: the folders that the config names, keyed by their config keys.
  """
  yield from versions(*declared())
  found = devices()
  yield found
  on_host = on_disk = 0
  if config is not None and found.grade != WRONG:
    built = yield from setup(config)
    if built is not None:
      state = state_size(built.learner)
      if mesh_lib.platform(built.learner.mesh) == 'cpu':
        on_host = state
      # The disk holds the `keep` newest checkpoints, the best checkpoint, and a
      # checkpoint that is being written.
      on_disk = (config.checkpoint.keep + 2) * state
      yield from retriever(config, built)
  yield memory(available_memory(), on_host)
  if cache := os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    yield folder('cache', pathlib.Path(cache))
  if workdir:
    path = pathlib.Path(workdir)
    owner = run_folder.command_of(path)
    command = owner if owner in ('sft', 'prefer') else 'train'
    problems = run_folder.problems(
      workdir, flag='--workdir', command=command, reads=folders
    )
    for problem in problems:
      yield Finding(WRONG, f'workdir: {problem.removeprefix("--workdir=")}')
    # The last checks are about the lock file and the disk, and a bucket has
    # neither.
    if buckets.is_address(workdir):
      return
    held = lock.holder(path)
    if held is not None and held[1] is not False:
      yield Finding(
        NOTE,
        f'lock: {held[0]} writes to {path}; no other run can begin there '
        'before this process ends',
      )
    if not problems:
      yield folder('workdir', path, needed=on_disk)


def declared() -> tuple[str, list[str]]:
  """Returns the versions of Python, and the packages, that stppo_jax needs.

  The versions are a range such as '>=3.11'. The packages are requirements such
  as 'jax>=0.10,<0.13'.

  In a clone of the repository, both are read from the files of the clone, which
  may be newer than the metadata of the installed package.
  """
  root = pathlib.Path(__file__).resolve().parents[2]
  project, required = root / 'pyproject.toml', root / 'requirements.in'
  if project.is_file() and required.is_file():
    content = tomllib.loads(project.read_text('utf-8'))
    lines = required.read_text('utf-8').splitlines()
    lines = [line.partition('#')[0].strip() for line in lines]
    return content['project']['requires-python'], [x for x in lines if x]
  metadata = importlib.metadata.metadata('stppo_jax')
  return metadata['Requires-Python'], metadata.get_all('Requires-Dist') or []


def versions(python: str, requirements: Sequence[str]) -> Iterator[Finding]:
  """Checks that the versions of Python and of packages are supported.

  Args:
    python: the supported versions of Python, such as '>=3.11'.
    requirements: packages with their supported versions, such as
      'jax>=0.10,<0.13'. Packages of extras are not checked, because not every
      run needs them.
  """
  version = platform.python_version()
  # Without `prereleases`, a pre-release of Python would count as unsupported.
  if specifiers.SpecifierSet(python).contains(version, prereleases=True):
    yield Finding(OK, f'python: {version}')
  else:
    yield Finding(WRONG, f'python: {version}, but must be {python}')
  shown, others, is_wrong = [], 0, False
  for text in requirements:
    wanted = requirements_lib.Requirement(text)
    if wanted.marker and not wanted.marker.evaluate({'extra': ''}):
      continue
    try:
      found = importlib.metadata.version(wanted.name)
      problem = f'{found}, but must be {wanted.specifier}'
    except importlib.metadata.PackageNotFoundError:
      found, problem = '', 'is missing'
    if not found or not wanted.specifier.contains(found, prereleases=True):
      is_wrong = True
      yield Finding(
        WRONG,
        f'packages: {wanted.name} {problem}; run: pip install '
        f"'{wanted.name}{wanted.specifier}'",
      )
    elif wanted.name in _SHOWN:
      shown.append(f'{wanted.name} {found}')
    else:
      others += 1
  if not is_wrong:
    yield Finding(
      OK, f'packages: {", ".join(shown)}, and {others} others are supported'
    )


def devices() -> Finding:
  """Reports the devices of jax, and an accelerator that jax leaves idle."""
  try:
    found = jax.devices()
  except RuntimeError as error:
    reason = ' '.join(str(error).split())
    return Finding(
      WRONG,
      f'devices: jax cannot start ({reason}). Does another process hold the '
      'devices? JAX_PLATFORMS=cpu does without them',
    )
  kind = found[0].device_kind
  line = f'devices: {len(found)} {found[0].platform}'
  line += '' if kind == found[0].platform else f' ({kind})'
  limit = (found[0].memory_stats() or {}).get('bytes_limit')
  line += f', {memory_lib.gib(limit)} of memory each' if limit else ''
  unused = [path for pattern in _ACCELERATORS for path in glob.glob(pattern)]
  if found[0].platform == 'cpu' and unused:
    return Finding(
      NOTE,
      f'{line}; but {unused[0]} is an accelerator, which jax does not use: '
      'install the extra cuda or tpu, and set no JAX_PLATFORMS',
    )
  return Finding(OK, line)


def memory(available: int | None, needed: int = 0) -> Finding:
  """Compares the free memory of the host with the memory that a run needs.

  Args:
    available: the result of `available_memory`.
    needed: the bytes that the run needs; 0 if they are not known.
  """
  if available is None:
    return Finding(NOTE, 'memory: this system does not say how much is free')
  line = f'memory: {memory_lib.gib(available)} free'
  least = max(needed, _LEAST_MEMORY)
  if available < least:
    line += f', but {memory_lib.gib(least)} are needed: end other programs'
  return Finding(OK if available >= least else WRONG, line)


def available_memory() -> int | None:
  """Returns the free bytes of the host's memory; None if they are not known.

  In a container, the result is at most the number of bytes that the limit of
  the container leaves free.
  """
  free = []
  try:
    with open('/proc/meminfo', encoding='utf-8') as file:
      fields = dict(line.split(':', 1) for line in file)
    free.append(int(fields['MemAvailable'].split()[0]) * 1024)
    # The limit of a container may be lower than the free memory of the host. If
    # it is exceeded, the kernel kills a process without a message.
    group = pathlib.Path('/sys/fs/cgroup')
    most = (group / 'memory.max').read_text('utf-8')
    used = (group / 'memory.current').read_text('utf-8')
    free.append(int(most) - int(used))
  except (OSError, ValueError, KeyError):
    pass  # no limit is set, or the system is not Linux
  return min(free, default=None)


def folder(name: str, path: pathlib.Path, *, needed: int = 0) -> Finding:
  """Checks that a folder can be written or made, and that its disk has room.

  Args:
    name: the name of the folder in the finding, such as 'workdir'.
    path: the folder, which may not exist yet.
    needed: the bytes that the run needs there; 0 if they are not known.
  """
  if problem := atomic_files.refusal(path):
    return Finding(WRONG, f'{name}: {problem}: choose another folder')
  # A folder that does not exist yet will be on the disk of its nearest parent
  # that exists.
  existing = path.absolute()
  while not existing.exists():
    existing = existing.parent
  free = shutil.disk_usage(existing).free
  line = f'{name}: {path} can be written, {memory_lib.gib(free)} free'
  least = max(needed, _LEAST_DISK)
  if free < least:
    line += f', but {memory_lib.gib(least)} are needed: remove files'
  return Finding(OK if free >= least else WRONG, line)


def setup(config) -> Generator[Finding, None, components.Components | None]:
  """Builds the components of a run, as `train` does before its first step.

  Yields:
    The findings on the config, the data, the tokenizer and the model.

  Returns:
    The components; None if they cannot be built.
  """
  # `train` makes the same call, so a config that `train` would refuse is
  # refused here too.
  try:
    built = components.build(config)
  except exits.Misconfigured as error:
    for line in str(error).splitlines():
      yield Finding(WRONG, f'config: {line}')
    return None
  question = built.questions.train(0, 1, resample_round=0)[0]
  yield Finding(
    OK, f'data: {config.data.name}; its first question is {question.text!r}'
  )
  home = (
    config.model.tokenizer_path or config.model.path or 'made from the data'
  )
  yield Finding(OK, f'tokenizer: {built.tokenizer.vocab_size} tokens, {home}')
  weights = built.learner.abstract_policy_params()
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
  source = config.model.path or 'new weights'
  yield Finding(OK, f'model: {source}, {count:,} parameters are trained')
  yield from (Finding(NOTE, line) for line in built.notes)
  return built


def state_size(learner: learner_lib.Learner) -> int:
  """Returns the bytes of the training state, computed from its shapes."""
  state = checkpoint_state.abstract_state(learner, learner.abstract_start()[0])
  return sum(
    math.prod(leaf.shape) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(state)
  )


def retriever(config, built: components.Components) -> Iterator[Finding]:
  """Examines the config's retriever, with the first question as the query."""
  options = config.retrieval
  if not environments.find(config.env.name).needs_retriever:
    yield Finding(OK, f'retriever: env.name={config.env.name} needs none')
  elif not options.url:
    yield Finding(OK, 'retriever: embedded in the run')
  else:
    question = built.questions.train(0, 1, resample_round=0)[0]
    asked = retriever_check.Examination(
      options.url,
      dialect=options.dialect,
      corpus=question.corpus,
      query=question.text,
      timeout=options.timeout,
    )
    found = []
    say = lambda *said: found.append(said)
    try:
      asyncio.run(retriever_check.examine(asked, say))
    except retriever_check.Unusable as error:
      found.append((WRONG, str(error)))
    for grade, line in found:
      yield Finding(grade, f'retriever: {line}')
