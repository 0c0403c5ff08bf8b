"""A cloud in a box: stand-ins for gcloud, curl and uv, and VMs of processes."""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys

from tests.training import runs

_HERE = pathlib.Path(__file__).parent
_UV = pathlib.Path(sys.executable).parent / 'uv'
# The installer of uv, which fails if it shall.
_CURL = """#!/bin/bash
if [ "$("$CLOUD/bin/rule" curl)" -gt 0 ]; then
  echo 'curl: (7) could not connect' >&2
  exit 7
fi
for ((i = 1; i < $#; i++)); do [ "${!i}" = -o ] && next=$((i + 1)); done
echo 'cp "$CLOUD/bin/uv" "$UV_UNMANAGED_INSTALL/uv"' >"${!next}"
"""
# The real uv makes the environment and installs the pins from its cache, which
# has the wheels, because this environment was made so. There is no TPU.
_UV_STAND_IN = """#!/bin/bash
if [ "$1" = pip ]; then
  sleep "$("$CLOUD/bin/rule" setup)"
  if [ "$("$CLOUD/bin/rule" pip)" -gt 0 ]; then
    echo 'error: failed to fetch jax' >&2
    exit 1
  fi
  words=()
  for word; do words+=("${word/jax\\[tpu\\]/jax}"); done
  UV_CACHE_DIR=$UV_CACHE REAL_UV --offline "${words[@]}" ||
    UV_CACHE_DIR=$UV_CACHE REAL_UV "${words[@]}"
else
  REAL_UV venv --clear --python REAL_PYTHON "${!#}" || exit
  # What a TPU tells jax are flags here.
  mv "${!#}/bin/python" "${!#}/bin/real_python"
  cp "$CLOUD/bin/vm_python" "${!#}/bin/python"
fi
"""
_VM_PYTHON = """#!/bin/bash
words=("$@")
case " $* " in
  *' stppo_jax train '*)
    words+=(--coordinator=127.0.0.1:"$VM_PORT" --num_processes=2)
    words+=(--process_id="$VM_NUMBER" --start_timeout=60)
    ;;
  *' launch.first_hour '*)
    words+=(--coordinator=127.0.0.1:"$VM_PORT" --num_processes=2)
    words+=(--process_id="$VM_NUMBER" --megabytes=1)
    ;;
esac
exec "$(dirname "$0")/real_python" "${words[@]}"
"""
# A run that only ends, for tests of what follows.
_ENDS = """#!/bin/bash
case " $* " in
  *' stppo_jax train '*) sleep "$("$CLOUD/bin/rule" seconds)" ;;
  *) exit 0 ;;
esac
exit "$("$CLOUD/bin/rule" "exit-$VM_NUMBER")"
"""


