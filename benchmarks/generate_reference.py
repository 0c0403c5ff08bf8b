"""Collecting with `transformers` `generate`, a turn of all rows at a time.

What a loop around a library's generate looks like: every turn starts from the
whole dialogues, padded to the longest of a batch; the rows of a batch wait
until the last one has written, and all until the last answer is there. Rows
that have ended are left out of further turns; those of about the same length
are in a batch, which has less padding so. Greedy.
"""

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import pathlib

import numpy as np
import torch
import transformers

from benchmarks import dialogues
from benchmarks import measure
from stppo_jax import types
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import tokenizer as tokenizer_lib

_BATCHES = (128, 32, 16)  # rows of a call of `generate`; also all of them
_CLOSE = 1.3  # settings that are this much slower at first get a second chance


class GenerateLoop:
  """Plays dialogues on a Hugging Face model.

  Args:
    directory: of the model.
    words: its tokenizer.
    loop: where the environment's coroutines run.
    stops: end a row's turn where it is closed, as `generate` does it fastest:
      by the ids of the closing tokens. False: write `max_turn_tokens` tokens,
      or to the end of sequence, and cut what follows the closing one.
    max_turn_tokens: of a turn.

  Attributes:
    batch: most rows of a call of `generate`; 0 = all.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    words: tokenizer_lib.Tokenizer,
    loop: event_loop.EventLoop,
    *,
    stops: bool,
    max_turn_tokens: int,
  ):
    self._model = transformers.Qwen2ForCausalLM.from_pretrained(
      directory, dtype=torch.float32
    ).eval()
    self.batch = 0
    self._words = words
    self._loop = loop
    self._closing = dialogues.closing_ids(words)
    self._options = {
      'max_new_tokens': max_turn_tokens,
      'do_sample': False,
      'pad_token_id': words.eos_id,
      'eos_token_id': self._closing if stops else [words.eos_id],
    }

  def collect(self, environment: dialogues.Scripted) -> list[types.Trajectory]:
    """All dialogues, without log-probabilities (see `scored`)."""
    questions = environment.questions()
    prompts = [
      self._words.encode_prompt(environment.prompt(q)) for q in questions
    ]
    so_far = [prompt.tolist() for prompt in prompts]
    turns: list[list[types.Turn]] = [[] for _ in questions]
    active = list(range(len(questions)))
    while active:
      active.sort(key=lambda row: len(so_far[row]))
      size = self.batch or len(active)
      written = [
        ids
        for first in range(0, len(active), size)
        for ids in self._generate(
          [so_far[row] for row in active[first : first + size]]
        )
      ]
      steps = self._loop.run(
        _together(
          environment.step(
            questions[row], len(turns[row]), self._words.decode(ids)
          )
          for row, ids in zip(active, written, strict=True)
        )
      )
      going_on = []
      for row, ids, step in zip(active, written, steps, strict=True):
        told = np.zeros(0, np.int32)
        if step.status is None:
          told = self._words.encode_text(step.observation.text)
          going_on.append(row)
        unknown = np.zeros(len(ids), np.float32)
        turns[row].append(types.Turn(ids, unknown, told, step.action))
        so_far[row] += [*ids.tolist(), *told.tolist()]
      active = going_on
    return [
      types.Trajectory(
        question, prompt, tuple(row), {}, types.TrajectoryStatus.COMPLETED
      )
      for question, prompt, row in zip(questions, prompts, turns, strict=True)
    ]

  def _generate(self, rows: Sequence[list[int]]) -> list[np.ndarray]:
    """What each row writes, its closing token included."""
    longest = max(map(len, rows))
    ids_BL = torch.full((len(rows), longest), self._options['pad_token_id'])
    mask_BL = torch.zeros_like(ids_BL)
    for n, row in enumerate(rows):
      ids_BL[n, longest - len(row) :] = torch.tensor(row)
      mask_BL[n, longest - len(row) :] = 1
    with torch.inference_mode():
      out_BN = self._model.generate(
        ids_BL, attention_mask=mask_BL, **self._options
      )[:, longest:]
    closed_BN = np.isin(out_BN.numpy(), self._closing)
    ends_B = np.where(
      closed_BN.any(1), closed_BN.argmax(1) + 1, closed_BN.shape[1]
    )
    return [
      row[:end].astype(np.int32)
      for row, end in zip(out_BN.numpy(), ends_B, strict=True)
    ]

  def scored(
    self, trajectories: Sequence[types.Trajectory]
  ) -> list[types.Trajectory]:
    """The same with log-probabilities, of whole forward passes."""
    return [
      dataclasses.replace(trajectory, turns=tuple(self._scored(trajectory)))
      for trajectory in trajectories
    ]

  def _scored(self, trajectory: types.Trajectory) -> Iterator[types.Turn]:
    parts = [trajectory.prompt_ids]
    for turn in trajectory.turns:
      parts += [turn.token_ids, turn.observation_ids]
    ids_1L = torch.tensor(np.concatenate(parts)[None], dtype=torch.long)
    with torch.inference_mode():
      scores_LV = self._model(ids_1L).logits[0].log_softmax(-1)
    # Of each token after those before it.
    logprobs_L = scores_LV[:-1].gather(1, ids_1L[0, 1:, None])[:, 0].numpy()
    begin = len(trajectory.prompt_ids) - 1
    for turn in trajectory.turns:
      end = begin + len(turn.token_ids)
      yield dataclasses.replace(turn, sampler_logprobs=logprobs_L[begin:end])
      begin = end + len(turn.observation_ids)


def use_fastest(
  player: GenerateLoop, environment: dialogues.Scripted, *, rows: int
) -> str:
  """Sets the threads and the batch that the peer is the fastest with; a line.

  Small models are slower with more threads, much so on a busy machine. Smaller
  batches wait for fewer rows, and have less padding; larger ones have fewer
  calls. After a collection to warm up, each setting plays one, and those that
  come close to the fastest play another; the lesser time counts.

  Args:
    player: the peer.
    environment: what it is to be fast at; played with each setting.
    rows: of the environment.
  """
  case = measure.Case(lambda _: player.collect(environment), lambda: None)

  def use(threads, batch):
    torch.set_num_threads(threads)
    player.batch = batch

  def run(setting):
    use(*setting)
    return measure.once(case)[0]

  settings = [
    (threads, batch)
    for threads in dict.fromkeys((1, torch.get_num_threads()))
    for batch in (rows, *(x for x in _BATCHES if x < rows))
  ]
  run(settings[0])
  seconds = {setting: run(setting) for setting in settings}
  close = _CLOSE * min(seconds.values())
  for setting, found in seconds.items():
    if found <= close:
      seconds[setting] = min(found, run(setting))
  threads, batch = min(seconds, key=seconds.get)
  use(threads, batch)
  tried = ', '.join(f'{n} x {m}: {x:.2f}' for (n, m), x in seconds.items())
  return (
    f'torch: {threads} threads, batches of {batch} rows '
    f'(tried threads x rows: s; {tried})'
  )


async def _together(coroutines):
  return await asyncio.gather(*coroutines)
