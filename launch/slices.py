"""Runs on slices of Cloud TPU: requests them, watches them, deletes them.

All data about a run are in its bucket. So after an interruption of this program
the same command goes on, on this machine or another machine:

  WORKDIR/launched               the digest of the command whose run is done:
                                 all workers have ended with 0
  WORKDIR.launch/source-*.tar.bz2
  WORKDIR.launch/0001/record     of the first slice: when it was paid for
                     /born-*     of each worker: when it began
                     /state-*    of each worker: what it does, told every minute
                     /setup-*    the log of its setup
                     /log-*      the log of its run

Several of these programs may follow one run: the program that creates the
record of a slice requests the slice.
"""

from collections.abc import Mapping
import contextlib
import json
import pathlib
import re
import signal
import sys
import tempfile
import time
from typing import Any, NoReturn

from launch import accelerators
from launch import budget
from launch import cloud
from launch import rendering
from launch import source as source_lib
from stppo_jax import exits

_NEW = 60  # seconds after a request in which the slice may not exist yet


class Refused(cloud.Ended):
  """A request that will never be granted."""

  exit_code = exits.USAGE


class Slices:
  """The slices of one run, of which at most one exists at a time."""

  def __init__(
    self,
    values: dict[str, Any],
    overrides: Mapping[str, str | bool],
    source: source_lib.Source,
    config: str,
  ):
    """Prepares to follow a run; nothing is requested yet.

    Args:
      values: the values of the options, of config and of workdir.
      overrides: keys of the config, as `command_line.parse` returns them.
      source: the source that the workers run.
      config: the config as JSON.
    """
    self._values = values
    self._overrides = overrides
    self._source = source
    command = [rendering.flags_of_run(values, overrides), config]
    # Only the same command may go on with a slice.
    self._job = rendering.digest(json.dumps(command))
    self._place = f'{values["workdir"].rstrip("/")}.launch'
    self._poll: int = values['poll']
    self._slice = accelerators.find(values['accelerator'])
    self.budget = budget.Budget(values, self._slice.chips)
    self._live: dict[str, Any] | None = None  # the record of the slice
    # The last reports of the workers, and when they were new.
    self._last_report = '', time.time()
    self._last_line = ''  # the last line about the slice
    self._log_offset = 0  # the bytes of the log that were printed

  def name(self, number: int) -> str:
    """Returns the name of a slice, by its number from 1."""
    return f'{cloud.PREFIX}{self._values["name"]}-{number}'

  def folder(self, number: int) -> str:
    """Returns the address to which the workers of a slice report."""
    return f'{self._place}/{number:04d}'

  def script(self, number: int, left: float) -> str:
    """Returns the startup script of a slice that is paid for `left` hours."""
    values = {
      'slice': self.name(number),
      'place': self.folder(number),
      'left': left,
      'job': self._job,
    }
    return rendering.render(
      'tpu', self._values | values, self._overrides, source=self._source
    )

  def create_command(self, number: int, script: str) -> list[str]:
    """Returns the command that requests a slice; `script` is a file's path."""
    v, name = self._values, self.name(number)
    words = [
      *('create', name, f'--node-id={name}'),
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
    return cloud.tpu_command(v, *words)

  def follow(self) -> int:
    """Follows the run until it has ended; returns its exit code.

    No slice is left, unless the program is interrupted and keeps it.
    """

    def interrupt(number, frame) -> NoReturn:
      raise KeyboardInterrupt(number)

    # A handler that raises ends any wait, and `finally` then deletes the slice.
    # If the launcher died at once, the slice would remain and cost money.
    is_kept = False
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
      if signal.getsignal(number) != signal.SIG_IGN:  # nohup sets SIG_IGN
        signal.signal(number, interrupt)
    try:
      code = self._follow()
      cloud.say(f'{self._values["workdir"]}: ended with exit code {code}')
    except KeyboardInterrupt as error:
      for number in signals:
        signal.signal(number, signal.SIG_DFL)
      is_int = error.args == (signal.SIGINT,)
      code = exits.INTERRUPTED if is_int else exits.TRY_AGAIN
      is_kept = self._is_kept(asks=is_int)
    except (cloud.Ended, cloud.CloudError) as error:
      cloud.say(str(error))
      code = error.exit_code
    finally:
      # No further signal may end this program before the slice is deleted.
      for number in signals:
        signal.signal(number, signal.SIG_IGN)
      is_left = not is_kept and not self._leave('ended')
    return code or exits.TRY_AGAIN if is_left else code

  def stop(self) -> int:
    """Deletes the slice of the run; returns the exit code."""
    code = 0
    for record in self._records():
      if not record['ended']:
        self._live = record
        code = code if self._leave('stopped') else exits.TRY_AGAIN
    return code

  def _follow(self) -> int:
    self._adopt()
    if self._live is None and cloud.read(self._marker).strip() == self._job:
      return 0
    while True:
      code = None
      try:
        if self._live is None:
          self._request()
        code = self._look()
      except cloud.CloudError as error:  # a passing error: the loop tries again
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
    """Goes on with the slice that exists, if the same command requested it.

    The slice of another command stays untouched, whatever fails here.
    """
    records = self._records()
    if not records or records[-1]['ended']:
      return
    found = records[-1]
    name = self.name(found['number'])
    if found['job'] != self._job:
      if self._describe(name)['state'] or time.time() - found['asked'] < _NEW:
        raise cloud.Ended(
          f'{name} still runs another command; end it with --stop, or follow '
          'it with the same command as before'
        )
      self._live = found
      self._leave('lost', gone=True)
      return
    self._live = found
    cloud.say(f'goes on with the slice {name}')
    if found['source'] != self._source.name:
      cloud.say(f'the slice runs {found["source"]}, not the source here')

  def _request(self) -> None:
    """Requests the next slice, within the budget.

    Raises:
      cloud.Ended: if the budget is spent, or the request was refused.
      CloudError: if a request to the cloud has failed.
    """
    records = self._records()
    if records and not records[-1]['ended']:  # another launcher requested it
      self._adopt()
      return
    paid = self.budget.paid(records)
    self.budget.check(paid, asks=True)
    cloud.write(f'{self._place}/{self._source.name}', self._source.data)
    # The record is written before the request. If this program dies between the
    # two, the next program looks for a slice that does not exist. In the other
    # order, the next program would not know of a slice that costs money.
    number, asked = len(records) + 1, time.time()
    live = {'number': number, 'job': self._job, 'source': self._source.name}
    live |= {'asked': asked, 'active': 0.0, 'ended': 0.0, 'reason': ''}
    live['poll'] = self._poll
    if not self._record(live, new=True):
      self._adopt()
      return
    self._live, self._last_report, self._log_offset = live, ('', asked), 0
    name = self.name(number)
    text = self.script(number, self.budget.hours_left(paid))
    with tempfile.TemporaryDirectory() as here:
      path = pathlib.Path(here, 'startup.sh')
      path.write_text(text, 'utf-8')
      done = cloud.run(self.create_command(number, str(path)))
    line = f'{name}: {cloud.reason(done)}'
    if not done.returncode:
      return
    if 'ALREADY_EXISTS' in line:
      if self._describe(name)['place'] == self.folder(number):
        return  # the answer to the request was lost
      self._live = None  # the slice is not ours and must not be deleted
      self._record(live | {'ended': time.time(), 'reason': 'refused'})
      raise Refused(
        f'{name}: is a slice of another run; give another name with --name'
      )
    if cloud.is_transient(line):
      cloud.say(line)  # later looks find this slice, or request another
      return
    is_wrong = re.search('PERMISSION_DENIED|INVALID_ARG|NOT_FOUND|login', line)
    raise Refused(line) if is_wrong else cloud.Ended(line)

  def _look(self) -> int | None:
    """Looks at the slice once; returns the exit code of a run that has ended.

    Raises:
      cloud.Ended: if the run cannot go on.
      cloud.CloudError: if a request to the cloud has failed.
    """
    live = self._live
    if live is None:
      return None
    now, folder = time.time(), self.folder(live['number'])
    name = self.name(live['number'])
    item = self._describe(name)
    state = item['state']
    text = cloud.read(f'{folder}/state-*')
    if text != self._last_report[0]:
      self._last_report = text, now
    words = {host: words for host, (_, words) in cloud.reports(text).items()}
    self._show(state, words)
    # The slice costs money from now on. If this cannot be written, `active` is
    # still 0 at the next look, which writes it.
    if state == 'ACTIVE' and not live['active']:
      self._record(live | {'active': now})
      live['active'] = now
      self._last_report = text, now
    for host, (word, *_) in sorted(words.items()):
      if word == 'failed':
        raise cloud.Ended(
          f'the setup of {host} failed; its log: gcloud storage cat '
          f'{folder}/setup-{host}'
        )
    # After a code other than 0 and 75 every new start would end in the same
    # way, so the run ends at once. After 0 and 75 this program waits for the
    # other workers.
    codes = [int(x[1]) for x in words.values() if x[0] == 'ended']
    if worst := max((x for x in codes if x not in (0, 75)), default=0):
      return worst
    if len(codes) >= self._slice.machines:
      if any(codes):
        return exits.TRY_AGAIN
      # The last worker writes this marker, too, if its slice still exists.
      cloud.write(self._marker, f'{self._job}\n'.encode())
      return 0
    is_new = not live['active'] and now - live['asked'] < _NEW
    if state in cloud.OVER or not state and not is_new:
      if not live['active'] and state == 'FAILED':
        raise cloud.Ended(f'{name}: {item["problem"] or "FAILED"}')
      cloud.say(f'{name} was taken away')
      if self._records()[live['number'] - 1]['reason'] == 'stopped':
        self._live = None
        raise cloud.Ended('the run was stopped')
      self._leave('lost', gone=True)
    elif live['active']:
      self.budget.check(self.budget.paid(self._records()))
      if now - self._last_report[1] > cloud.SILENCE * self._poll:
        if not text:
          raise cloud.Ended(
            f'no worker of {name} has written to the bucket: see whether its '
            'service account may, and whether its network reaches the bucket'
          )
        cloud.say(f'{name} is silent')
        self._leave('lost')
    return None

  def _describe(self, name: str) -> dict[str, str]:
    """Returns the facts about a slice; empty texts if it does not exist."""
    done = cloud.run(
      cloud.tpu_command(self._values, 'describe', name, '--format=json')
    )
    if done.returncode and b'NOT_FOUND' not in done.stderr:
      raise cloud.CloudError(cloud.reason(done))
    return cloud.parse_slice({} if done.returncode else json.loads(done.stdout))

  @property
  def _marker(self) -> str:
    return f'{self._values["workdir"]}/launched'

  def _leave(self, reason: str, *, gone: bool = False) -> bool:
    """Deletes the slice, and records that it costs no money any more.

    Args:
      reason: the reason, for the record.
      gone: whether the cloud took the slice away, perhaps some time ago.

    Returns:
      Whether the slice certainly no longer exists.
    """
    live, self._live = self._live, None
    if live is None:
      return True
    name, folder = self.name(live['number']), self.folder(live['number'])
    live |= {'ended': time.time(), 'reason': reason}
    deleted = False
    try:
      with contextlib.suppress(cloud.CloudError):
        if reason == 'stopped':  # no other launcher may request the next slice
          self._record(live)
      cloud.delete(self._values, name, self._poll)
      deleted = True
      if gone:
        reports = cloud.reports(cloud.read(f'{folder}/state-*')).values()
        newest = max((when for when, _ in reports), default=live['asked'])
        live['ended'] = min(live['ended'], newest + self._poll)
      if not live['active']:
        born = cloud.read(f'{folder}/born-*').split()
        live['active'] = min(map(float, born), default=0.0)
      self._record(live)
    except cloud.CloudError as error:
      more = '; the slice still costs money: repeat the command'
      cloud.say(str(error) + more * (not deleted))
    return deleted

  def _show(self, state: str, words: Mapping[str, list[str]]) -> None:
    """Prints the state if it is new, and with --watch the first host's log."""
    assert self._live is not None
    number = self._live['number']
    text = '; '.join(f'{x} {" ".join(y)}' for x, y in sorted(words.items()))
    line = f'{self.name(number)}: {state or "gone"}; {text or "no worker yet"}'
    if line != self._last_line:
      cloud.say(line)
    self._last_line = line
    if self._values['watch'] and words:
      where = f'{self.folder(number)}/log-{min(words)}'
      new = f'--range={self._log_offset}-'
      done = cloud.run(['gcloud', 'storage', 'cat', new, where])
      if not done.returncode:  # there may be no log yet, or nothing new
        cloud.show(done.stdout.decode(errors='replace'))
        self._log_offset += len(done.stdout)

  def _is_kept(self, *, asks: bool) -> bool:
    """Returns whether the slice is to outlive this program."""
    if self._live is None:
      return False
    choice = self._values['on_interrupt']
    with contextlib.suppress(OSError):  # the terminal is gone
      if not choice and asks and sys.stdin.isatty():
        cloud.show('Keep the slice, which goes on costing money? [Y/n] ')
        answer = sys.stdin.readline()
        choice = 'delete' if answer.lower().startswith('n') else 'keep'
    if choice == 'delete':
      return False
    name = self.name(self._live['number'])
    cloud.say(f'{name} is kept; the same command follows it, --stop ends it')
    return True