class Box:
  """A cloud of one zone.

  Args:
    folder: holds all of it.
    trains: whether runs train; otherwise they end as `rules` say.
  """

  def __init__(self, folder: pathlib.Path, *, trains: bool):
    self.folder = folder
    for name in ('bin', 'buckets/lab', 'slices', 'vms', 'here'):
      (folder / name).mkdir(parents=True)
    os.environ['CLOUD'] = str(folder)
    self.gcloud = importlib.reload(
      importlib.import_module('tests.launch.gcloud')
    )
    python = f'{sys.executable} -SE'
    uv = _UV_STAND_IN
    if not trains:
      uv = uv.replace('REAL_UV --offline "${words[@]}" ||', 'true ||')
      uv = uv.replace('REAL_UV venv', 'mkdir -p "${!#}/bin" || REAL_UV')
      uv = uv.replace('mv "${!#}', ': "${!#}')
    for name, text in {
      'gcloud': f'#!/bin/sh\nexec {python} {_HERE}/gcloud.py "$@"\n',
      'rule': f'#!/bin/sh\nexec {python} {folder}/rule.py "$@"\n',
      'curl': _CURL,
      'uv': uv.replace('REAL_UV', str(_UV)).replace(
        'REAL_PYTHON', sys.executable
      ),
      'vm_python': _VM_PYTHON if trains else _ENDS,
    }.items():
      path = folder / 'bin' / name
      path.write_text(text)
      path.chmod(0o755)
    (folder / 'rule.py').write_text(
      f'import sys\nsys.path.insert(0, {str(_HERE)!r})\nimport gcloud\n'
      'print(gcloud.rule(sys.argv[1]) or 0)\n'
    )
    kept = ('JAX_', 'XLA_', 'NPROC', 'OMP_', 'STORAGE_', 'GCSFS_', 'GOOGLE_')
    kept += ('TENSORSTORE_',)
    environment = {k: x for k, x in os.environ.items() if k.startswith(kept)}
    cache = os.environ.get('UV_CACHE_DIR') or pathlib.Path.home() / '.cache/uv'
    self.environment = environment | {
      'JAX_NUM_CPU_DEVICES': '2',
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
      'UV_CACHE': str(cache),
      'DELAY': '1',
    }
    (folder / 'environment.json').write_text(json.dumps(self.environment))
    self._started: list[subprocess.Popen] = []

  @property
  def bucket(self) -> pathlib.Path:
    """The folder of the only bucket, gs://lab."""
    return self.folder / 'buckets' / 'lab'

  def rules(self, **rules) -> None:
    """Says what shall go wrong from now on."""
    (self.folder / 'rules.json').write_text(json.dumps(rules))

  def submit(
    self,
    *flags: str,
    workdir: str = 'gs://lab/runs/one',
    stdin: int = subprocess.DEVNULL,
  ):
    """Starts the launcher, from a folder that is not the clone."""
    words = ['launch.submit', 'tpu', f'--workdir={workdir}']
    # Of equal flags the last one counts.
    return self.start([*words, '--config=mine.py', *flags], stdin=stdin)

  def start(self, words: list[str], *, stdin: int = subprocess.DEVNULL):
    """Starts a module with flags, there; those of a slice are added."""
    words = [*words, '--project=the-lab', '--zone=us-west4-a', '--poll=1']
    process = subprocess.Popen(
      [sys.executable, '-m', *words, '--accelerator=v4-16'],
      cwd=self.folder / 'here',
      env=os.environ
      | {
        'PATH': f'{self.folder}/bin:{os.environ["PATH"]}',
        'PYTHONPATH': str(runs.REPO),
        'PYTHONUNBUFFERED': '1',
      },
      stdin=stdin,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self._started.append(process)
    return process

  def slices(self) -> list[str]:
    """Returns the names of all slices that are paid for."""
    return sorted(x.stem for x in (self.folder / 'slices').glob('*.json'))

  def calls(self, start: str) -> list[str]:
    """Returns the calls of gcloud that begin so."""
    lines = (self.folder / 'calls').read_text().splitlines()
    return [line for line in lines if line.startswith(start)]

  def preempt(self, name: str) -> None:
    """Takes a slice away, without a warning."""
    self.gcloud.kill(f'{name}-w-')
    path = self.folder / 'slices' / f'{name}.json'
    item = json.loads(path.read_text()) | {'state': {'state': 'SUSPENDED'}}
    path.write_text(json.dumps(item))

  def reset(self, name: str, number: int) -> None:
    """Cuts the power of a machine of a slice, which boots again."""
    self.gcloud.kill(f'{name}-w-{number}')
    code = f'import sys; sys.path.insert(0, {str(_HERE)!r}); import gcloud; '
    code += f'gcloud.boot({name!r}, {number})'
    subprocess.run([sys.executable, '-SE', '-c', code], check=True)

  def console(self) -> str:
    """Returns what all VMs have printed."""
    paths = sorted((self.folder / 'vms').glob('*/console'))
    return '\n'.join(f'== {x}\n{x.read_text()}' for x in paths)

  def close(self) -> None:
    """Ends all that runs."""
    for process in self._started:
      with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
      process.wait(timeout=60)
      assert process.stdout is not None
      process.stdout.close()
    self.gcloud.kill('')
