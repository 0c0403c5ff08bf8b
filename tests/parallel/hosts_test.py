"""Hosts meet, agree and end together, whatever happens to one of them."""

import asyncio
import concurrent.futures
import json
import pathlib
import socket
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from stppo_jax import interruption
from stppo_jax.parallel import connected_hosts
from stppo_jax.parallel import coordinator as coordinator_lib
from stppo_jax.parallel import distributed

_REPO = pathlib.Path(__file__).resolve().parents[2]
_NAME = socket.gethostname()


def _address() -> str:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{probe.getsockname()[1]}'


def _in_threads(count, body, **options):
  """Returns what `body` returns for each host of a run in this process."""
  address = _address()

  def one(index):
    hosts = connected_hosts.ConnectedHosts(
      address,
      index,
      count,
      jax_port=1,
      start_timeout=30,
      patience=30,
      **options,
    )
    try:
      return body(hosts)
    finally:
      hosts.leave()
      hosts.close()

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    return list(pool.map(one, range(count)))


def test_a_stop_ends_the_wait_before_a_program_on_all_hosts(
  monkeypatch, capsys
):
  monkeypatch.setattr(coordinator_lib, 'FIRST_WAIT', 0)

  def body(hosts):
    together = hosts.exchange(coordinator_lib.PROGRAM, hosts.index)
    if hosts.index == 1:
      hosts.stop()
    else:
      for _ in range(2):  # the second time they have heard of it already
        with pytest.raises(interruption.Interrupted):
          hosts.exchange(coordinator_lib.PROGRAM, hosts.index)
    votes = hosts.exchange('vote', hosts.index)
    capsys.readouterr()  # waits before the stop
    time.sleep(2 * coordinator_lib.PAUSE)  # as of hosts that save
    return together, votes

  assert _in_threads(3, body) == [([0, 1, 2], [0, 1, 2])] * 3
  assert 'next program' not in capsys.readouterr().err


def test_hosts_exchange_values():
  def body(hosts):
    assert hosts.count == 3 and hosts.names == [_NAME] * 3
    words = hosts.exchange('word', {'from': hosts.index})
    again = hosts.exchange('word', None)
    return words, again, hosts.gather('number', hosts.index), hosts.share(10)

  everywhere = [{'from': 0}, {'from': 1}, {'from': 2}]
  first, *others = _in_threads(3, body)
  assert first == (everywhere, [None] * 3, [0, 1, 2], slice(0, 3))
  assert others[0] == (everywhere, [None] * 3, None, slice(3, 6))
  assert others[1] == (everywhere, [None] * 3, None, slice(6, 10))


def test_a_host_that_waits_costs_little():
  def body(hosts):
    hosts.exchange('vote', {})
    began = time.process_time(), time.monotonic()
    for _ in range(50):
      hosts.exchange('vote', {})
    return time.process_time() - began[0]

  # Of both hosts, which share this process: a vote costs less than 5 ms.
  assert max(_in_threads(2, body)) / 50 < 5e-3


def test_a_timeout_is_an_error_of_this_host_alone():
  def body(hosts):
    if hosts.index:
      with pytest.raises(TimeoutError):
        hosts.exchange('late', 1, timeout=0.05)
    hosts.exchange('meeting', None)
    if not hosts.index:
      return hosts.exchange('late', 0)
    return None

  assert _in_threads(2, body) == [[0, 1], None]


def _start(address: str, *rest: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-u', '-m', 'tests.parallel.one_host', address, *rest],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=_REPO,
  )


def _ends(
  *actions: str, patience: str = '30', frozen: int | None = None
) -> list[tuple[str, int]]:
  """Returns error output and exit code of hosts that do these actions.

  Args:
    *actions: see `one_host`.
    patience: seconds that they wait for each other.
    frozen: the host that must be killed once the others have ended.
  """
  address, count = _address(), str(len(actions))
  processes = [
    _start(address, str(n), count, what, patience)
    for n, what in enumerate(actions)
  ]
  for n, process in enumerate(processes):
    if n != frozen:
      process.wait(timeout=60)
  if frozen is not None:
    processes[frozen].kill()
  return [(p.communicate(timeout=60)[1], p.returncode) for p in processes]


