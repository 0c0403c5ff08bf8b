"""A folder has the run of one config."""

import functools
import json
import math
import os
import pathlib

import pytest

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import base
from stppo_jax.configs import quickstart
from stppo_jax.configs import schema
from stppo_jax.workdir import named_files
from stppo_jax.workdir import recorded_config
from stppo_jax.workdir import run_folder
from stppo_jax.workdir import run_record

# The keys that the records of runs before the newest version have.
_RECORDED_KEYS = pathlib.Path(__file__).with_name('recorded_keys.txt')


def _config():
  return base.get_config('st_ppo').to_dict()


def _begin(workdir, config):
  run_record.record_config(config, workdir)
  (workdir / 'metrics.jsonl').touch()


def _files(workdir):
  return {p.name: p.read_bytes() for p in workdir.iterdir() if p.is_file()}


def _record(config, workdir):
  """Records a config; returns what is recorded."""
  run_record.record_config(config, workdir)
  return json.loads((workdir / 'config.json').read_text())


def _refused(config, workdir):
  """Returns the lines with which a config is refused; nothing is changed."""
  before = _files(workdir)
  lines = []
  for record in (run_record.check_config, run_record.record_config):
    with pytest.raises(run_record.OtherRun) as caught:
      record(config, workdir)
    assert caught.value.exit_code == 2
    lines.append(str(caught.value).splitlines())
  assert lines[0] == lines[1] and _files(workdir) == before
  return lines[0]


def test_the_record_is_the_config_sorted_and_whole(tmp_path):
  workdir = tmp_path / 'runs' / 'new'
  recorded = _record(_config(), workdir)
  assert list(recorded) == sorted(recorded)
  assert recorded['seed'] == 0
  assert recorded['data']['synthetic_wiki']['hops'] == [1, 2]
  assert recorded.keys() == _config().keys()
  assert {p.name for p in workdir.iterdir()} == {'config.json', 'run.json'}
  (workdir / 'metrics.jsonl').touch()
  assert _record(_config(), workdir) == recorded


def test_another_config_is_refused_with_a_line_a_key(tmp_path):
  _begin(tmp_path, _config())
  other = _config()
  other['seed'] = 3
  other['policy_optimizer']['learning_rate'] = 0.5
  other['sft']['num_steps'] = 7  # not the num_steps of the run
  del other['rollout']['temperature']
  other['algorithm']['extra'] = 'x'
  other['num_steps'] = 1000
  lines = _refused(other, tmp_path)
  for line, (key, ours, theirs) in zip(
    lines,
    (
      ('algorithm.extra', 'x', '(absent)'),
      ('policy_optimizer.learning_rate', '0.5', '1e-06'),
      ('rollout.temperature', '(absent)', '1.0'),
      ('seed', '3', '0'),
      ('sft.num_steps', '7', '2000'),
    ),
    strict=True,
  ):
    assert line.startswith(f'{key}={ours}: ') and f' {theirs}; ' in line
    assert line.endswith(f'--config.resume.allow_change={key}')


def test_a_guarded_key_changes_only_if_it_is_named(tmp_path, said):
  _begin(tmp_path, _config())
  (tmp_path / 'checkpoints' / '40').mkdir(parents=True)
  first = run_folder.read(tmp_path)
  other = _config()
  other['policy_optimizer'] |= {'learning_rate': 0.5, 'b1': 0.8}
  other['seed'] = 3
  other['resume']['allow_change'] = ['policy_optimizer']
  (line,) = _refused(other, tmp_path)
  assert line.startswith('seed=3: ')
  other['resume']['allow_change'] += ['seed']
  run_record.check_config(other, tmp_path)
  assert said == []
  assert _record(other, tmp_path)['seed'] == 3
  for line, change in zip(said, ('b1=0.8', 'rate=0.5', 'seed=3'), strict=True):
    assert change in line
  assert run_folder.read(tmp_path) == first  # its checkpoints are its own
  noted = (tmp_path / 'config_changes.jsonl').read_text().splitlines()
  assert json.loads(noted[2]) == {
    'after_step': 40,
    'key': 'seed',
    'from': 0,
    'to': 3,
  }
  said.clear()
  run_record.record_config(other, tmp_path)  # from now on
  assert said == []


def test_the_shape_of_a_run_never_changes(tmp_path):
  _begin(tmp_path, _config())
  other = _config()
  other['model']['num_layers'] = 7
  other['resume']['allow_change'] = ['model', 'model.num_layers']
  (line,) = _refused(other, tmp_path)
  assert line.startswith('model.num_layers=7: ') and 'allow' not in line


