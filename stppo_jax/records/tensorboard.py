"""A TensorBoard event file, written in the calling thread.

The `SummaryWriter` of tensorboardX writes events in another thread. If the disk
is full, that thread ends, its queue fills up, and then `add_scalar` never
returns. `EventFile` instead raises the error in the call that writes. The file
consists of TFRecord frames, each with an `Event` message.
"""

from collections.abc import Mapping, Sequence
import os
import pathlib
import struct
import time
from typing import Any

from tensorboardX import record_writer
from tensorboardX import summary
from tensorboardX.proto import event_pb2 as _event_pb2
from tensorboardX.proto import summary_pb2 as _summary_pb2

from stppo_jax.records import scrubbing
from stppo_jax.workdir import atomic_files

# The classes of these modules are made at run time, so type checkers do not
# find them.
event_pb2: Any = _event_pb2
summary_pb2: Any = _summary_pb2

# The metrics that TensorBoard shows beside the hyperparameters.
_HPARAM_METRICS = ('critic/score/mean', 'actor/ppo_kl')


class EventFile:
  """An event file of a run; every start of the run makes a new file."""

  def __init__(self, folder: pathlib.Path, *, purge_step: int | None):
    """Makes the folder and opens the file.

    Args:
      folder: the folder to name in `tensorboard --logdir`.
      purge_step: TensorBoard ignores the events of this step and of later
        steps in earlier files of the folder; None: TensorBoard reads all
        events.

    Raises:
      OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads the files in the order of their names.
    name = f'events.out.tfevents.{int(time.time()):010d}.{os.getpid()}'
    self._path = folder / name
    events = [event_pb2.Event(file_version='brain.Event:2')]
    if purge_step is not None:
      started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      events.append(event_pb2.Event(step=purge_step, session_log=started))
    self._append(events)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Appends the hyperparameters of the run, which TensorBoard compares.

    Users pass event files on, so secrets in texts are removed.

    Raises:
      OSError: nothing was written.
    """
    if not hparams:
      return
    # TensorBoard's plugin accepts numbers, texts and booleans only.
    values = scrubbing.scrubbed_plain(hparams)
    parts = summary.hparams(values, dict.fromkeys(_HPARAM_METRICS, 0.0))
    self._append([event_pb2.Event(summary=part) for part in parts])

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Appends the scalars of a step.

    Raises:
      OSError: nothing was written.
    """
    values = [
      summary_pb2.Summary.Value(tag=name, simple_value=value)
      for name, value in metrics.items()
    ]
    scalars = summary_pb2.Summary(value=values)
    self._append([event_pb2.Event(step=step, summary=scalars)])

  def _append(self, events: Sequence[Any]) -> None:
    for event in events:
      event.wall_time = time.time()
    atomic_files.append(self._path, b''.join(map(_frame, events)))


def _frame(event) -> bytes:
  """Returns a TFRecord frame: length, checksum, message, checksum."""
  data = event.SerializeToString()
  length = struct.pack('<Q', len(data))
  return b''.join(
    part + struct.pack('<I', record_writer.masked_crc32c(part))
    for part in (length, data)
  )
