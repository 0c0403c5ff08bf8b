"""Claims the folder of a run, and handles signals that precede its steps.

    with claim.claimed(config, workdir, restart=restart, hosts=hosts) as folder:
      ...                          # everything that can be refused is refused
      folder.record()              # from here on the folder is that of this run

The folder of another run is refused at once. Before `record`, nothing is
written there but the lock, and the heartbeat of a run that has begun.
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
    path: the folder, or the folder of this machine that stands for it.
    config: what defines the run in it.
    hosts: the hosts of the run that do what this one does; the first of them
      writes what all share.
    interrupt: notices signals.
    lock: the lock, or the lease; None if another host holds it.
    stack: the contexts that are left together with the folder.
    lines: prints what is logged.
    restart: whether what the folder held is to be moved aside.
    bucket: the folder in a bucket that `path` stands for; None if there is
      none.
    watch: tells observers what the run does.
    outer: the folder in which it lies, see `inside`.
    exit_code: the exit code of the process: 0, or that of the signal that has
      ended the body.
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
    """Enters a context that is left with the folder."""
    return self.stack.enter_context(context)

  def interruptible(
    self, *, patience: float | None = voting.PATIENCE
  ) -> contextlib.AbstractContextManager[None]:
    """Runs a body that a signal may cut short; hosts vote, see `voting`."""
    return voting.voted(self.hosts, self.interrupt, patience=patience)

  def agreed(self, value: Any) -> contextlib.AbstractContextManager[list[Any]]:
    """Yields the values of all hosts; see `voting.agreed`."""
    return voting.agreed(self.hosts, self.interrupt, value)

  def collective_section(self) -> contextlib.AbstractContextManager[None]:
    """Runs a body in which hosts wait for each other; see `voting`."""
    return voting.collective_section(self.hosts, self.interruptible)

  def check_prompts(self) -> None:
    """Refuses to resume with a bos_token a run that began without one.

    Raises:
      OtherRun: see `run_record.check_prompts`.
    """
    if self.hosts.is_first and not self.restart:
      run_record.check_prompts(self.path)

  def check(self) -> None:
    """Refuses the folder of another run before anything is asked of a server.

    Raises:
      OtherRun, CheckpointsMissing: see `record`.
    """
    with self.interruptible(), exits.as_misconfigured(str(self.path)):
      if not self.hosts.is_first or self.restart:
        return
      run_record.check_checkpoints(self.path)
      run_record.check_config(self.config, self.path)
      # Observers should see early that the run is being resumed. With a bucket,
      # `record` begins to watch, within the uploads: the last heartbeat must be
      # written before the last upload.
      if run_folder.read(self.path) and self.bucket is None:
        self._begin_watch()

  def record(self) -> None:
    """Makes the folder the run's own, and begins to watch the run.

    The config is recorded there.

    Raises:
      OtherRun: the folder has another run.
      CheckpointsMissing: the run's checkpoints are gone.
      BucketError: the bucket is out of reach.
    """
    # This must precede the first compilation, so that the next start finds the
    # compiled programs there.
    compilation.keep(self.path / run_folder.COMPILED)
    with self.interruptible(), exits.as_misconfigured(str(self.path)):
      number = self.hosts.whole.index
      self.enter(self.watch.phases_watched(self.path, number))
      if self.hosts.is_first:
        aside = run_folder.move_all_aside(self.path) if self.restart else None
        if aside is not None:
          _log.info('%s: what it held is now in %s', self.path, aside)
        run_record.check_checkpoints(self.path)
        run_record.record_config(self.config, self.path)
      # Not earlier: until here the folder may be that of another run.
      if self.bucket is not None and self.outer is None:
        self.enter(self.bucket.pushed(self.interrupt.seconds_left))
      if self.hosts.is_first and not self.watch.has_begun:
        self._begin_watch()
    self.publish()

  def publish(self) -> None:
    """Lets all hosts see what the first one has written; they all call it."""
    self.settle()
    if self.bucket is not None and self.hosts.count > 1:
      with self.interruptible():
        if not self.hosts.is_first:
          self.bucket.with_retries(self.bucket.pull)

  def settle(self) -> None:
    """Uploads what the hosts have written; none goes on before all have."""
    if self.bucket is not None:
      with self.interruptible():
        self.flush()

  def flush(self) -> None:
    """Uploads what this host has written, if the run is in a bucket."""
    if self.bucket is not None:
      self.bucket.with_retries(self.bucket.push)

  def check_held(self) -> None:
    """Checks, before a commit, that no other process has taken the folder.

    Raises:
      Lost: another process has.
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
    """Yields a folder in this one, for a run that is a part of this run.

    Args:
      name: the name of the folder.
      config: the config of that run.
      **also: what else defines it, such as its command.
    """
    # The inner run sets both for itself; they are restored, because one signal
    # must end both runs.
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
    # At a signal the inner run has saved itself; the signal ends the run around
    # it, too.
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
  """Yields the locked folder of a run; refuses one that holds another run.

  A signal ends the body without an error; `Folder.exit_code` is then that of
  the signal.

  Args:
    config: the config of the run.
    workdir: the run's folder, which is made if it is missing, or its address in
      a bucket.
    restart: see `Folder`.
    hosts: the hosts of the run, all of which call this function.
    unit: the name of what the run counts, for the lines that are printed.
    **also: what else defines the run, such as its command.

  Raises:
    Misconfigured: the hosts differ, the folder cannot be written, or a run in a
      bucket is to begin anew.
    OtherRun, CheckpointsMissing: see `Folder.record`.
    Locked: another process writes there.
    BucketError: the bucket is out of reach.
    Interrupted: a signal came before the body.
  """
  address = str(workdir).rstrip('/') if buckets.is_address(workdir) else ''
  if address and restart:
    raise exits.Misconfigured(
      f'--restart: nothing is moved aside in a bucket; give another address '
      f'than --workdir={address}'
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
    # This comes first: hosts with different configs would soon do different
    # things, and each would wait in a vote that the others never reach.
    agreement.check(hosts, config)
    interrupt = stack.enter_context(interruption.Interruption())
    interrupt.outlook = f'ending before the first {unit}'
    interrupt.grace = config.preemption.grace
    # A signal to one host ends the run on all hosts. This host tells the others
    # of its signal, and reacts to one of theirs as if it had received it.
    interrupt.on_signal, hosts.on_stop = hosts.stop, interrupt.request
    # Once the signal handlers are gone, a request would kill the process.
    stack.callback(setattr, hosts, 'on_stop', lambda: None)
    stack.enter_context(compilation.announced())
    lock = folder = None
    try:
      # The first host locks, and the others learn by the vote if it could not.
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
      # From here on a signal ends the run by its exit code; before, it is
      # raised to the caller.
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
  """Yields a temporary folder; errors name the address in its place."""
  with tempfile.TemporaryDirectory(
    prefix='stppo_jax-run-', ignore_cleanup_errors=True
  ) as temporary:
    folder = pathlib.Path(temporary, address.rpartition('/')[2])
    folder.mkdir()
    try:
      yield folder
    except Exception as error:
      # The temporary folder is gone when somebody reads the message.
      error.args = tuple(
        x.replace(str(folder), address) if isinstance(x, str) else x
        for x in error.args
      )
      raise


def tell_before_first(unit: str) -> None:
  """Logs that a run was interrupted when it had done nothing yet."""
  # Nothing is saved here: each file that this start has written is complete, or
  # the next start makes it again.
  _log.info(
    'interrupted before the first %s; the same command starts again', unit
  )


def _force_exit(
  folder: Folder, unit: str, exit_code: int, *, answered: bool
) -> bool:
  """Ends a process that has nothing to save; see `Interruption.force_exit`."""
  del answered
  if not folder.hosts.is_alone:  # they end by a vote, or not at all
    return False
  tell_before_first(unit)
  folder.release(exit_code)
  return True