def test_a_run_has_one_id_and_the_digest_of_what_defines_it(tmp_path):
  _begin(tmp_path, _config())
  first = run_folder.read(tmp_path)
  longer = _config()
  longer['num_steps'] = 1000  # a run may go on for longer
  run_record.record_config(longer, tmp_path)
  assert run_folder.read(tmp_path) == first
  digests = {first.config_digest}
  for number, config in enumerate((longer, _config(), _older_config())):
    other = tmp_path / str(number)
    run_record.record_config(config, other)
    run = run_folder.read(other)
    assert run.command == 'train' and run.run_id != first.run_id
    digests.add(run.config_digest)
  assert len(digests) == 1
  changed = _config()
  changed['seed'] = 3
  run_record.record_config(changed, tmp_path / 'changed')
  assert run_folder.read(tmp_path / 'changed').config_digest not in digests


def _older_config():
  """Returns a config without the keys that recorded runs do not have."""
  recorded = set(_RECORDED_KEYS.read_text('utf-8').split())
  older, dropped = _config(), 0
  for key in settings.flatten(older):
    former = schema.KEYS[key].formerly if key in schema.KEYS else ''
    if key not in recorded and former not in recorded:
      *sections, name = key.split('.')
      section = functools.reduce(lambda x, part: x[part], sections, older)
      del section[name]
      dropped += 1
  assert dropped
  return older


def test_a_run_from_before_the_newest_keys_resumes(tmp_path):
  """A new key that is not free needs `since` and `before` in the schema."""
  _begin(tmp_path, _older_config())
  run_record.record_config(_config(), tmp_path)


def test_a_run_of_0_2_0_counted_outcomes_once_a_trajectory(tmp_path):
  older = base.get_config('gigpo').to_dict()
  del older['algorithm']['advantage']['outcome_counts']
  _begin(tmp_path, older)
  config = base.get_config('gigpo').to_dict()
  assert 'with per_trajectory;' in _refused(config, tmp_path)[0]
  config['algorithm']['advantage']['outcome_counts'] = 'per_trajectory'
  run_record.record_config(config, tmp_path)


def test_a_key_that_has_another_name_now_is_the_same(tmp_path):
  older = _config()
  rollout = older['rollout']
  rollout['extend_chunk'] = rollout.pop('prefill_chunk')
  older['evaluate']['batch_size'] = 8  # keys that are gone
  older['updates']['core_lengths'] = 4
  _begin(tmp_path, older)
  assert _record(_config(), tmp_path)['rollout']['prefill_chunk'] == 64
  rollout['extend_chunk'] = 7
  _begin(tmp_path / 'other', older)
  (line,) = _refused(_config(), tmp_path / 'other')
  assert line.startswith('rollout.prefill_chunk=64: ') and ' with 7;' in line


def test_keys_that_may_differ_are_rewritten(tmp_path):
  _begin(tmp_path, _config())
  other = _config()
  other['checkpoint']['keep'], other['mesh']['fsdp'] = 9, 2
  other['retrieval']['url'] = 'http://127.0.0.1:9'
  recorded = _record(other, tmp_path)
  assert all(recorded[x] == other[x] for x in ('checkpoint', 'retrieval'))
  assert recorded['mesh']['fsdp'] == 2


@pytest.mark.parametrize(
  'product',
  [
    'start/policy',
    'start/metrics.jsonl',
    'start/model.safetensors',  # up to version 0.2
    'metrics.jsonl',
    'checkpoints/4',
  ],
)
def test_a_run_that_never_began_may_be_corrected(tmp_path, product):
  run_record.record_config(_config(), tmp_path)
  (tmp_path / 'checkpoints').mkdir()  # made empty at every start
  run_record.record_config(_config(), tmp_path / 'start')  # made, no step done
  other = _config()
  other['seed'] = 1
  run_record.record_config(other, tmp_path)
  (tmp_path / product).mkdir(parents=True)
  (line,) = _refused(_config(), tmp_path)
  assert line.startswith('seed=0: ')


def test_a_record_that_is_none_is_refused(tmp_path):
  _begin(tmp_path, _config())
  (tmp_path / 'config.json').write_text('{"seed": 0')
  (line,) = _refused(_config(), tmp_path)
  assert 'config.json: not the record' in line


