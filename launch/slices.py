"""Runs on slices of Cloud TPU: requests them, watches them, deletes them.

All that is known of a run stands in its bucket, so that the same command goes
on after an interruption of this program, on this machine or another one:

  WORKDIR/launched               the digest of the command whose run is done
  WORKDIR.launch/source-*.tar.gz
  WORKDIR.launch/0001/record     of the first slice: when it was paid for
                     /state-*    of each worker: what it does, told every minute
                     /setup-*    the log of its setup
                     /log-*      the log of its run

Several of these programs may follow one run: a slice is requested by the one
that creates its record.
"""

from collections.abc import Callable
from collections.abc import Mapping
import json
import pathlib
import re
import signal
import sys
import tempfile
import time
from typing import Any
from typing import NoReturn

from launch import accelerators
from launch import cloud
from launch import source as source_lib
from stppo_jax import exits

_NEW = 60  # seconds in which a slice may not be there yet
PATIENCE = 5  # polls that a worker waits before it deletes the slice itself


class Ended(Exception):
  """Ends the program; its line is printed."""

  exit_code = exits.TRY_AGAIN


class Refused(Ended):
  """A request that will never be granted."""

  exit_code = exits.USAGE


class Slices:
  """The slices of one run, of which at most one exists at a time."""

  def __init__(
    self,
    values: Mapping[str, Any],
    script: Callable[[str, str], str],
    source: source_lib.Source,
    job: str,
  ):
    """Sends nothing yet.

    Args:
      values: the values of the options, of config and of workdir.
      script: returns the startup script of a slice by its name and its folder.
      source: what the workers run.
      job: the digest of what they are told to do.
    """
    self._values = values
    self._script = script
    self._source = source
    self._job = job
    self._place = f'{values["workdir"].rstrip("/")}.launch'
    self._poll: int = values['poll']
    self._slice = accelerators.find(values['accelerator'])
    self._live: dict[str, Any] | None = None  # the record of the slice
    self._heard = '', time.time()  # the last words of the workers, and when
    self._said, self._shown = '', 0  # the state, and how much of the log
    self._is_done_since = 0.0

  def name(self, number: int) -> str:
    """Returns the name of a slice, by its number from 1."""
    return f'{cloud.PREFIX}{self._values["name"]}-{number}'

  def folder(self, number: int) -> str:
    """Returns the address of what a slice tells."""
    return f'{self._place}/{number:04d}'

  def script(self, number: int) -> str:
    """Returns the startup script of the workers of a slice."""
    return self._script(self.name(number), self.folder(number))

  def create_command(self, number: int, script: str) -> list[str]:
    """Returns the command that requests a slice, by the file of its script."""
    v = self._values
    words = [
      *('gcloud', 'compute', 'tpus', 'queued-resources', 'create'),
      *(self.name(number), f'--node-id={self.name(number)}'),
      *(f'--project={v["project"]}', f'--zone={v["zone"]}'),
      f'--accelerator-type={v["accelerator"]}',
      f'--runtime-version={v["runtime"] or self._slice.runtime}',
      f'--valid-until-duration={round(3600 * v["wait"])}s',
      f'--metadata=stppo-place={self.folder(number)}',
      f'--metadata-from-file=startup-script={script}',
    ]
    words += [f'--{x}' for x in ('spot', 'reserved') if v[x]]
    for key in ('network', 'subnetwork', 'service_account'):
      if v[key]:
        words.append(f'--{key.replace("_", "-")}={v[key]}')
    return words

  def follow(self) -> int:
    """Runs until the run has ended; returns its exit code.

    No slice is left, unless the program is interrupted and keeps it.
    """

    def interrupt(number, frame) -> NoReturn:
      raise KeyboardInterrupt(number)

    is_kept = False
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
      if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
        signal.signal(number, interrupt)
    try:
      code = self._follow()
      cloud.say(f'{self._values["workdir"]}: ended with exit code {code}')
    except KeyboardInterrupt as error:
      for number in signals:
        signal.signal(number, signal.SIG_DFL)
      is_int = error.args == (signal.SIGINT,)
      code = exits.INTERRUPTED if is_int else exits.TRY_AGAIN
      is_kept = self._is_kept(asks=is_int and sys.stdin.isatty())
    except (Ended, cloud.CloudError) as error:
      cloud.say(str(error))
      code = error.exit_code
    finally:
      for number in signals:  # what is paid for is deleted first
        signal.signal(number, signal.SIG_IGN)
      if not is_kept:
        self._leave('ended')
    return code

  def stop(self) -> int:
    """Deletes the slice of the run; returns the exit code."""
    for record in self._records():
      if not record['ended']:
        self._live = record
        self._leave('stopped')
    return 0

  def _follow(self) -> int:
    self._adopt()
    if self._live is None and self._is_done():
      return 0
    cloud.write(f'{self._place}/{self._source.name}', self._source.data)
    while True:
      code = None
      try:
        if self._live is None:
          self._request()
        code = self._look()
      except cloud.CloudError as error:  # the network; it is asked again
        cloud.say(str(error))
      if code is not None:
        return code
      time.sleep(self._poll)

  def _records(self) -> list[dict[str, Any]]:
    text = cloud.read(f'{self._place}/*/record')
    return sorted(map(json.loads, text.splitlines()), key=lambda x: x['number'])

  def _record(self, record: Mapping[str, Any], *, new: bool = False) -> bool:
    where = f'{self.folder(record["number"])}/record'
    return cloud.write(where, (json.dumps(record) + '\n').encode(), new=new)

  def _adopt(self) -> None:
    """Takes the slice that exists, if the same command has requested it."""
    records = self._records()
    self._live = records[-1] if records and not records[-1]['ended'] else None
    if self._live is None:
      return
    name = self.name(self._live['number'])
    if self._live['job'] != self._job:
      if self._state()[0] or time.time() - self._live['asked'] < _NEW:
        self._live = None
        raise Ended(
          f'{name} runs another command there; end it with --stop, or give that'
        )
      self._leave('lost')
      return
    cloud.say(f'goes on with the slice {name}')
    if self._live['source'] != self._source.name:
      cloud.say(f'it runs {self._live["source"]}, not what is here now')

  def _request(self) -> None:
    """Requests the next slice, within the budget.

    Raises:
      Ended: the budget is spent, or the request was refused.
    """
    records = self._records()
    if records and not records[-1]['ended']:  # of another one of these
      self._adopt()
      return
    self._check_budget(records)
    number, asked = len(records) + 1, time.time()
    live = {'number': number, 'job': self._job, 'source': self._source.name}
    live |= {'asked': asked, 'active': 0.0, 'ended': 0.0, 'reason': ''}
    if not self._record(live, new=True):
      self._adopt()
      return
    self._live, self._heard, self._shown = live, ('', asked), 0
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, 'startup.sh')
      path.write_text(self.script(number), 'utf-8')
      done = cloud.run(self.create_command(number, str(path)))
    if done.returncode:
      line = f'{self.name(number)}: {cloud.reason(done)}'
      is_wrong = re.search('PERMISSION_DENIED|INVALID_ARG|NOT_FOUND', line)
      raise Refused(line) if is_wrong else Ended(line)

  def _look(self) -> int | None:
    """Looks at the slice once; returns the exit code of a run that has ended.

    Raises:
      Ended: the run cannot go on.
      cloud.CloudError: something could not be asked.
    """
    live = self._live
    if live is None:
      return None
    now, folder = time.time(), self.folder(live['number'])
    state, problem = self._state()
    text = cloud.read(f'{folder}/state-*')
    if text != self._heard[0]:
      self._heard = text, now
    words = {line.split()[0]: line.split()[2:] for line in text.splitlines()}
    self._show(state, words)
    if state == 'ACTIVE' and not live['active']:
      live['active'] = now
      self._heard = text, now
      self._record(live)
    for host, (word, *_) in sorted(words.items()):
      if word == 'failed':
        raise Ended(
          f'the setup of {host} failed; its log: gcloud storage cat '
          f'{folder}/setup-{host}'
        )
    codes = [int(x[1]) for x in words.values() if x[0] == 'ended']
    if worst := max((x for x in codes if x not in (0, 75)), default=0):
      return worst
    all_ended = len(codes) >= self._slice.machines
    if self._is_done():
      # The others end now, too, and write their logs.
      self._is_done_since = self._is_done_since or now
      waited = now - self._is_done_since
      if all_ended or state != 'ACTIVE' or waited > PATIENCE * self._poll:
        return 0
    elif all_ended:
      return exits.TRY_AGAIN
    is_new = not live['active'] and now - live['asked'] < _NEW
    if state in cloud.OVER or not state and not is_new:
      if not live['active'] and state == 'FAILED':
        raise Ended(f'{self.name(live["number"])}: {problem or "FAILED"}')
      cloud.say(f'{self.name(live["number"])} was taken away')
      if self._records()[live['number'] - 1]['reason'] == 'stopped':
        self._live = None
        raise Ended('the run was stopped')
      self._leave('lost')
    elif live['active']:
      self._check_budget(self._records())
      if now - self._heard[1] > cloud.SILENCE * self._poll:
        if not text:
          raise Ended(
            f'no worker of {self.name(live["number"])} has said a word: may '
            'its service account write to the bucket, and its network reach it?'
          )
        cloud.say(f'{self.name(live["number"])} is silent')
        self._leave('lost')
    return None

  def _check_budget(self, records: list[dict[str, Any]]) -> None:
    """Raises `Ended` if the slices of the run have spent what they may.

    Runs of the same sweep spend one budget together.
    """
    if self._values['budget']:
      text = cloud.read(f'{self._values["budget"]}/*.launch/*/record')
      records = list(map(json.loads, text.splitlines()))
    paid = [x for x in records if x['active']]
    hours = sum((x['ended'] or time.time()) - x['active'] for x in paid) / 3600
    cost = hours * self._slice.chips * self._values['price']
    had = sum(x['ended'] > 0 for x in paid)
    spent = {'max_slices': had, 'max_hours': hours, 'max_cost': cost}
    for key, used in spent.items():
      most = self._values[key]
      if most and used >= most:
        raise Ended(
          f'--{key}={most:g}: is spent ({had} slices, {hours:.2f} hours); the '
          'same command with more goes on'
        )

  def _state(self) -> tuple[str, str]:
    """Returns the state of the slice, '' if there is none, and its problem."""
    assert self._live is not None
    name = self.name(self._live['number'])
    done = cloud.run(
      cloud.tpus(self._values, 'describe', name, '--format=json')
    )
    if done.returncode and b'NOT_FOUND' not in done.stderr:
      raise cloud.CloudError(cloud.reason(done))
    if done.returncode:
      return '', ''
    state = json.loads(done.stdout).get('state', {})
    error = state.get('failedData', {}).get('error', {})
    return state.get('state', ''), error.get('message', '')

  def _is_done(self) -> bool:
    marker = cloud.read(f'{self._values["workdir"]}/launched')
    return marker.strip() == self._job

  def _leave(self, reason: str) -> None:
    """Deletes the slice, and writes down that it is paid for no longer."""
    if self._live is None:
      return
    self._live |= {'ended': time.time(), 'reason': reason}
    try:
      if reason == 'stopped':  # those who follow it must not request another
        self._record(self._live)
      cloud.delete(self._values, self.name(self._live['number']), self._poll)
      self._record(self._live)
    except cloud.CloudError as error:
      cloud.say(f'{error}; it is paid for: try again, or --reap')
    self._live = None

  def _show(self, state: str, words: Mapping[str, list[str]]) -> None:
    """Prints what has changed, and with --watch the log of the first host."""
    assert self._live is not None
    number = self._live['number']
    told = '; '.join(f'{x} {" ".join(y)}' for x, y in sorted(words.items()))
    line = f'{self.name(number)}: {state or "gone"}; {told or "no worker yet"}'
    if line != self._said:
      cloud.say(line)
    self._said = line
    if self._values['watch'] and words:
      where = f'{self.folder(number)}/log-{min(words)}'
      command = ['gcloud', 'storage', 'cat', f'--range={self._shown}-', where]
      done = cloud.run(command)
      if not done.returncode:  # there may be no log yet, or nothing new
        print(done.stdout.decode(errors='replace'), end='', flush=True)
        self._shown += len(done.stdout)

  def _is_kept(self, *, asks: bool) -> bool:
    """Returns whether the slice is to outlive this program."""
    if self._live is None:
      return False
    choice = self._values['on_interrupt']
    if not choice and asks:
      print('Keep the slice, which is paid for? [Y/n] ', end='', flush=True)
      answer = sys.stdin.readline()
      choice = 'delete' if answer.lower().startswith('n') else 'keep'
    if choice == 'delete':
      return False
    name = self.name(self._live['number'])
    cloud.say(f'{name} is kept; the same command follows it, --stop ends it')
    return True
