"""Sends the metrics of a run to experiment trackers, in the background.

A tracker is a third-party package that talks to a server, so its calls may fail
or never return. Therefore a thread makes the calls, from a queue of bounded
length, and the run does not wait for them. Metrics that a tracker has lost are
still in metrics.jsonl.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import logging
import netrc
import os
import pathlib
import queue
import threading
from typing import Any
import urllib.parse

from stppo_jax.records import scrubbing

_log = logging.getLogger(__name__)
_LONGEST = 1000  # the most steps that wait in the queue of a tracker
_PATIENCE = 10.0  # the seconds that the end of a run waits for a tracker
_PROJECT = 'stppo_jax'
_WANDB = 'https://api.wandb.ai'


# An object of a tracker's package, with `log(metrics, step)` and `finish()`.
Experiment = Any


@dataclasses.dataclass(frozen=True)
class Identity:
  """The description of a run for a tracker.

  Attributes:
    title: the name of the run.
    run_id: the id of the run, the same in all starts of the run.
    folder: the run's folder.
    config: config key to value.
  """

  title: str
  run_id: str
  folder: pathlib.Path
  config: Mapping[str, Any]


class Tracker:
  """Calls a tracker in a thread of its own.

  Args:
    name: a key of `TRACKERS`.
    identity: the description of the run for the tracker.
  """

  def __init__(self, name: str, identity: Identity):
    self.name = name
    self._open = lambda: TRACKERS[name](identity)
    self._queue: queue.Queue = queue.Queue(_LONGEST)
    self._error: BaseException | None = None
    # The thread is a daemon, because a call that never returns must not keep
    # the process alive.
    self._thread = threading.Thread(target=self._call, name=name, daemon=True)
    self._thread.start()

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Queues the metrics of a step.

    Raises:
      Exception: the error that the tracker has raised since the last call.
      queue.Full: the tracker does not keep up. These metrics are dropped.
    """
    # An error in the tracker's thread is raised here, by the next call on the
    # thread of the run.
    error, self._error = self._error, None
    if error is None or self._thread.is_alive():
      self._queue.put_nowait((step, dict(metrics)))
    if error is not None:
      raise error

  def close(self, patience: float = _PATIENCE) -> None:
    """Gives the tracker some seconds to send the queued metrics."""
    with contextlib.suppress(queue.Full):
      self._queue.put_nowait(None)
      self._thread.join(patience)

  def _call(self) -> None:
    """Opens the experiment and sends queued metrics, in the thread."""
    experiment = None
    while (item := self._queue.get()) is not None:
      try:
        if experiment is None:
          experiment = self._open()
        step, metrics = item
        experiment.log(metrics, step=step)
      except Exception as error:  # the package may raise anything
        self._error = error
    try:
      if experiment is not None:
        experiment.finish()
    except Exception as error:
      self._error = error


def _open_wandb(identity: Identity) -> Experiment:
  """Opens an experiment of Weights & Biases.

  If there is no API key, wandb would ask the user for a key. In this case, or
  if the server cannot be reached, wandb writes the experiment to the run's
  folder, and `wandb sync` can send it later.
  """
  import wandb  # pyright: ignore[reportMissingImports]

  def init(mode: str) -> Experiment:
    return wandb.init(
      project=os.environ.get('WANDB_PROJECT', _PROJECT),
      name=identity.title,
      id=identity.run_id,
      # Every start of a run has the same id, and continues the experiment.
      resume='allow',
      config=scrubbing.scrubbed_plain(identity.config),
      dir=str(identity.folder),
      mode=mode,
      # wandb must neither capture the output of the run nor read its code.
      settings=wandb.Settings(
        console='off', silent=True, init_timeout=30, disable_git=True
      ),
    )

  mode = os.environ.get('WANDB_MODE', 'online' if _has_key() else 'offline')
  if mode != 'online':
    return init(mode)
  try:
    return init(mode)
  except Exception as error:
    reason, folder = str(error).partition('\n')[0], identity.folder / 'wandb'
    _log.warning(
      'wandb cannot be reached (%s); its records are written to %s instead',
      reason,
      folder,
    )
    # The background process of wandb holds the id of the run that was not
    # opened, so it is ended.
    wandb.teardown()
    return init('offline')


def _has_key() -> bool:
  """Returns whether the user has an API key for Weights & Biases."""
  if os.environ.get('WANDB_API_KEY'):
    return True
  host = urllib.parse.urlsplit(
    os.environ.get('WANDB_BASE_URL', _WANDB)
  ).hostname
  try:
    return netrc.netrc().authenticators(host or '') is not None
  except (OSError, netrc.NetrcParseError):
    return False


def _open_trackio(identity: Identity) -> Experiment:
  """Opens an experiment of trackio, which stores it on this machine."""
  import trackio  # pyright: ignore[reportMissingImports]

  return trackio.init(
    project=_PROJECT,
    name=f'{identity.title} {identity.run_id[:8]}',
    config=scrubbing.scrubbed_plain(identity.config),
    resume='allow',
  )


TRACKERS: Mapping[str, Callable[[Identity], Experiment]] = {
  'wandb': _open_wandb,
  'trackio': _open_trackio,
}
