"""Commands whose rendered texts are kept, and the script that writes them.

python -m tests.launch.rendered
"""

import pathlib
import re

from launch import submit

GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
_RUN = ['--config=quickstart:st_ppo', '--workdir=/shared/runs/ST ppo']
_CLOUD = ['--project=the-lab', '--zone=us-west4-a']
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
    '--root=/srv/lab',
    '--python=/srv/stppo_jax/.venv/bin/python',
    '--secrets=/srv/lab/secrets',
  ],
  'startup.sh': [
    'tpu',
    _RUN[0],
    '--workdir=gs://lab/runs/st_ppo',
    *_CLOUD,
    '--accelerator=v5litepod-16',
    '--secrets=tokens',
    '--config.title=what happens?',
  ],
  'jobset.yaml': [
    'jobset',
    *_RUN,
    '--image=registry/stppo_jax:tpu',
    '--accelerator=tpu-v5-lite-podslice',
    '--topology=4x4',
    '--retriever=--index=/shared/index --workers=2',
    '--config.num_steps=10',
  ],
  'retriever.yaml': [
    'retriever',
    '--image=registry/stppo_jax:cpu',
    '--index=/shared/index',
  ],
}


def without_hash(text: str) -> str:
  """Returns a text without what changes with every change of the source."""
  text = re.sub('source-[0-9a-f]{16}', 'source-HASH', text)
  text = re.sub('echo [0-9a-f]{16} ', 'echo JOB ', text)
  return re.sub('[0-9]+ bytes', 'N bytes', text)


def main() -> None:
  """Writes the texts anew."""
  import contextlib
  import io

  for name, command in COMMANDS.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
      assert submit.main([*command, '--dry_run']) == 0
    (GOLDEN / name).write_text(without_hash(out.getvalue()), 'utf-8')


if __name__ == '__main__':
  main()
