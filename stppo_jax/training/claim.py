"""Claims the folder of a run, and handles signals before its first step.

    with claim.claimed(config, workdir, restart=restart, hosts=hosts) as folder:
      ...                          # checks that may refuse the run
      folder.record()              # from here on the folder belongs to the run

The folder of another run is refused at once. Before `record`, only the lock is
written to the folder and, if the run is being resumed, the heartbeat.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import logging
import pathlib
import tempfile
from typing import Any, TypeVar

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax import streams
from stppo_jax.parallel import compilation
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import voting
from stppo_jax.workdir import agreement
from stppo_jax.workdir import bucket_folder
from stppo_jax.workdir import lease as lease_lib
from stppo_jax.workdir import lock as lock_lib
from stppo_jax.workdir import run_folder
from stppo_jax.workdir import run_monitor
from stppo_jax.workdir import run_record

T = TypeVar('T')
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Folder:
  """The folder of a run that this process holds, with its lock and signals.

  Attributes:
    path: the folder. For a run in a bucket, it is a folder of this machine that
      stands for the folder in the bucket.
    config: the values that define the run, as a nested mapping.
    hosts: the hosts with the task of this host: either all hosts that learn, or
      all hosts that only collect.
    interrupt: notices signals.
    lock: the lock of the folder, or its lease if the run is in a bucket; None
      if another host of the run holds the lock.
    stack: the contexts that are left together with the folder.
    lines: prints the lines that the package logs.
    restart: whether the run begins anew. If so, the earlier files of the folder
      are moved aside.
    bucket: the folder in a bucket that `path` stands for; None if the run is
      not in a bucket.
    watch: writes the heartbeat and watches phases, see `run_monitor.Watch`.
    outer: the folder around this folder if `inside` has made this folder; None
      for the folder of a whole run.
    exit_code: the exit code of the process: 0, or the exit code of the signal
      that has ended the run.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  hosts: hosts_lib.Hosts
  interrupt: interruption.Interruption
  lock: lock_lib.Claim | None
  stack: contextlib.ExitStack
  lines: streams.LogLines
  restart: bool
  bucket: bucket_folder.BucketFolder | None = None
  outer: 'Folder | None' = None
  exit_code: int = 0

  def __post_init__(self):
    self.watch = run_monitor.Watch(lambda: self.exit_code)

  def enter(self, context: contextlib.AbstractContextManager[T]) -> T:
    """Enters a context, which is left when the folder is left."""
    return self.stack.enter_context(context)

  def interruptible(
    self, *, patience: float | None = voting.PATIENCE
  ) -> contextlib.AbstractContextManager[None]:
    """Runs a body that a signal may cut short; see `voting.voted`."""
    return voting.voted(self.hosts, self.interrupt, patience=patience)

  def agreed(self, value: Any) -> contextlib.AbstractContextManager[list[Any]]:
    """Yields the values that all hosts pass here; see `voting.agreed`."""
    return voting.agreed(self.hosts, self.interrupt, value)

  def collective_section(self) -> contextlib.AbstractContextManager[None]:
    """Runs a body whose compiled programs need all hosts; see `voting`."""
    return voting.collective_section(self.hosts, self.interruptible)

  def check_prompts(self) -> None:
    """Refuses to resume a run whose prompts began without a bos_token.

    Callers call this only if prompts would now begin with a bos_token.

    Raises:
      OtherRun: see `run_record.check_prompts`.
    """
    if self.hosts.is_first and not self.restart:
      run_record.check_prompts(self.path)

  def check(self) -> None:
    """Refuses a folder of another run, before this run waits for a server.

    Raises:
      OtherRun, CheckpointsMissing: see `record`.
    """
    with self.interruptible(), exits.as_misconfigured(str(self.path)):
      if not self.hosts.is_first or self.restart:
        return
      run_record.check_checkpoints(self.path)
      run_record.check_config(self.config, self.path)
      # Observers should see early that the run is being resumed. For a run in a
      # bucket, `record` begins the watch instead, inside the context that
      # uploads files: so the last heartbeat is written before the last upload.
      if run_folder.read(self.path) and self.bucket is None:
        self._begin_watch()

  def record(self) -> None:
    """Records the run's config in the folder, and begins to watch the run.

    From then on the folder belongs to this run.

    Raises:
      OtherRun: the folder belongs to another run.
      CheckpointsMissing: the run's checkpoints are gone.
      BucketError: the bucket is out of reach.
    """
    # This call must come before the first compilation, so that all compiled
    # programs are kept in the folder, where the next start finds them.
    compilation.keep(self.path / run_folder.COMPILED)
    with self.interruptible(), exits.as_misconfigured(str(self.path)):
      number = self.hosts.whole.index
      self.enter(self.watch.phases_watched(self.path, number))
      if self.hosts.is_first:
        aside = run_folder.move_all_aside(self.path) if self.restart else None
        if aside is not None:
          _log.info('%s: its earlier files are now in %s', self.path, aside)
        run_record.check_checkpoints(self.path)
        run_record.record_config(self.config, self.path)
      # Uploads begin only here: before, the folder may belong to another run.
      if self.bucket is not None and self.outer is None:
        self.enter(self.bucket.pushed(self.interrupt.seconds_left))
      if self.hosts.is_first and not self.watch.has_begun:
        self._begin_watch()
    self.publish()

  def publish(self) -> None:
    """Shares the first host's files with all hosts; every host calls this."""
    self.settle()
    if self.bucket is not None and self.hosts.count > 1:
      with self.interruptible():
        if not self.hosts.is_first:
          self.bucket.with_retries(self.bucket.pull)

  def settle(self) -> None:
    """Uploads the new files of all hosts; returns when every host is done."""
    if self.bucket is not None:
      with self.interruptible():
        self.flush()

  def flush(self) -> None:
    """Uploads the new files of this host, if the run is in a bucket."""
    if self.bucket is not None:
      self.bucket.with_retries(self.bucket.push)

  def check_held(self) -> None:
    """Checks that no other process has taken the folder, before a commit.

    A commit makes a checkpoint valid.

    Raises:
      Lost: another process has taken the folder.
    """
    if self.lock is not None and self.bucket is not None:
      self.bucket.with_retries(self.lock.touch)
    elif self.lock is not None:
      self.lock.check()

  def _begin_watch(self) -> None:
    names, steps = self.hosts.whole.names, self.config['profile']['steps']
    self.enter(self.watch.started(self.path, names, steps, self.lock))

  @contextlib.contextmanager
  def inside(self, name: str, config, **also) -> Iterator['Folder']:
    """Yields a folder inside this folder, for a run that is part of this run.

    Args:
      name: the name of the inner folder.
      config: the config of the inner run.
      **also: further values that define the inner run, such as its command.
    """
    # The inner run sets `force_exit` and `outlook` for itself. At its end, both
    # are restored, because a signal must then end the outer run.
    force_exit, outlook = self.interrupt.force_exit, self.interrupt.outlook
    with contextlib.ExitStack() as stack:
      yield dataclasses.replace(
        self,
        path=self.path / name,
        config={**config.to_dict(), **also},
        stack=stack,
        restart=False,
        outer=self,
      )
    self.interrupt.force_exit, self.interrupt.outlook = force_exit, outlook
    # If a signal came, the inner run has saved itself and ended. This empty
    # body raises `Interrupted` for the same signal, which ends the outer run.
    with self.interruptible():
      pass

  def release(self, exit_code: int) -> None:
    """Releases the folder for a process that is about to end."""
    self.watch.end(exit_code)
    if self.outer is not None:
      self.outer.release(exit_code)
      return
    if self.bucket is not None:
      self.bucket.finish(self.interrupt.seconds_left())
    if self.lock is not None:
      self.lock.release()