# `training/interruption_run_test.py` interrupts runs that make their start.
@pytest.mark.parametrize('start', [run_record.START, 'start'])  # now, in 0.2
def test_a_start_counts_once_it_is_complete(tmp_path, start):
  config = base.get_config('st_ppo')
  assert run_record.with_start(config, tmp_path) is config  # none is wanted
  config.sft.before_training = True
  # As left by a run that was killed: now, and in version 0.2.
  for partial in ('start/.policy.partial', 'start.partial'):
    _write_model(tmp_path / partial)
  (tmp_path / 'start' / 'config.json').touch()  # of the run that makes it
  with pytest.raises(exits.Misconfigured, match='has not beg') as caught:
    run_record.with_start(config, tmp_path)
  assert caught.value.exit_code == 2
  _write_model(tmp_path / start)
  started = run_record.with_start(config.lock(), tmp_path)
  assert started.model.path == str(tmp_path / start)
  assert config.model.path == ''  # what is recorded


def _write_model(folder):
  """Writes the files by which a directory is known as that of a model."""
  folder.mkdir(parents=True, exist_ok=True)
  for name in ('config.json', 'model.safetensors'):
    (folder / name).touch()


def test_an_infinite_number_is_recorded_and_compared(tmp_path):
  config = _config() | {'tau': math.inf}
  run_record.record_config(config, tmp_path)
  (tmp_path / 'metrics.jsonl').touch()
  run_record.record_config(config, tmp_path)
  (line,) = _refused(config | {'tau': 3.0}, tmp_path)
  assert line.startswith('tau=3.0: ') and 'inf' in line


def test_any_file_that_a_config_names_is_guarded_with_its_key(tmp_path):
  workdir, root = tmp_path / 'run', tmp_path / 'data'
  names = ('a.jsonl', 'b.jsonl', 'test.jsonl', 'corpus.jsonl')
  model = root / 'model'
  model.mkdir(parents=True)
  files = [root / name for name in names] + [model / 'model.safetensors']
  for file in files:
    file.write_text('before')
  config = _config()
  config['data'] |= {
    'name': 'jsonl',
    'root': str(root),
    'train': 'a.jsonl weight=1, b.jsonl weight=2',
    'evaluation': 'test.jsonl',
    'corpus': 'corpus.jsonl',
  }
  config['model']['path'] = str(model)
  _begin(workdir, config)
  keys = ('train', 'train', 'evaluation', 'corpus')
  keys = [f'data.{key}' for key in keys] + ['model.path']
  for file, key in zip(files, keys, strict=True):
    file.write_text('after')
    (line,) = _refused(config, workdir)
    named = model if key == 'model.path' else file
    assert line.startswith(f'{key}={named}: changed since the run in {workdir}')
    file.write_text('before')
  (model / '.hidden').touch()  # such as what a file browser leaves
  files[0].unlink()  # whoever reads it says that it is missing
  run_record.record_config(config, workdir)


def test_large_weights_are_compared_in_pieces(tmp_path):
  weights = tmp_path / 'model.safetensors'
  size = 300 << 20  # without blocks on the disk

  def checksum(place, byte=b'x'):
    with open(weights, 'wb') as file:
      file.truncate(size)
      file.seek(place)
      file.write(byte)
    assert named_files.checksum(weights)
    return named_files.checksum(tmp_path)

  inside = [checksum(x) for x in (0, size // 2 + 5, size - size // 64)]
  untouched = checksum(0, b'\0')
  assert len({*inside, untouched}) == 4
  # A piece of 1 MiB begins at every 64th part of the file.
  assert checksum(2 << 20) == untouched
  os.truncate(weights, size + 1)
  assert named_files.checksum(tmp_path) not in {*inside, untouched}


def test_the_same_files_at_another_place_are_the_same_run(tmp_path, said):
  workdir, here, there = (tmp_path / name for name in ('run', 'a', 'b'))
  for place in (here, there):
    place.mkdir()
    (place / 'config.json').write_text('{}')
  config = _config()
  config['model']['path'] = str(here)
  _begin(workdir, config)
  config['model']['path'] = str(there)
  run_record.record_config(config, workdir)
  assert f'model.path={there}' in said[0] and str(here) in said[0]
  (here / 'config.json').write_text('{"other": 1}')
  config['model']['path'] = str(here)
  assert 'model.path' in _refused(config, workdir)[0]


def test_packaged_files_are_recorded_by_name(tmp_path, said):
  config = quickstart.get_config()
  _begin(tmp_path, config.to_dict())
  recorded = json.loads((tmp_path / 'config.json').read_text())
  assert recorded['model']['path'] == 'asset:quickstart'
  template = recorded['env']['prompt_template']
  assert template == 'asset:prompts/quickstart.txt'
  files = json.loads((tmp_path / 'files.json').read_text())
  assert set(files) == {
    'model.path=asset:quickstart',
    f'env.prompt_template={template}',
  }
  run_record.record_config(config.to_dict(), tmp_path)
  assert said == []
  assert recorded_config.read(tmp_path).to_dict() == config.to_dict()
