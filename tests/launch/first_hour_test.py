"""The checks of a slice run on the virtual devices of this machine."""

import contextlib
import json

import jax
import pytest

from launch import first_hour
from stppo_jax.parallel import distributed
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import topology

_CONFIG = '--config=configs/quickstart.py:st_ppo'


def _report(tmp_path, *flags):
  report = tmp_path / 'report.json'
  code = first_hour.main(
    [_CONFIG, f'--workdir={tmp_path}', f'--report={report}', *flags]
  )
  return code, {x['check']: x for x in json.loads(report.read_text('utf-8'))}


def test_every_check_reports_what_it_measured(tmp_path, capsys):
  mesh = ['--config.mesh.data=-1', '--config.mesh.fsdp=4']
  code, lines = _report(tmp_path, '--megabytes=1', *mesh)
  assert code == 0
  devices = lines.pop('devices of kind cpu')
  assert devices['found'] == devices['expected'] == jax.device_count()
  assert lines.pop('own programs of host 0')['found'] == 'compile'
  for name in (
    *('product', 'copy', 'attention', 'all-gather along fsdp'),
    *('reduce-scatter along fsdp', 'workdir, written by host 0'),
    *('workdir, read by host 0', 'workdir, a small file of host 0'),
  ):
    assert lines[name]['found'] > 0, name
  assert 'all-gather along tensor' not in lines  # one device
  assert 'attention' in capsys.readouterr().out
  # Nothing stays in the workdir, where `train` would refuse to begin.
  assert [path.name for path in tmp_path.iterdir()] == ['report.json']


def test_rates_are_compared_with_the_limits_of_the_device(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(first_hour, 'CHECKS', [first_hour.kernel_of_training])
  monkeypatch.setattr(topology, 'limits_of', lambda _: topology.TPUS['v5e'])
  code, lines = _report(tmp_path)
  assert code == 0 and lines['attention']['expected'] == 197.0


def test_a_failed_check_is_a_line_and_the_others_go_on(tmp_path, monkeypatch):
  checks = [first_hour.storage, first_hour.devices]
  monkeypatch.setattr(first_hour, 'CHECKS', checks)
  (tmp_path / 'first_hour').write_text('no folder')
  code, lines = _report(tmp_path)
  assert code == 70
  assert 'FileExistsError' in lines['storage, host 0']['found']
  assert 'hosts' in lines


class _TwoHosts(hosts_lib.Hosts):
  """The first of two hosts, the second of which could not measure rates."""

  def exchange(self, what, value, *, timeout=None):
    theirs = [['rates, host {host}', 'OSError: no memory', 'no error', '']]
    return [value, theirs if what == 'rates' else value]


def test_the_errors_of_other_hosts_are_told(tmp_path, monkeypatch):
  def rates(subject):
    yield first_hour.Line('product', 1.0)

  hosts = _TwoHosts(0, ['a', 'b'])
  joined = lambda place: contextlib.nullcontext(hosts)
  monkeypatch.setattr(distributed, 'joined', joined)
  monkeypatch.setattr(first_hour, 'CHECKS', [first_hour.devices, rates])
  code, lines = _report(tmp_path)
  assert code == 70
  assert 'no memory' in lines['rates, host 1']['found']
  assert 'hosts, host 1' not in lines


@pytest.mark.parametrize(
  ('flags', 'named'),
  [
    ([_CONFIG], '--workdir'),
    ([_CONFIG, '--workdir=x', '--megabytes=0'], '--megabytes=0'),
    ([_CONFIG, '--workdir=x', '--config.mesh.fsdp=x'], 'mesh.fsdp'),
    ([_CONFIG, '--workdir=x', '--process_id=1'], '--coordinator'),
    # A mesh of another slice.
    ([_CONFIG, '--workdir=x', '--config.mesh.data=3'], 'mesh.data=3'),
  ],
)
def test_wrong_flags_are_refused(flags, named, refused):
  assert named in refused(*flags, main=first_hour.main)


def test_a_report_in_a_folder_that_cannot_be_made_is_one_line(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(first_hour, 'measured', lambda subject: ([], True))
  (tmp_path / 'file').touch()
  report = tmp_path / 'file' / 'report.json'
  words = [_CONFIG, f'--workdir={tmp_path}', f'--report={report}']
  assert first_hour.main(words) == 2
  out, err = capsys.readouterr()
  assert out.startswith('check')  # what was measured is shown
  assert err.startswith(f'--report={report}: ') and err.count('\n') == 1
