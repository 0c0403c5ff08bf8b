"""Stands in for `gcloud`: buckets are folders, and VMs are processes.

    $CLOUD/buckets/BUCKET/...   the objects; with $STORAGE_EMULATOR_HOST, they
                                are those of tests/storage/emulator.py
    $CLOUD/slices/NAME.json     a queued resource, with what it was asked for
    $CLOUD/vms/NAME-w-0/        the disk of a VM; everything that its startup
                                script writes is in it
    $CLOUD/rules.json           what shall go wrong
    $CLOUD/calls                a line for each call

A slice is queued, provisioned and active after three looks at it. Flags that
the real program does not have for a command are refused.
"""

import glob
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

CLOUD = pathlib.Path(os.environ['CLOUD'])
_WHERE = ('project', 'zone', 'format')
_FLAGS = {
  'storage cat': ('range',),
  'storage cp': ('quiet', 'if-generation-match'),
  'secrets versions': ('project', 'secret'),
  'compute tpus queued-resources create': (
    *('node-id', 'accelerator-type', 'runtime-version', 'metadata', 'spot'),
    *('valid-until-duration', 'metadata-from-file', 'reserved', 'network'),
    *('subnetwork', 'service-account', *_WHERE),
  ),
  'compute tpus queued-resources describe': _WHERE,
  'compute tpus queued-resources delete': (*_WHERE, 'force', 'quiet', 'async'),
}


class Failed(Exception):
  """An error of the real program, which it prints and ends with exit code 1."""


def main(argv: list[str]) -> None:
  words = [x for x in argv if not x.startswith('-') or x == '-']
  flags = {}
  for word in argv:
    if word.startswith('-') and word != '-':
      name, _, value = word.removeprefix('--').partition('=')
      flags[name] = value
  with open(CLOUD / 'calls', 'a') as file:
    file.write(' '.join(argv) + '\n')
  count = {'storage': 2, 'secrets': 2}.get(words[0], 4)
  command, rest = ' '.join(words[:count]), words[count:]
  if unknown := flags.keys() - set(_FLAGS[command]):
    raise Failed(f'unrecognized arguments: {unknown}')
  _COMMANDS[command](rest, flags)


def rule(name):
  """Returns what shall go wrong now; a number becomes one less each time."""
  path = CLOUD / 'rules.json'
  rules = json.loads(path.read_text()) if path.exists() else {}
  value = rules.get(name)
  if isinstance(value, int) and value:
    _replace(path, rules | {name: value - 1})
  return value


def _replace(path, content):
  part = path.with_name(f'{path.name}.{os.getpid()}')
  part.write_text(json.dumps(content))
  part.replace(path)


def _http(path, data=None, **query):
  """Returns the answer of the storage; None if there is no such object."""
  address = os.environ['STORAGE_EMULATOR_HOST'] + path
  address += '?' + urllib.parse.urlencode(query)
  try:
    with urllib.request.urlopen(address, data=data) as answer:
      return answer.read()
  except urllib.error.HTTPError as error:
    if error.code == 404:
      return None
    raise Failed(f'HTTPError {error.code}: a pre-condition?') from error


def _stored(address):
  """Returns the content of the objects that match, by name."""
  _network()
  bucket, _, name = address.removeprefix('gs://').partition('/')
  if 'STORAGE_EMULATOR_HOST' not in os.environ:
    paths = sorted(glob.glob(str(CLOUD / 'buckets' / bucket / name)))
    return {path: pathlib.Path(path).read_bytes() for path in paths}
  names, folder = [name], f'/storage/v1/b/{bucket}/o'
  if '*' in name:
    found = json.loads(_http(folder, prefix=name.partition('*')[0]))
    pattern = re.escape(name).replace(r'\*', '[^/]*')
    names = [x['name'] for x in found['items']]
    names = [x for x in names if re.fullmatch(pattern, x)]
  objects = {
    x: _http(f'{folder}/{urllib.parse.quote(x, safe="")}', alt='media')
    for x in names
  }
  return {name: x for name, x in objects.items() if x is not None}


def _store(address, data, new):
  _network()
  bucket, _, name = address.removeprefix('gs://').partition('/')
  if 'STORAGE_EMULATOR_HOST' in os.environ:
    query = {'uploadType': 'media', 'name': name}
    query |= {'ifGenerationMatch': '0'} if new else {}
    _http(f'/upload/storage/v1/b/{bucket}/o', data, **query)
    return
  path = CLOUD / 'buckets' / bucket / name
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'.{path.name}.{os.getpid()}')
  part.write_bytes(data)
  try:
    os.link(part, path) if new else part.replace(path)
  except FileExistsError as error:  # there is one
    raise Failed('HTTPError 412: a pre-condition did not hold') from error
  finally:
    part.unlink(missing_ok=True)


def _network():
  if rule('network') or 'VM' in os.environ and rule('mute'):
    raise Failed('Connection reset by peer')


def _cat(words, flags):
  found = _stored(words[0])
  if not found:
    raise Failed(
      f'The following URLs matched no objects or files:\n-{words[0]}'
    )
  first = int(flags.get('range', '0-').partition('-')[0])
  for name in sorted(found):
    sys.stdout.buffer.write(found[name][first:])


