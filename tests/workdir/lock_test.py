"""A folder is locked by one process; a lock that nobody holds is taken over."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time

import pytest

from stppo_jax import streams
from stppo_jax.workdir import lock
from tests.workdir import holders

# A process that this one takes for one of another host.
_HOLD_ELSEWHERE = """
import pathlib, socket, sys, time
from stppo_jax.workdir import lock
socket.gethostname = lambda: 'elsewhere'
with lock.held(pathlib.Path(sys.argv[1]), every=0.1) as claim:
  print('held', flush=True)
  try:
    while True:
      claim.check()
      time.sleep(0.05)
  except lock.Lost as error:
    print(f'lost: {error}')
"""


def _change(folder, **fields):
  """Changes what the lock says of its holder."""
  path = folder / lock.NAME
  holder = json.loads(path.read_text())
  path.write_text(json.dumps(holder | fields))


def _left(folder, **fields):
  """Leaves the lock of a process that has ended, with some changes."""
  with holders.started(folder):
    pass
  _change(folder, **fields)


def _refused(folder, **times):
  """Returns the error of taking the lock."""
  with pytest.raises(lock.Locked) as caught:
    with streams.logged(pytest.fail), lock.held(folder, **times):
      pytest.fail('entered')
  assert caught.value.exit_code == 75 and '\n' not in str(caught.value)
  return str(caught.value)


def test_a_living_holder_is_named_and_an_ended_one_is_replaced(tmp_path, said):
  with holders.started(tmp_path) as process:
    text = (tmp_path / lock.NAME).read_text()
    holder = lock.Holder(**json.loads(text))
    assert holder.pid == process.pid
    assert f'{tmp_path}: locked by {holder}' in _refused(tmp_path)
    assert (tmp_path / lock.NAME).read_text() == text
    process.kill()  # before anybody could clean up
    process.wait()
    with lock.held(tmp_path):
      assert (
        json.loads((tmp_path / lock.NAME).read_text())['pid'] == os.getpid()
      )
    (line,) = said
    assert 'took over' in line and str(holder) in line
  assert not list(tmp_path.iterdir())


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path, said):
  # This process is alive, but it did not start when the holder started.
  _left(tmp_path, pid=os.getpid())
  with lock.held(tmp_path):
    assert len(said) == 1


def test_a_host_of_the_same_name_is_another_host(tmp_path):
  # As a pod that was started again on another machine sees it.
  _left(tmp_path, boot='of another machine')
  assert 'once it is silent for 300 s' in _refused(tmp_path)
  found = lock.holder(tmp_path)
  assert found is not None and found[1] is None


@pytest.mark.parametrize('text', ['', '{"host": 1}', '[]', '\x00'])
def test_a_lock_that_names_nobody_may_be_one_of_another_host(tmp_path, text):
  path = tmp_path / lock.NAME
  path.write_text(text)
  assert 'once it is silent for 300 s' in _refused(tmp_path)
  assert path.read_text() == text
  os.utime(path, (0, 0))
  with lock.held(tmp_path, every=0.01):
    assert json.loads(path.read_text())['pid'] == os.getpid()


def test_a_process_that_looks_ended_may_hold_the_file(tmp_path):
  with holders.started(tmp_path) as process:
    # So does the number of a process of another container look here.
    with subprocess.Popen(['true']) as ended:
      ended.wait()
    _change(tmp_path, pid=ended.pid)
    assert 'wait for its end' in _refused(tmp_path)
    _change(tmp_path, pid=process.pid)
    process.communicate()  # releases the lock
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_lock_of_another_host_is_taken_over_once_it_is_silent(
  tmp_path, said
):
  quick, silence = {'every': 1 / 30}, 1.0
  with holders.started(tmp_path, _HOLD_ELSEWHERE) as process:
    time.sleep(2 * silence)
    assert ' on host elsewhere, since 20' in _refused(tmp_path, **quick)
    # As if its network or its machine were frozen. The kernel's lock is gone,
    # which a file system need not have.
    process.send_signal(signal.SIGSTOP)
    text = (tmp_path / lock.NAME).read_text()
    (tmp_path / lock.NAME).unlink()
    (tmp_path / lock.NAME).write_text(text)
    assert 'showed life 0 s ago' in _refused(tmp_path, **quick)
    time.sleep(1.5 * silence)
    with lock.held(tmp_path, **quick) as claim:
      claim.check()
      assert (
        f'took over the lock of an ended run: process {process.pid}'
        in (said[1])
      )
      # The other one finds out, and leaves the lock alone.
      process.send_signal(signal.SIGCONT)
      out, _ = process.communicate()
      assert out.startswith('lost: ') and f'process {os.getpid()} on' in out
      claim.check()
  assert not list(tmp_path.iterdir())


def test_a_silent_lock_that_shows_life_at_last_is_not_taken_over(tmp_path):
  path = tmp_path / lock.NAME
  _left(tmp_path, host='elsewhere')
  os.utime(path, (0, 0))
  lines = []

  def show(line):
    lines.append(line)
    os.utime(path)

  with pytest.raises(lock.Locked, match='showed life'):
    with streams.logged(show), lock.held(tmp_path, every=0.01):
      pytest.fail('entered')
  assert len(lines) == 1


def test_one_of_many_takes_over(tmp_path):
  _left(tmp_path)
  count = 8
  begin, entered, end = threading.Barrier(count), [], threading.Barrier(count)

  def take(number):
    begin.wait()
    with contextlib.suppress(lock.Locked):
      with lock.held(tmp_path):
        entered.append(number)
        end.wait()
        return
    end.wait()

  threads = [threading.Thread(target=take, args=(n,)) for n in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(entered) == 1


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path):
  with lock.held(tmp_path / 'a' / 'b'):
    assert (tmp_path / 'a' / 'b' / lock.NAME).is_file()
  assert not (tmp_path / 'a' / 'b').exists()
  with lock.held(tmp_path / 'a' / 'b'):
    (tmp_path / 'a' / 'b' / 'file').touch()
  assert [p.name for p in (tmp_path / 'a' / 'b').iterdir()] == ['file']


def test_a_lock_that_somebody_else_made_meanwhile_is_not_removed(tmp_path):
  with lock.held(tmp_path):
    (tmp_path / lock.NAME).unlink()
    (tmp_path / lock.NAME).write_text('of another process')
  assert (tmp_path / lock.NAME).read_text() == 'of another process'
