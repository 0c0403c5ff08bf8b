"""Checks that the hosts of a run agree on config, files, code and programs.

If hosts differed in a key of the config, in a file or in the code, no error
would be raised. Parts of each step would follow different configs, or the hosts
would wait for each other in different programs. So before the first program,
the hosts compare everything that a step depends on. The message about a
difference names the hosts.
"""

import hashlib
import importlib.util
import os
import pathlib
import platform
import time
from typing import Any
import uuid

import jax

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.workdir import named_files
from stppo_jax.workdir import run_folder

# Keys that may differ between hosts: every host may use its own retriever.
_OWN_KEYS = ('retrieval.url',)
_PACKAGE = pathlib.Path(__file__).parents[1]
# Seconds within which a shared file system must show a new file to other
# machines, and seconds between two looks for the file.
_PROBE_PATIENCE = 10.0
_PROBE_PAUSE = 0.1


class HostsDiffer(Exception):
  """Hosts are about to run different programs, or have unequal array shapes."""

  exit_code = exits.BUG


def check(hosts: hosts_lib.Hosts, config) -> None:
  """Checks that all hosts have the same config, files, code and devices.

  Raises:
    Misconfigured: the hosts differ. All hosts raise this; the message has a
      line for each difference.
  """
  if hosts.count == 1:
    return
  values = {
    f'config.{key}': repr(value)
    for key, value in settings.flatten(config).items()
    if key not in _OWN_KEYS
  }
  mine = _facts(config) | values
  # Hosts that only collect trajectories may have other devices.
  if hosts.collectors:
    del mine['the devices']
  if lines := differences(hosts, hosts.exchange('facts', mine)):
    raise exits.Misconfigured('\n'.join(lines))


def check_program(
  hosts: hosts_lib.Hosts, program: str, step: int, arrays: Any
) -> None:
  """Checks that all hosts are about to run the same program, on equal shapes.

  Without this check, hosts that differ would wait for each other in the program
  for ever.

  Args:
    hosts: the hosts of the run.
    program: the name of the program.
    step: the step to which the program belongs.
    arrays: this host's part of the arrays whose shapes may differ.

  Raises:
    HostsDiffer: the hosts differ. All hosts raise this; the message has a line
      for each difference.
  """
  if hosts.count == 1:
    return
  signature = {'the program': program, 'the step': str(step)}
  for path, x in jax.tree_util.tree_leaves_with_path(arrays):
    name = jax.tree_util.keystr(path, simple=True, separator='.')
    signature[f'the part of {name}'] = f'{x.dtype}{list(x.shape)}'
  if lines := differences(hosts, hosts.exchange('program', signature)):
    raise HostsDiffer('\n'.join(lines))


def differences(
  hosts: hosts_lib.Hosts, facts: list[dict[str, str]]
) -> list[str]:
  """Returns a line for each fact that differs, with the value of each host.

  Args:
    hosts: the hosts of the run.
    facts: for each host, a dict from the name of a fact to its value.
  """
  lines = []
  for name in dict.fromkeys(name for fact in facts for name in fact):
    holders: dict[str, list[str]] = {}
    for index, fact in enumerate(facts):
      value = fact.get(name, '(absent)')
      holders.setdefault(value, []).append(hosts.describe(index))
    if len(holders) > 1:
      who = '; '.join(f'{x} on {", ".join(on)}' for x, on in holders.items())
      lines.append(f'{name} differs between hosts: {who}')
  return lines


def check_folder(hosts: hosts_lib.Hosts, workdir: pathlib.Path) -> None:
  """Checks that all hosts see the files that the first host writes to a folder.

  Raises:
    Misconfigured: the folder is not on a shared file system. All hosts raise
      this error.
  """
  if hosts.count == 1:
    return
  probe = workdir / f'{run_folder.PROBE}{uuid.uuid4().hex}'
  if hosts.is_first:
    probe.touch()
  try:
    (name, *_) = hosts.exchange('probe', probe.name)
    seen = hosts.exchange('seen', _appears(workdir / name))
  finally:
    if hosts.is_first:
      probe.unlink()
  blind = [hosts.describe(n) for n, sees in enumerate(seen) if not sees]
  if blind:
    raise exits.Misconfigured(
      f'--workdir={workdir}: {", ".join(blind)} cannot see the files that '
      f'{hosts.describe(0)} writes there; the folder must be on a file system '
      'that all hosts share'
    )


def _appears(path: pathlib.Path) -> bool:
  """Returns whether a file appears within `_PROBE_PATIENCE` seconds."""
  deadline = time.monotonic() + _PROBE_PATIENCE
  while time.monotonic() < deadline:
    # This lists the folder instead of asking for the file: a network file
    # system may answer from its cache that the file does not exist.
    if path.parent.is_dir() and path.name in os.listdir(path.parent):
      return True
    time.sleep(_PROBE_PAUSE)
  return False


def _facts(config) -> dict[str, str]:
  """Returns versions, checksums and devices, which must be equal on all hosts.

  The key of each fact is its name in error messages.
  """
  devices = jax.local_devices()
  code = hashlib.sha256()
  for path in sorted(_PACKAGE.rglob('*.py')):
    code.update(f'{path.relative_to(_PACKAGE)}\0'.encode())
    code.update(path.read_bytes())
  facts = {
    'the code': code.hexdigest()[:12],
    'the version of jax': jax.__version__,
    'the version of Python': platform.python_version(),
    'the devices': f'{len(devices)} {devices[0].device_kind}',
  }
  for name, path in named_files.find(config):
    facts[name] = named_files.checksum(path) or 'no such file'
  for key, name in (
    ('env.reward_function', config.env.reward_function),
    ('env.gymnasium.make', config.env.gymnasium.make),
  ):
    if name:
      facts[f'the source of {key}={name}'] = _source(name)
  return facts


def _source(name: str) -> str:
  """Returns the checksum of the file that defines a function of the user.

  If there is no such module or file, a text that says this is returned.

  Args:
    name: the function as `module:function`.
  """
  module = name.partition(':')[0]
  # Python must also find a file that was made after the start of this process.
  importlib.invalidate_caches()
  try:
    found = importlib.util.find_spec(module)
  # `find_spec` imports the package of the module, which may raise any error.
  # The error is reported later, when the function is loaded.
  except Exception:
    found = None
  if found is None or found.origin is None:
    return 'no such module'
  return named_files.checksum(pathlib.Path(found.origin)) or 'no such file'
