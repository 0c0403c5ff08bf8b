"""Says where the files of a finished run are, and draws its curve."""

import pathlib


def finished(
  workdir: pathlib.Path, unit: str, title: str, best: int | None
) -> str:
  """Draws the curve of a finished run; returns the lines that name its files.

  Args:
    workdir: the run's folder.
    unit: the name of what the run counts.
    title: the title of the curve; '' = none is drawn.
    best: the number of the checkpoint with the best evaluation; None if it is
      the last one, or if there is none.
  """
  metrics = workdir / 'metrics.jsonl'
  lines = [f'done. metrics: {metrics}']
  if title:
    # Late, because it loads the library that draws.
    from stppo_jax.records import plots

    curve = workdir / 'learning_curve.png'
    plots.learning_curve(metrics, curve, title=title)
    lines += [
      f'curve: {curve}',
      f'dialogues: {workdir}/trajectories-*.jsonl',
    ]
  if best is not None:
    path = workdir / 'checkpoints' / str(best)
    lines.append(f'best evaluation: after {unit} {best}, kept in {path}')
  lines.append(f'policy (Hugging Face format): {workdir / "policy"}')
  return '\n'.join(lines)
