"""Calls Google Cloud through the program `gcloud`."""

from collections.abc import Mapping
import contextlib
import json
import re
import subprocess
import time
from typing import Any

from stppo_jax import exits

PREFIX = 'stppo-'  # the names of all slices begin with it
OVER = ('SUSPENDED', 'FAILED')
_PASSING = re.compile(
  '(?i)unavailable|internal error|deadline|timed? ?out|reset|resolve|'
  'HTTPError 50[0234]'
)
PATIENCE = 5  # polls that a worker waits before it deletes the slice itself
SILENCE = 20  # polls without a report, after which a slice is given up


class CloudError(Exception):
  """Raised if a command of gcloud has failed; the message is one line."""

  exit_code = exits.TRY_AGAIN


class Ended(Exception):
  """Raised to end the program, which prints the message, a single line."""

  exit_code = exits.TRY_AGAIN


def reap(values: Mapping[str, Any]) -> int:
  """Deletes the slices of a zone that no longer work on a run.

  Such slices have failed or were taken away, or their run has ended, or their
  workers have not reported for long. Returns the exit code.
  """
  done = run(tpu_command(values, 'list', '--format=json'))
  if done.returncode:
    say(reason(done))
    return exits.TRY_AGAIN if is_transient(reason(done)) else exits.USAGE
  code = 0
  for found in map(parse_slice, json.loads(done.stdout)):
    name, state, where = found['name'], found['state'], found['place']
    if not name.startswith(PREFIX):  # another user's slice
      continue
    # The launcher may be gone, so its record and the reports of the workers
    # decide. A slice that was requested but does not exist yet has no report,
    # and is kept.
    try:
      workers = reports(read(f'{where}/state-*')) if where else {}
      record = json.loads(read(f'{where}/record') or '{}') if where else {}
      newest = max(
        (when for when, _ in workers.values()), default=record.get('active', 0)
      )
      silence = SILENCE * record.get('poll', 60)
      is_silent = newest and time.time() - newest > silence
      has_ended = any(x[0] in ('ended', 'failed') for _, x in workers.values())
      if state in OVER or has_ended or is_silent or record.get('ended'):
        delete(values, name, 1)
        say(f'{name}: {state}; deleted')
      else:
        words = '; '.join(' '.join(x) for _, x in workers.values())
        say(f'{name}: {state}; {words or "no worker yet"}; kept')
    except CloudError as error:
      say(str(error))
      code = exits.TRY_AGAIN
  return code


def parse_slice(described: Mapping[str, Any]) -> dict[str, str]:
  """Returns facts about a slice from the JSON with which gcloud describes it.

  The facts are the name of the slice, its state, the error if it failed
  ('problem'), and the address to which its workers report ('place').
  """
  state = described.get('state', {})
  error = state.get('failedData', {}).get('error', {})
  (node, *_) = described.get('tpu', {}).get('nodeSpec', [{}])
  metadata = node.get('node', {}).get('metadata', {})
  return {
    'name': described.get('name', '').rpartition('/')[2],
    'state': state.get('state', ''),
    'problem': error.get('message', ''),
    'place': metadata.get('stppo-place', ''),
  }


def reports(text: str) -> dict[str, tuple[int, list[str]]]:
  """Returns the time and the words of the last report of each worker, by host.

  Args:
    text: the lines of the reports. A line that is cut off, because it was read
      while a worker wrote it, is left out.
  """
  lines = [line.split() for line in text.splitlines()]
  return {
    host: (int(when), words)
    for host, when, *words in (x for x in lines if len(x) > 2)
    if when.isdigit()
  }


def read(address: str) -> str:
  """Returns the text of the objects at an address; '' if there are none.

  Raises:
    CloudError: if the bucket cannot be read.
  """
  done = run(['gcloud', 'storage', 'cat', address])
  if done.returncode and b'matched no objects' not in done.stderr:
    raise CloudError(reason(done))
  return '' if done.returncode else done.stdout.decode(errors='replace')


def write(address: str, data: bytes, *, new: bool = False) -> bool:
  """Writes an object in a bucket; returns whether it was written.

  Args:
    address: the address of the object.
    data: the content of the object.
    new: whether an object that exists already stays as it is. If False, the
      object is replaced.

  Raises:
    CloudError: if the bucket cannot be written.
  """
  words = ['gcloud', 'storage', 'cp', '--quiet', '-', address]
  done = run(words + ['--if-generation-match=0'] * new, data)
  if done.returncode:
    if new and b'412' in done.stderr:
      return False
    raise CloudError(reason(done))
  return True


def delete(values: Mapping[str, Any], name: str, pause: float) -> None:
  """Deletes a slice, in up to five attempts, unless it is gone already.

  Raises:
    CloudError: if all attempts failed, so that the slice may still exist.
  """
  for attempt in range(5):
    done = run(tpu_command(values, 'delete', name, '--force', '--quiet'))
    if not done.returncode or b'NOT_FOUND' in done.stderr:
      return
    time.sleep(pause * attempt)
  raise CloudError(f'{name} could not be deleted: {reason(done)}')


def tpu_command(values: Mapping[str, Any], *words: str) -> list[str]:
  where = (f'--project={values["project"]}', f'--zone={values["zone"]}')
  return ['gcloud', 'compute', 'tpus', 'queued-resources', *words, *where]


def run(words: list[str], data: bytes = b'') -> subprocess.CompletedProcess:
  """Runs a command in a session of its own, with `data` as standard input.

  So a signal of the terminal, such as Ctrl-C, does not reach the command. Only
  this program gets the signal, and decides what the signal ends.
  """
  return subprocess.run(
    words, input=data, capture_output=True, check=False, start_new_session=True
  )


def reason(done: subprocess.CompletedProcess[bytes]) -> str:
  """Returns why a command failed, in one line."""
  lines = done.stderr.decode(errors='replace').strip().splitlines()
  if any('active account' in line for line in lines):
    return 'gcloud: no account is logged in; run gcloud auth login'
  errors = [x for x in lines if x.startswith('ERROR')] or lines[-1:]
  return ' '.join(''.join(errors[:1]).split()) or 'no reason'


def is_transient(line: str) -> bool:
  """Returns whether a retry may succeed, given the `reason` of a failure."""
  return 'EXHAUSTED' not in line and bool(_PASSING.search(line))


def say(line: str) -> None:
  """Prints a line with the time."""
  show(f'{time.strftime("%FT%TZ", time.gmtime())} {line}\n')


def show(text: str) -> None:
  """Prints a text.

  If the terminal is gone, no error is raised, because the program has to go on
  following its slices.
  """
  with contextlib.suppress(OSError):
    print(text, end='', flush=True)
