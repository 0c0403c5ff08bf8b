"""Makes tests/golden/run_of_0_2.tar.gz: a run that version 0.2.0 has begun.

    git clone . /tmp/clone && git -C /tmp/clone checkout fca8d43
    python tests/golden/make_run_of_0_2.py /tmp/clone

It has two steps after a supervised start. The file expected.json in the archive
is the line of the third step, as version 0.2.0 made it.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).parent
ARCHIVE = HERE / 'run_of_0_2.tar.gz'
STEPS = 2
# The names of files that no later start reads.
_LEFT_OUT = ('learning_curve.png', 'tensorboard', 'policy')
FLAGS = (
  '--config=configs/quickstart.py:st_ppo',
  '--config.model.path=',
  '--config.model.hidden_size=16',
  '--config.model.intermediate_size=24',
  '--config.model.num_layers=1',
  '--config.model.num_heads=2',
  '--config.model.num_kv_heads=1',
  '--config.model.head_dim=8',
  '--config.model.scan_unroll=1',
  '--config.data.synthetic_wiki.entities_per_type=8',
  '--config.env.max_turns=2',
  '--config.env.max_turn_tokens=8',
  '--config.env.max_observation_tokens=32',
  '--config.env.max_length=128',
  '--config.env.prompt_template=configs/prompts/quickstart.txt',
  '--config.rollout.trajectories_per_step=16',
  '--config.rollout.length_bucket=128',
  '--config.updates.minibatch_size=8',
  '--config.updates.core_rows=0',
  '--config.updates.head_chunk=8192',
  '--config.updates.num_epochs=1',
  '--config.sft.before_training=True',
  '--config.sft.num_steps=4',
  '--config.sft.batch_size=8',
  '--config.evaluate.every=2',
  '--config.evaluate.num_questions=8',
  '--config.checkpoint.every=1',
)


def _train(clone: pathlib.Path, workdir: pathlib.Path, steps: int) -> None:
  command = [sys.executable, '-m', 'stppo_jax', 'train', *FLAGS]
  command += [f'--config.num_steps={steps}', f'--workdir={workdir}']
  environment = {**os.environ, 'PYTHONPATH': str(clone)}
  environment |= {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'}
  subprocess.run(command, cwd=clone, env=environment, check=True)


def main() -> None:
  clone = pathlib.Path(sys.argv[1]).resolve()
  with tempfile.TemporaryDirectory() as folder:
    whole, part = pathlib.Path(folder, 'whole'), pathlib.Path(folder, 'run')
    _train(clone, whole, STEPS)
    shutil.copytree(whole, part, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    shutil.rmtree(part / 'checkpoints' / '1')
    _train(clone, whole, STEPS + 1)
    lines = (whole / 'metrics.jsonl').read_text().splitlines()
    (part / 'expected.json').write_text(json.dumps(json.loads(lines[-1])))
    with tarfile.open(ARCHIVE, 'w:gz') as archive:
      archive.add(part, arcname='run')


if __name__ == '__main__':
  main()