@contextlib.contextmanager
def claimed(
  config,
  workdir: str | pathlib.Path,
  *,
  restart: bool = False,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
  unit: str = 'step',
  **also,
) -> Iterator[Folder]:
  """Yields the locked folder of a run; refuses a folder of another run.

  A signal ends the body of the `with` statement without an error.
  `Folder.exit_code` is then the exit code of the signal.

  Args:
    config: the config of the run.
    workdir: the run's folder, which is made if it is missing, or its address in
      a bucket.
    restart: see `Folder`.
    hosts: the hosts of the run, all of which call this function.
    unit: the noun for an iteration of the run in printed lines: 'step' or
      'update'.
    **also: further values that define the run, such as its command.

  Raises:
    Misconfigured: the hosts have different configs or folders, the folder
      cannot be written, or `restart` is given for a run in a bucket.
    OtherRun, CheckpointsMissing: see `Folder.record`.
    Locked: another process writes to the folder.
    BucketError: the bucket is out of reach.
    Interrupted: a signal came before the body.
  """
  address = str(workdir).rstrip('/') if buckets.is_address(workdir) else ''
  if address and restart:
    raise exits.Misconfigured(
      f'--restart: files in a bucket cannot be moved aside; give another '
      f'address than --workdir={address}'
    )
  show = streams.show
  if not hosts.is_first:
    show = functools.partial(print, f'host {hosts.index}:', flush=True)
  with contextlib.ExitStack() as stack:
    lines = stack.enter_context(streams.logged(show))
    path, bucket = pathlib.Path(workdir), None
    if address:
      path = stack.enter_context(_standing_for(address))
      lines.renamed = str(path), address
    # This check comes first: hosts with different configs would soon call
    # different programs, and each would wait in a vote that the other hosts
    # never reach.
    agreement.check(hosts, config)
    interrupt = stack.enter_context(interruption.Interruption())
    interrupt.outlook = f'ending before the first {unit}'
    interrupt.grace = config.preemption.grace
    # A signal to one host ends the run on all hosts. This host tells the other
    # hosts of its signal, and reacts to a signal to another host as if it had
    # got the signal itself.
    interrupt.on_signal, hosts.on_stop = hosts.stop, interrupt.request
    # `request` sends this process a signal. Once the handlers are gone, that
    # signal would kill the process, so `request` must not be called any more.
    stack.callback(setattr, hosts, 'on_stop', lambda: None)
    stack.enter_context(compilation.announced())
    lock = folder = None
    try:
      # Only the first host locks the folder. If locking fails, the vote at the
      # end of the body tells the other hosts.
      with voting.voted(hosts, interrupt):
        if address:
          retry = config.checkpoint.retry
          bucket = bucket_folder.BucketFolder(address, path, retry=retry)
        if hosts.is_first:
          lock = stack.enter_context(
            lease_lib.held(bucket.bucket) if bucket else lock_lib.held(path)
          )
      if bucket is None:
        agreement.check_folder(hosts, path)
      else:
        with voting.voted(hosts, interrupt):
          bucket.pull()
      config = {**config.to_dict(), **also}
      group = hosts.group
      held = Folder(
        path, config, group, interrupt, lock, stack, lines, restart, bucket
      )
      held.check()
      # From here on, a signal ends the body without an error and sets the exit
      # code. Before, `Interrupted` is raised to the caller.
      folder = held
      interrupt.force_exit = functools.partial(_force_exit, folder, unit)
      yield folder
    except interruption.Interrupted as error:
      interrupt.force_exit = interruption.no_force_exit
      if not interrupt.is_told:
        tell_before_first(unit)
      if folder is None:
        raise
      folder.exit_code = error.exit_code
    finally:
      interrupt.force_exit = interruption.no_force_exit


