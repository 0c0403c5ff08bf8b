"""Says where the files of a finished run are, and draws its curve."""

import pathlib

from stppo_jax.records import plots

_CURVE = 'learning_curve.png'


def draw_curve(workdir: pathlib.Path, title: str) -> None:
  """Draws the metrics of a run as curves."""
  plots.learning_curve(workdir / 'metrics.jsonl', workdir / _CURVE, title=title)


def describe(
  workdir: pathlib.Path, unit: str, has_curve: bool, best: int | None
) -> str:
  """Returns the lines that name the files of a finished run.

  Args:
    workdir: the run's folder.
    unit: the name of what the run counts.
    has_curve: whether the curve was drawn, and dialogues were written.
    best: the number of the checkpoint with the best evaluation; None if it is
      the last one, or if there is none.
  """
  lines = [f'done. metrics: {workdir / "metrics.jsonl"}']
  if has_curve:
    lines += [
      f'curve: {workdir / _CURVE}',
      f'dialogues: {workdir}/trajectories-*.jsonl',
    ]
  if best is not None:
    path = workdir / 'checkpoints' / str(best)
    lines += [f'best evaluation: after {unit} {best}, kept in {path}']
  lines.append(f'policy (Hugging Face format): {workdir / "policy"}')
  return '\n'.join(lines)
