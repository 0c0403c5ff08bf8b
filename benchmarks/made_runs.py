"""Makes folders like those of finished runs of `train`, from a seed."""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

import numpy as np

from stppo_jax.configs import quickstart

_WORDS = (
  'river bridge north council built opened the of in a capital president lake '
  'school founded station line museum was is under between province district'
).split()
_PHASES = ('wait', 'annotate', 'update', 'token_details', 'checkpoint')


def make(
  folder: pathlib.Path,
  *,
  seed: int = 0,
  steps: int = 6,
  dialogues: int = 4,
  tokens: int = 8,
  detailed: int = 2,
  questions: int = 3,
  evaluated: int = 0,
  collapses: bool = False,
  algorithm: str = 'st_ppo',
  config: Mapping[str, Any] | None = None,
) -> pathlib.Path:
  """Writes a finished run.

  Args:
    folder: the folder, which must not exist.
    seed: the seed of the run and of its numbers.
    steps: the number of steps.
    dialogues: the number of dialogues of a step.
    tokens: the number of policy tokens of a turn.
    detailed: the number of dialogues of a step that are recorded with numbers
      for each token, such as ratios and advantages.
    questions: the number of different training questions.
    evaluated: the number of dialogues of an evaluation. Each is about another
      question. All evaluations have the same questions.
    collapses: whether the reward falls to 0 in the second half.
    algorithm: an entry of the table of algorithms.
    config: values of config keys that differ from the quickstart's, by dotted
      name.

  Returns:
    The folder.
  """
  rng = np.random.default_rng(seed)
  folder.mkdir(parents=True)
  values = quickstart.get_config(algorithm)
  changes = {'num_steps': steps, 'seed': seed, **(config or {})}
  values.update_from_flattened_dict(changes)
  _write(folder / 'config.json', values.to_dict())
  _write(
    folder / 'run.json',
    {'command': 'train', 'run_id': 'x', 'config_digest': 'x'},
  )
  lines = [{'step': 0, **_evaluation(rng, 0.2)}]
  for step in range(1, steps + 1):
    level = 0.2 + 0.7 * step / steps
    if collapses and step > steps / 2:
      level = 0.0
    lines.append(_metrics(rng, step, level, steps))
    if step % 2 == 0:
      lines[-1] |= _evaluation(rng, level)
    if dialogues:
      records = [
        dialogue(
          rng,
          question=int(rng.integers(questions)),
          level=level,
          tokens=tokens,
          detailed=number < detailed,
        )
        for number in range(dialogues)
      ]
      _write_lines(folder / f'trajectories-{step:06d}.jsonl', records)
    if evaluated and step % 2 == 0:
      records = [
        dialogue(rng, question=questions + number, level=level, detailed=False)
        for number in range(evaluated)
      ]
      _write_lines(folder / f'evaluation-{step:06d}.jsonl', records)
  _write_lines(folder / 'metrics.jsonl', lines)
  return folder


def dialogue(
  rng: np.random.Generator,
  *,
  question: int = 0,
  level: float = 0.5,
  tokens: int = 8,
  detailed: bool = True,
) -> dict[str, Any]:
  """Returns the values of a line of `trajectories-*.jsonl`: a dialogue."""
  searches = int(rng.integers(0, 3))
  turns = [_turn(rng, 'search', tokens, detailed) for _ in range(searches)]
  turns.append(_turn(rng, 'answer', tokens, detailed))
  reward = float(rng.random() < level)
  return {
    'id': f'q{question}',
    'question': f'Who built bridge number {question}?',
    'golden_answers': [f'the council of {question}'],
    'data_set': 'made',
    'prompt': f'Question: Who built bridge number {question}?\n',
    'turns': turns,
    'rewards': {'exact_match': reward, 'format': -0.0},
    'scores': {'em': reward, 'f1': reward},
    'status': 'completed' if rng.random() < 0.8 else 'truncated_turns',
  }