# The first host is also the coordinator.
_CULPRITS = pytest.mark.parametrize(
  'culprit', [0, pytest.param(1, marks=pytest.mark.slow)]
)


@_CULPRITS
def test_a_host_that_fails_is_named_on_all(culprit):
  actions = ['wait', 'wait', 'compute']
  actions[culprit] = 'raise'
  ends = _ends(*actions)
  line = f'host {culprit} ({_NAME}): ValueError: two lines\n'
  assert ends.pop(culprit) == ('', 70)
  # One waits in Python, the other in something that cannot be interrupted.
  assert ends == [(line, 70), (line, 70)]


@_CULPRITS
def test_a_host_that_is_killed_is_named_on_all(culprit):
  actions = ['wait', 'wait', 'compute']
  actions[culprit] = 'die'
  ends = _ends(*actions)
  assert ends.pop(culprit)[1] == -9
  for text, code in ends:
    assert code == 75 and text.count('\n') == 1
    assert text.startswith(f'host {culprit} ({_NAME})') and 'gone' in text


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named_on_all():
  """It sleeps; the others wait for it in Python."""
  for text, code in _ends('wait', 'wait', 'compute', patience='2'):
    assert code == 75 and text.startswith(f'host 2 ({_NAME}) ')
    assert text.endswith(' within 2 s\n')


@pytest.mark.slow
@pytest.mark.parametrize('culprit', [0, 1])
def test_a_host_that_is_frozen_is_named_on_all(culprit):
  """The others wait for it where nothing can be interrupted."""
  actions = ['compute', 'compute', 'compute']
  actions[culprit] = 'freeze'
  ends = _ends(*actions, patience='5', frozen=culprit)
  assert ends.pop(culprit)[1] == -9
  for text, code in ends:
    assert code == 75 and text.startswith(f'host {culprit} ({_NAME})')
    assert text.endswith(' within 5 s\n')


class _Stranded(NamedTuple):
  """Hosts that never meet: where they are expected, and their ends."""

  address: str
  ends: list[tuple[str, int]]


# They wait for seconds: all at the same time.
@pytest.fixture(scope='module')
def stranded():
  """Returns hosts of three runs: one never comes, none is there, too many."""
  alone, never, crowded = (_address() for _ in range(3))
  places = {
    alone: (('0', '3'), ('2', '3')),
    never: (('1', '2'),),
    crowded: (('0', '2'), ('0', '2'), ('1', '3')),
  }
  processes = {
    address: [_start(address, *place, 'wait') for place in of_run]
    for address, of_run in places.items()
  }
  return [
    _Stranded(
      address, [(p.communicate(timeout=60)[1], p.returncode) for p in of_run]
    )
    for address, of_run in processes.items()
  ]


@pytest.mark.slow
def test_hosts_that_do_not_come_are_named(stranded):
  (alone, ends), (never, lost), _ = stranded
  # A line while they wait, and another one at the end.
  for text, code in ends:
    said, end = text.splitlines()
    assert code == 75 and f'host 1 to connect to {alone}' in said
    assert end.startswith('host 1 ') and end.endswith('within 7 s')
  ((text, code),) = lost
  said, end = text.splitlines()
  assert code == 75 and 'within 7 s' in end
  for line in (said, end):
    assert line.startswith('process 1 of 2 ') and never in line


@pytest.mark.slow
def test_a_place_is_taken_once(stranded):
  *_, (address, ends) = stranded
  texts, codes = zip(*ends)
  # Two coordinators cannot listen at one address; one waits for the others.
  assert sorted(codes) == [2, 75, 75]
  assert all(address in text for text in texts)
  assert any('2 processes are expected, not 3' in text for text in texts)
  assert any('cannot listen' in text for text in texts)


_MUST_BE_BELOW = 'must be below the number of processes of the '