def _cp(words, flags):
  source, target = words
  if '://' in target:
    is_new = flags.get('if-generation-match') == '0'
    file = '/dev/stdin' if source == '-' else source
    _store(target, pathlib.Path(file).read_bytes(), is_new)
    return
  found = _stored(source)
  if not found:
    raise Failed(f'The following URLs matched no objects or files:\n-{source}')
  (data,) = found.values()
  pathlib.Path(target).write_bytes(data)


def _secret(words, flags):
  print(f'WORD={flags["secret"]}')


def _slice(name):
  return CLOUD / 'slices' / f'{name}.json'


def _create(words, flags):
  if problem := rule('create'):
    raise Failed(problem)
  path = _slice(words[0])
  if path.exists():
    raise Failed(f'ALREADY_EXISTS: {words[0]}')
  key, _, file = flags['metadata-from-file'].partition('=')
  script = pathlib.Path(file).read_text()
  name, _, value = flags['metadata'].partition('=')
  path.parent.mkdir(exist_ok=True)
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  item = {
    'name': f'projects/p/locations/z/queuedResources/{words[0]}',
    'state': {'state': 'WAITING_FOR_RESOURCES'},
    'tpu': {'nodeSpec': [{'node': {'metadata': {key: script, name: value}}}]},
    'flags': flags,
    'port': port,
  }
  _replace(path, item)


def _load(name):
  path = _slice(name)
  if not path.exists():
    raise Failed(f'NOT_FOUND: {name}')
  return json.loads(path.read_text())


def _describe(words, flags):
  name = words[0]
  if problem := rule('describe'):
    raise Failed(problem)
  item = _load(name)
  item['state'] = advance(name, item)
  print(json.dumps(item))


def advance(name, item):
  """Returns the next state of a slice, whose VMs start when it is active."""
  following = {
    'WAITING_FOR_RESOURCES': 'PROVISIONING',
    'PROVISIONING': 'ACTIVE',
  }
  state = item['state']
  if rule('capacity') == 'none':
    problem = 'the request has expired: no capacity'
    state = {'state': 'FAILED', 'failedData': {'error': {'message': problem}}}
  elif rule('capacity') != 'never' and state['state'] in following:
    state = {'state': following[state['state']]}
  if state != item['state']:
    _replace(_slice(name), item | {'state': state})
    if state['state'] == 'ACTIVE':
      for number in range(2):
        boot(name, number)
  return state


def boot(name, number):
  """Starts a VM: its startup script, with the folders of this machine's."""
  vm = f'{name}-w-{number}'
  root = CLOUD / 'vms' / vm
  for folder in ('home', 'tmp'):
    (root / folder).mkdir(parents=True, exist_ok=True)
  (root / 'boot_id').write_text(f'{time.time()}\n')
  item = _load(name)
  script = item['tpu']['nodeSpec'][0]['node']['metadata']['startup-script']
  script = script.replace('/opt/stppo_jax', f'{root}/opt')
  script = script.replace('/proc/sys/kernel/random', str(root))
  (root / 'startup.sh').write_text(script)
  with open(root / 'console', 'a') as console:
    subprocess.Popen(
      ['bash', str(root / 'startup.sh')],
      cwd=root,
      env=json.loads((CLOUD / 'environment.json').read_text())
      | {
        'PATH': f'{CLOUD}/bin:/usr/bin:/bin',
        'HOME': str(root / 'home'),
        'TMPDIR': str(root / 'tmp'),
        'HOSTNAME': vm,
        'CLOUD': str(CLOUD),
        'VM': vm,
        'VM_NUMBER': str(number),
        'VM_PORT': str(item['port']),
      },
      stdin=subprocess.DEVNULL,
      stdout=console,
      stderr=console,
      start_new_session=True,
    )


def processes(start):
  """Returns the processes of the VMs whose name begins so."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
    try:
      words = path.read_bytes().split(b'\0')
    except OSError:
      continue
    mine = f'CLOUD={CLOUD}'.encode() in words
    if mine and any(x.startswith(f'VM={start}'.encode()) for x in words):
      found.append(int(path.parent.name))
  return found


def kill(start, number=signal.SIGKILL):
  """Ends the VMs whose name begins so, as when the power fails."""
  for _ in range(3):  # a process may just have started another
    for pid in processes(start):
      if pid != os.getpid():
        try:
          os.kill(pid, number)
        except ProcessLookupError:
          pass


def _delete(words, flags):
  if problem := rule('delete'):
    raise Failed(problem)
  _load(words[0])
  _slice(words[0]).unlink(missing_ok=True)
  kill(f'{words[0]}-w-')


_TPUS = 'compute tpus queued-resources'
_COMMANDS = {
  'storage cat': _cat,
  'storage cp': _cp,
  'secrets versions': _secret,
  f'{_TPUS} create': _create,
  f'{_TPUS} describe': _describe,
  f'{_TPUS} delete': _delete,
}

if __name__ == '__main__':
  try:
    main(sys.argv[1:])
  except Failed as error:
    name = re.sub(r'\W+', '.', ' '.join(sys.argv[1:4]))
    sys.exit(f'ERROR: (gcloud.{name}) {error}')