def _turn(rng, action, tokens, detailed):
  words = [f' {word}' for word in rng.choice(_WORDS, tokens)]
  turn = {
    'text': ''.join(words),
    'observation': '',
    'action': action,
    'reward': 0.0,
  }
  if action == 'search':
    turn['observation'] = ' '.join(rng.choice(_WORDS, 4 * tokens))
  if detailed:
    advantage = rng.normal()
    turn['tokens'] = {
      'characters': [len(word) for word in words],
      'old_logprob': _digits(-rng.exponential(0.5, tokens)),
      'ratio': _digits(np.exp(rng.normal(0, 0.2, tokens))),
      'entropy': _digits(rng.exponential(0.4, tokens)),
      'advantage': _digits(advantage + rng.normal(0, 0.1, tokens)),
      'value': _digits(rng.random(tokens)),
      'turn_ratio': float(f'{np.exp(rng.normal(0, 0.1)):.4g}'),
      'clipped': np.flatnonzero(rng.random(tokens) < 0.2).tolist(),
    }
    if rng.random() < 0.3:
      turn['tokens']['weight'] = [0.0, *[1.0] * (tokens - 1)]
  return turn


def _digits(values) -> list[float]:
  return [float(f'{value:.4g}') for value in values]


def _evaluation(rng, level):
  return {
    f'val/em/{name}': float(np.clip(level + rng.normal(0, 0.03), 0, 1))
    for name in ('one_hop', 'two_hop')
  }


def _metrics(rng, step, level, steps):
  """Returns the metrics of a step, under the names that a real run uses."""
  noise = lambda size: float(abs(rng.normal(0, size)))
  line: dict[str, Any] = {
    'step': step,
    'critic/score/mean': float(np.clip(level + rng.normal(0, 0.04), 0, 1)),
    'critic/kl': 0.002 * step + noise(0.001),
    'critic/vf_explained_var': level - noise(0.1),
    'critic/vf_loss': noise(0.1),
    'critic/values/mean': level,
    'critic/returns/mean': level + noise(0.05),
    'actor/entropy': 0.9 * (1 - step / steps) + noise(0.05),
    'actor/pg_clipfrac': noise(0.02),
    'actor/ppo_kl': noise(0.01),
    'actor/grad_norm': 1 + noise(0.3),
    'critic/grad_norm': 1 + noise(0.3),
    'stab/rho': 1 + noise(2.0),
    'stab/scale': 1.0 if step % 3 else 0.4,
    'stab/norm_clipped': noise(1.0),
    'stab/norm_unclipped': noise(1.0),
    'stab/rejected': 0.0,
    'update/skipped': 0.5 if step == 2 else 0.0,
    'rollout/zero_variance_groups': noise(0.2),
    'num_turns/mean': 2 + noise(0.2),
    'response_length/mean': 20 + noise(4.0),
    'env/number_of_valid_search': 1 + noise(0.2),
    'env/finish_ratio': 1 - noise(0.05),
    'retrieval/empty': float(rng.integers(0, 3)),
    'retrieval/failures': 0.0,
    'retrieval/latency_p50': 0.02 + noise(0.01),
    'retrieval/latency_p99': 0.2 + noise(0.1),
    'alarm/entropy': float(step > 0.8 * steps),
    'perf/throughput': 1000 + noise(100.0),
  }
  for level_name in ('token', 'turn', 'sequence'):
    line[f'ratio/{level_name}/mean'] = 1 + noise(0.01)
    line[f'ratio/{level_name}/std'] = noise(0.1)
    line[f'ratio/{level_name}/max'] = 1.2 + noise(0.5)
    line[f'ratio/{level_name}/min'] = 0.5 + noise(0.1)
    line[f'ratio/{level_name}/ess'] = 0.95
    for side in ('low', 'high'):
      name = f'clipfrac/{level_name}/{side}'
      line[name] = noise(0.03)
      for turn in (1, 2):
        line[f'{name}/turn_{turn}'] = noise(0.03)
    for turn in (1, 2):
      line[f'ratio/{level_name}/std/turn_{turn}'] = 0.03 * turn
  line['turn_length/tokens/turn_1'] = 1000.0 + step
  line['turn_length/tokens/turn_2'] = 3.0 if step <= 4 else 0.0
  for phase in _PHASES:
    line[f'timing_s/{phase}'] = 1 + noise(0.2)
  line['timing_s/step'] = 4 + noise(0.2)
  line['timing_s/other'] = 0.25
  line['goodput/fraction'] = 1 - 0.1 * step / steps
  line['goodput/restarts'] = float(step > steps / 2)
  line['goodput/lost_steps'] = 3 * line['goodput/restarts']
  return line


def _write(path, value):
  _write_lines(path, [value])


def _write_lines(path, values):
  text = ''.join(json.dumps(value) + '\n' for value in values)
  path.write_text(text, 'utf-8')