@pytest.mark.parametrize(
  ('flags', 'collectors', 'line'),
  [
    (('h:1', 2, -1), 0, '--process_id: missing'),
    (('h', 2, 0), 0, '--coordinator=h: must be'),
    (('h:x', 2, 0), 0, '--coordinator=h:x: must be'),
    (('h:1', 2, 2), 0, '--process_id=2: must be'),
    # One host must learn.
    (('h:1', 2, 0), 2, f'mesh.collectors=2: {_MUST_BE_BELOW}'),
    (('h:1', 1, 0), 1, f'mesh.collectors=1: {_MUST_BE_BELOW}'),
  ],
)
def test_flags_are_checked(flags, collectors, line):
  with pytest.raises(ValueError, match=f'^{line}'):
    distributed.place(*flags, collectors=collectors)


def test_hosts_of_a_role_agree_without_the_others():
  def body(hosts):
    group = hosts.group
    assert group.learns == (hosts.index < 2) and not group.is_alone
    assert group.is_first == (hosts.index == 0)
    words = [group.exchange('word', f'{hosts.index}')]
    if group.learns:  # more often than those that collect
      words += [group.exchange('word', n) for n in range(2)]
    gathered = group.gather('word', hosts.index)
    assert hosts.exchange('word', 1) == [1] * 5
    return group.describe(0), words, group.share(6), gathered

  hosts = _in_threads(5, body, collectors=3)
  for first, count, role, words in (
    (0, 2, 'learns', [['0', '1'], [0, 0], [1, 1]]),
    (2, 3, 'collects', [['2', '3', '4']]),
  ):
    for n, found in enumerate(hosts[first : first + count]):
      rows = slice(6 // count * n, 6 // count * (n + 1))
      gathered = None if n else list(range(first, first + count))
      name = f'host {first} ({_NAME}, which {role})'
      assert found == (name, words, rows, gathered)


def test_flags_give_a_place(monkeypatch):
  assert distributed.place('h:1', 2, 1) == distributed.Place('h:1', 1, 2)
  assert distributed.place('h:1', 1, 0) is None  # nobody to wait for
  assert distributed.place('', 0, -1) is None  # no cluster
  for name, value in {
    'SLURM_JOB_ID': '4097',
    'SLURM_STEP_NODELIST': 'node[007-009],other',
    'SLURM_NTASKS': '3',
    'SLURM_PROCID': '2',
    'SLURM_LOCALID': '0',
  }.items():
    monkeypatch.setenv(name, value)
  place = distributed.place('', 0, -1)
  assert place is not None
  assert place.coordinator.startswith('node007:')
  assert (place.process_id, place.num_processes) == (2, 3)
  monkeypatch.setenv('SLURM_NTASKS', '1')
  assert distributed.place('', 0, -1) is None


def test_a_host_that_is_lost_is_named_and_may_come_back_later():
  async def run():
    coordinator = coordinator_lib.Coordinator(
      address='here', count=2, jax_port=1, start_timeout=60, patience=60
    )
    port = int(_address().rpartition(':')[2])
    await coordinator.start('127.0.0.1', port)
    ends = [await coordinator_lib.connect('127.0.0.1', port) for _ in range(2)]
    for index, (_, writer) in enumerate(ends):
      hello = {'process': index, 'count': 2, 'name': f'h{index}'}
      coordinator_lib.send(writer, hello)
    (first, first_writer), (_, writer) = ends
    assert b'met' in await first.readline()
    writer.write(b'[\n')
    lines = [await asyncio.wait_for(first.readline(), 30)]
    for index in (1, 0):
      again, other = await coordinator_lib.connect('127.0.0.1', port)
      hello = {'process': index, 'count': 2, 'name': f'h{index}'}
      coordinator_lib.send(other, hello)
      lines.append(await asyncio.wait_for(again.readline(), 30))
      other.close()
    first_writer.close()
    writer.close()
    await coordinator.close(0)
    return map(json.loads, lines)

  gone, early, taken = asyncio.run(run())
  assert gone['failed'].startswith('host 1 (h1) is gone')
  # The lost one was started again too soon; the other one still runs.
  assert early['code'] == 75 and 'about to end' in early['failed']
  assert taken['code'] == 2 and '--process_id=0 is taken' in taken['failed']
