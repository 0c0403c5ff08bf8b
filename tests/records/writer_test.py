"""The files of a run, also when the disk is full."""

import io
import json
import math
import resource
import shutil

import pytest
import rich.console
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2
from tensorboardX.proto import plugin_hparams_pb2

from stppo_jax.records import progress
from stppo_jax.records import writer as writer_lib


def _writer(workdir, *, trajectories=2, **options):
  console = rich.console.Console(file=io.StringIO())
  display = progress.Progress(10, console=console)
  return writer_lib.Writer(
    workdir, trajectories=trajectories, display=display, **options
  )


def _lines(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def _events(workdir):
  """Returns every event of the folder, read by the format's definition."""
  events = []
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')
      body = data[12 : 12 + size]
      crc = int.from_bytes(data[12 + size : 16 + size], 'little')
      assert crc == record_writer.masked_crc32c(body)
      events.append(event_pb2.Event.FromString(body))
      data = data[16 + size :]
  return events


def test_a_line_a_step_at_once_on_disk(tmp_path):
  writer = _writer(tmp_path)
  writer.write(1, {'a': 1, 'b/c': 0.5})
  assert _lines(tmp_path) == [
    {'step': 1, 'a': 1.0, 'b/c': 0.5, 'writer/sink_errors': 0}
  ]
  writer.write(2, {'a': 2.0})
  assert [line['step'] for line in _lines(tmp_path)] == [1, 2]
  assert not (tmp_path / 'tensorboard').exists()


def test_what_is_not_finite_is_null_and_named(tmp_path):
  writer = _writer(tmp_path, tensorboard=True)
  writer.write(1, {'x': math.nan, 'y': -math.inf, 'z': 3.0})
  text = (tmp_path / 'metrics.jsonl').read_text()
  (line,) = [json.loads(text, parse_constant=pytest.fail)]
  assert line['x'] is line['y'] is None and line['z'] == 3.0
  assert line['writer/non_finite'] == {'x': 'nan', 'y': '-inf'}
  (event,) = [e for e in _events(tmp_path) if e.summary.value]
  assert [(v.tag, v.simple_value) for v in event.summary.value] == [('z', 3.0)]


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one(tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  for workdir, last in ((whole, 4), (broken, 3)):
    writer = _writer(workdir)
    for step in range(1, last + 1):
      writer.write(step, {'a': step})
      writer.write_trajectories(step, [{'step': step}])
      writer.write_evaluation(step, [{'evaluated': step}])
  with open(broken / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 4, "a": 4.0, "writ')  # killed while writing
  writer = _writer(broken)
  before = (broken / 'metrics.jsonl').read_bytes()
  aside = writer.rewind(2, saved=2)
  # Nobody knows whether the same lines will be written again.
  assert aside == broken / 'aside-1'
  assert (aside / 'metrics.jsonl').read_bytes() == before
  for third in ('trajectories-000003.jsonl', 'evaluation-000003.jsonl'):
    assert (aside / third).read_bytes() == (whole / third).read_bytes()
  assert len(list(aside.iterdir())) == 3
  shutil.rmtree(aside)
  assert [line['step'] for line in _lines(broken)] == [1, 2]
  dialogues = sorted(path.name for path in broken.glob('trajectories-*'))
  assert [name[-7] for name in dialogues] == ['1', '2']
  for step in (3, 4):
    writer.write(step, {'a': step})
    writer.write_trajectories(step, [{'step': step}])
    writer.write_evaluation(step, [{'evaluated': step}])
  files = {path.name: path.read_bytes() for path in whole.iterdir()}
  assert files == {p.name: p.read_bytes() for p in broken.iterdir()}
  assert len(files) == 9


def test_a_line_without_a_line_break_is_dropped(tmp_path):
  # Read as JSON it looks whole; the next line would be glued to it.
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2}')
  writer = _writer(tmp_path)
  writer.rewind(2, saved=2)
  writer.write(2, {})
  assert [line['step'] for line in _lines(tmp_path)] == [1, 2]


def test_trajectories_of_a_step_replace_each_other(tmp_path):
  writer = _writer(tmp_path, trajectories=2)
  writer.write_trajectories(12, [{'n': 0}])
  writer.write_trajectories(12, [{'n': 1}, {'n': 'ü'}, {'n': 3}])
  (path,) = tmp_path.iterdir()
  assert path.name == 'trajectories-000012.jsonl'
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert records == [{'n': 1}, {'n': 'ü'}]
  _writer(tmp_path, trajectories=0).write_trajectories(13, [{'n': 0}])
  assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_other_hosts_write_dialogues_of_their_own(tmp_path):
  other = writer_lib.Writer(tmp_path, host=3, trajectories=1)
  other.write_trajectories(12, [{'n': 0}, {'n': 1}])
  other.write_evaluation(12, [{'n': 2}, {'n': 3}])
  lines = {path.name: path.read_text() for path in tmp_path.iterdir()}
  assert lines == {
    'trajectories-000012-host3.jsonl': '{"n": 0}\n',
    'evaluation-000012-host3.jsonl': '{"n": 2}\n{"n": 3}\n',
  }
  # The first host drops them when it resumes from an earlier step.
  _writer(tmp_path).rewind(11, saved=12)
  assert len(list(tmp_path.iterdir())) == 2
  aside = _writer(tmp_path).rewind(11, saved=11)
  assert aside is not None and len(list(aside.iterdir())) == 2


def test_only_the_newest_lines_are_kept(tmp_path):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  held = []
  for step in range(11):
    _writer(whole, keep_lines=3).write(step, {'a': step})
    held.append([line['step'] for line in _lines(whole)])
  assert held[2] == [0, 1, 2] and held[5] == [1, 2, 3, 4, 5]
  assert held[6] == [4, 5, 6]
  assert held[10] == [7, 8, 9, 10]
  assert all(len(steps) <= 6 for steps in held)
  # A run that goes on after a kill has the same lines in the end, also where
  # the kill came before the first lines were dropped.
  for step in range(8):
    _writer(broken).write(step, {'a': step})
  writer = _writer(broken, keep_lines=3)
  writer.rewind(7, saved=7)
  assert [line['step'] for line in _lines(broken)] == held[7]
  for saved in (7, 5):
    writer.rewind(saved, saved=saved)
    for step in range(saved + 1, 11):
      writer.write(step, {'a': step})
  assert _lines(broken) == _lines(whole)


def test_only_the_newest_dialogues_are_kept(tmp_path):
  first = _writer(tmp_path, keep_files=2)
  other = writer_lib.Writer(tmp_path, host=3, trajectories=1, keep_files=1)
  for writer in (first, other):
    for step in range(99, 103):
      writer.write_trajectories(step, [{'n': step}])
    for step in (0, 50, 100):
      writer.write_evaluation(step, [{'n': step}])
    writer.write_evaluation(150, [])  # nothing is written
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'evaluation-000050.jsonl',
    'evaluation-000100-host3.jsonl',
    'evaluation-000100.jsonl',
    'trajectories-000101.jsonl',
    'trajectories-000102-host3.jsonl',
    'trajectories-000102.jsonl',
  ]


def test_tensorboard_has_the_scalars_and_drops_some_on_resume(tmp_path):
  writer = _writer(tmp_path, tensorboard=True)
  writer.rewind(4, saved=4)
  writer.write(5, {'a': 0.5, 'b': 2.0})
  writer.write(6, {'a': 0.25})
  first, restart, *events = _events(tmp_path)
  assert first.file_version == 'brain.Event:2'
  assert restart.session_log.status == event_pb2.SessionLog.START
  assert restart.step == 5
  scalars = [
    (event.step, value.tag, value.simple_value)
    for event in events
    for value in event.summary.value
  ]
  assert scalars == [(5, 'a', 0.5), (5, 'b', 2.0), (6, 'a', 0.25)]


def test_a_full_disk_leaves_whole_lines_and_the_run_goes_on(tmp_path):
  writer = _writer(tmp_path, tensorboard=True)
  writer.write(1, {'a': 1.0})
  size = (tmp_path / 'metrics.jsonl').stat().st_size
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
  try:
    writer.write(2, {'a': 2.0})
    writer.write_trajectories(2, [{'text': 'x' * 1000}])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  writer.write(3, {'a': 3.0})
  assert [line['step'] for line in _lines(tmp_path)] == [1, 3]
  assert _lines(tmp_path)[-1]['writer/sink_errors'] >= 2
  assert (tmp_path / 'trajectories-000002.jsonl').read_bytes() == b''
  assert _events(tmp_path)[-1].step == 3


def test_tensorboard_has_the_hyperparameters_without_secrets(tmp_path):
  hparams = {'seed': 3, 'lr': 1e-6, 'level': 'turn', 'lora': False}
  shown = {'hops': '(1, 2)', 'url': 'http://***@host/'}
  shown['servers'] = "('run --token ***', 'run -x')"
  hidden = {'hops': (1, 2), 'url': 'http://me:hush@host/'}
  hidden['servers'] = ('run --token hush', 'run -x')
  writer = _writer(tmp_path, tensorboard=True, hparams=hparams | hidden)
  writer.write(1, {'a': 0.5})
  writer.write(2, {'a': 0.5})
  found = {}
  for event in _events(tmp_path):
    for value in event.summary.value:
      content = value.metadata.plugin_data.content
      if value.metadata.plugin_data.plugin_name == 'hparams':
        data = plugin_hparams_pb2.HParamsPluginData.FromString(content)
        for name, one in data.session_start_info.hparams.items():
          found[name] = getattr(one, one.WhichOneof('kind'))
  assert found == hparams | shown
  (path,) = (tmp_path / 'tensorboard').iterdir()
  assert b'hush' not in path.read_bytes()