@contextlib.contextmanager
def _standing_for(address: str) -> Iterator[pathlib.Path]:
  """Yields a temporary folder that stands for the folder at an address.

  The messages of errors in the body name the address in place of the temporary
  folder.
  """
  with tempfile.TemporaryDirectory(
    prefix='stppo_jax-run-', ignore_cleanup_errors=True
  ) as temporary:
    folder = pathlib.Path(temporary, address.rpartition('/')[2])
    folder.mkdir()
    try:
      yield folder
    except Exception as error:
      # When a user reads the message, the temporary folder no longer exists.
      error.args = tuple(
        x.replace(str(folder), address) if isinstance(x, str) else x
        for x in error.args
      )
      raise


def tell_before_first(unit: str) -> None:
  """Logs that a signal came before the first step or update of this start."""
  # There is nothing to save: each file that this start has written is complete,
  # or the next start writes it again.
  _log.info(
    'interrupted before the first %s of this start; the same command goes on',
    unit,
  )


def _force_exit(
  folder: Folder, unit: str, exit_code: int, *, answered: bool
) -> bool:
  """Releases the folder before a forced exit; see `Interruption.force_exit`.

  There is nothing to save yet. In a run of several hosts, the folder is not
  released, and no process ends here.

  Returns:
    Whether the process may end now.
  """
  del answered
  if not folder.hosts.is_alone:  # several hosts end only by a vote
    return False
  tell_before_first(unit)
  folder.release(exit_code)
  return True
