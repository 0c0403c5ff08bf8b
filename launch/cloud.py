"""Asks things of Google Cloud through the program `gcloud`."""

from collections.abc import Mapping
import json
import subprocess
import time
from typing import Any

from stppo_jax import exits

PREFIX = 'stppo-'  # of the names of all slices
OVER = ('SUSPENDED', 'FAILED')
SILENCE = 20  # polls without a word of any worker, after which it is given up


class CloudError(Exception):
  """A command of gcloud that failed; one line."""

  exit_code = exits.TRY_AGAIN


def reap(values: Mapping[str, Any]) -> int:
  """Deletes the slices of a zone whose run has ended; returns the exit code."""
  done = run(tpus(values, 'list', '--format=json'))
  if done.returncode:
    say(reason(done))
    return exits.TRY_AGAIN
  code = 0
  for item in json.loads(done.stdout):
    name, state = item['name'].rpartition('/')[2], item['state']['state']
    if not name.startswith(PREFIX):
      continue
    node = item['tpu']['nodeSpec'][0]['node']
    where = node.get('metadata', {}).get('stppo-place', '')
    try:
      text = read(f'{where}/state-*') if where else ''
      words = [line.split()[1:] for line in text.splitlines()]
      newest = max((int(x[0]) for x in words), default=0)
      is_silent = words and time.time() - newest > SILENCE * 60
      has_ended = any(x[1] in ('ended', 'failed') for x in words)
      if state in OVER or has_ended or is_silent:
        delete(values, name, 1)
        say(f'{name}: {state}; deleted')
      else:
        told = '; '.join(' '.join(x[1:]) for x in words) or 'no worker yet'
        say(f'{name}: {state}; {told}; kept')
    except CloudError as error:
      say(str(error))
      code = exits.TRY_AGAIN
  return code


def read(address: str) -> str:
  """Returns the text of objects; '' if there are none.

  Raises:
    CloudError: the bucket could not be read.
  """
  done = run(['gcloud', 'storage', 'cat', address])
  if done.returncode and b'matched no objects' not in done.stderr:
    raise CloudError(reason(done))
  return '' if done.returncode else done.stdout.decode(errors='replace')


def write(address: str, data: bytes, *, new: bool = False) -> bool:
  """Writes an object; returns False if it must be new and is not.

  Raises:
    CloudError: the bucket could not be written.
  """
  words = ['gcloud', 'storage', 'cp', '--quiet', '-', address]
  done = run(words + ['--if-generation-match=0'] * new, data)
  if done.returncode:
    if new and b'412' in done.stderr:
      return False
    raise CloudError(reason(done))
  return True


def delete(values: Mapping[str, Any], name: str, pause: float) -> None:
  """Deletes a slice, in several attempts; one that is gone is no error.

  Raises:
    CloudError: it may still be there.
  """
  for attempt in range(5):
    done = run(tpus(values, 'delete', name, '--force', '--quiet'))
    if not done.returncode or b'NOT_FOUND' in done.stderr:
      return
    time.sleep(pause * attempt)
  raise CloudError(f'{name} could not be deleted: {reason(done)}')


def tpus(values: Mapping[str, Any], *words: str) -> list[str]:
  where = (f'--project={values["project"]}', f'--zone={values["zone"]}')
  return ['gcloud', 'compute', 'tpus', 'queued-resources', *words, *where]


def run(words: list[str], data: bytes = b'') -> subprocess.CompletedProcess:
  """Runs a command in a session of its own, which a Ctrl-C does not reach."""
  return subprocess.run(
    words, input=data, capture_output=True, check=False, start_new_session=True
  )


def reason(done: subprocess.CompletedProcess[bytes]) -> str:
  """Returns why a command failed, in one line."""
  lines = done.stderr.decode(errors='replace').strip().splitlines()
  errors = [x for x in lines if x.startswith('ERROR')] or lines[-1:]
  return ' '.join(''.join(errors[:1]).split()) or 'no reason'


def say(line: str) -> None:
  print(time.strftime('%FT%TZ', time.gmtime()), line, flush=True)
