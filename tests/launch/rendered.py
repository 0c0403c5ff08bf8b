"""Commands whose rendered texts are kept, and the script that writes them.

python -m tests.launch.rendered
"""

import pathlib

from launch import submit

GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
_RUN = ['--config=quickstart:st_ppo', '--workdir=/shared/runs/ST ppo']
_CLOUD = ['--project=lab', '--zone=us-west4-a']
COMMANDS = {
  'local.sh': [
    'local',
    *_RUN,
    '--python=/srv/stppo_jax/.venv/bin/python',
    '--root=/srv/stppo_jax',
    '--retriever=--synthetic_seed=0',
  ],
  'slurm.sh': [
    'slurm',
    *_RUN,
    '--partition=gpu',
    '--nodes=2',
    '--root=/srv/stppo_jax',
    '--secrets=/srv/lab/secrets',
  ],
  'tpu.sh': [
    'tpu',
    *_RUN,
    *_CLOUD,
    '--accelerator=v5litepod-16',
    '--runtime=v2-alpha-tpuv5-lite',
    '--nfs=10.0.0.2:/share',
    '--repository=https://example.com/stppo_jax.git',
    '--config.title=what happens?',
  ],
  'jobset.yaml': [
    'jobset',
    *_RUN,
    '--image=registry/stppo_jax:tpu',
    '--accelerator=tpu-v5-lite-podslice',
    '--topology=4x4',
    '--workers=4',
    '--retriever=--index=/shared/index --workers=2',
    '--config.num_steps=10',
  ],
  'xpk.sh': [
    'xpk',
    *_RUN,
    *_CLOUD,
    '--cluster=pods',
    '--tpu_type=v5litepod-16',
    '--image=registry/stppo_jax:tpu',
  ],
  'sky.yaml': ['sky', *_RUN, '--accelerators=H100:8', '--volume=disk']
  + ['--root=/srv/stppo_jax'],
  'retriever.yaml': [
    'retriever',
    '--image=registry/stppo_jax:cpu',
    '--index=/shared/index',
  ],
}


def main() -> None:
  """Writes the texts anew."""
  import contextlib
  import io

  for name, command in COMMANDS.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
      assert submit.main([*command, '--dry_run']) == 0
    (GOLDEN / name).write_text(out.getvalue(), 'utf-8')


if __name__ == '__main__':
  main()
