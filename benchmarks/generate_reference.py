"""Collects with `generate` of `transformers`, one turn of all rows at a time.

This is a common loop around a library's `generate`. Every turn computes the
dialogues from their first tokens, padded to the longest dialogue of a batch.
The rows of a batch wait until the last row has finished its turn, and all rows
wait for the last observation. Dialogues that have ended are left out of further
turns. A batch has rows of about the same length, so that it has less padding.
Decoding is greedy.
"""

import asyncio
from collections.abc import Iterator, Sequence
import dataclasses
import os
import pathlib

import numpy as np
import torch
import transformers

from benchmarks import collectors
from benchmarks import dialogues
from benchmarks import measure
from stppo_jax import types
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import tokenizer as tokenizer_lib

_BATCHES = (128, 32, 16)  # rows of a call of `generate`; all rows are tried too
_CLOSE = 1.3  # settings within this factor of the fastest are timed twice


class GenerateLoop:
  """Collects dialogues with a Hugging Face model.

  Args:
    directory: the directory of the model.
    tokenizer: the tokenizer of the model.
    loop: the event loop that runs the environment's coroutines.

  Attributes:
    batch: the most rows in a call of `generate`; 0 = all rows.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    tokenizer: tokenizer_lib.Tokenizer,
    loop: event_loop.EventLoop,
  ):
    self._model = transformers.Qwen2ForCausalLM.from_pretrained(
      directory, dtype=torch.float32
    ).eval()
    self.batch = 0
    self._tokenizer = tokenizer
    self._loop = loop
    self._closing = dialogues.closing_ids(tokenizer)
    self._options = {
      'max_new_tokens': collectors.MAX_TURN_TOKENS,
      'do_sample': False,
      'pad_token_id': tokenizer.eos_id,
      # Of the ways in which `generate` can end a turn, this is the fastest.
      'eos_token_id': self._closing,
    }

  def collect(self, environment: dialogues.Scripted) -> list[types.Trajectory]:
    """Returns all dialogues; `with_logprobs` adds their log-probabilities."""
    questions = environment.questions()
    prompts = [
      self._tokenizer.encode_prompt(environment.prompt(q)) for q in questions
    ]
    dialogue_ids = [prompt.tolist() for prompt in prompts]
    turns: list[list[types.Turn]] = [[] for _ in questions]
    active = list(range(len(questions)))
    while active:
      active.sort(key=lambda row: len(dialogue_ids[row]))
      size = self.batch or len(active)
      written = [
        ids
        for first in range(0, len(active), size)
        for ids in self._generate(
          [dialogue_ids[row] for row in active[first : first + size]]
        )
      ]
      steps = self._loop.run(
        _together(
          environment.step(
            questions[row], len(turns[row]), self._tokenizer.decode(ids)
          )
          for row, ids in zip(active, written, strict=True)
        )
      )
      unfinished = []
      for row, ids, step in zip(active, written, steps, strict=True):
        observation_ids = np.zeros(0, np.int32)
        if step.status is None:
          observation_ids = self._tokenizer.encode_text(step.observation.text)
          unfinished.append(row)
        unknown = np.zeros(len(ids), np.float32)
        turns[row].append(
          types.Turn(ids, unknown, observation_ids, step.action)
        )
        dialogue_ids[row] += [*ids.tolist(), *observation_ids.tolist()]
      active = unfinished
    return [
      types.Trajectory(
        question, prompt, tuple(row), {}, types.TrajectoryStatus.COMPLETED
      )
      for question, prompt, row in zip(questions, prompts, turns, strict=True)
    ]

  def _generate(self, rows: Sequence[list[int]]) -> list[np.ndarray]:
    """Returns the new tokens of each row, up to its closing token."""
    longest = max(map(len, rows))
    ids_BL = torch.full((len(rows), longest), self._options['pad_token_id'])
    mask_BL = torch.zeros_like(ids_BL)
    for n, row in enumerate(rows):
      ids_BL[n, longest - len(row) :] = torch.tensor(row)
      mask_BL[n, longest - len(row) :] = 1
    with torch.inference_mode():
      out_BL = self._model.generate(
        ids_BL, attention_mask=mask_BL, **self._options
      )[:, longest:]
    closed_BL = np.isin(out_BL.numpy(), self._closing)
    ends_B = np.where(
      closed_BL.any(1), closed_BL.argmax(1) + 1, closed_BL.shape[1]
    )
    return [
      row[:end].astype(np.int32)
      for row, end in zip(out_BL.numpy(), ends_B, strict=True)
    ]

  def with_logprobs(
    self, trajectories: Sequence[types.Trajectory]
  ) -> list[types.Trajectory]:
    """Returns the trajectories with log-probabilities from a forward pass."""
    return [
      dataclasses.replace(trajectory, turns=tuple(self._turns(trajectory)))
      for trajectory in trajectories
    ]

  def _turns(self, trajectory: types.Trajectory) -> Iterator[types.Turn]:
    ids = [trajectory.prompt_ids]
    for turn in trajectory.turns:
      ids += [turn.token_ids, turn.observation_ids]
    ids_1L = torch.tensor(np.concatenate(ids)[None], dtype=torch.long)
    with torch.inference_mode():
      log_softmax_LV = self._model(ids_1L).logits[0].log_softmax(-1)
    # The log-probability of each token given all earlier tokens.
    logprobs_L = (
      log_softmax_LV[:-1].gather(1, ids_1L[0, 1:, None])[:, 0].numpy()
    )
    begin = len(trajectory.prompt_ids) - 1
    for turn in trajectory.turns:
      end = begin + len(turn.token_ids)
      yield dataclasses.replace(turn, sampler_logprobs=logprobs_L[begin:end])
      begin = end + len(turn.observation_ids)


def use_fastest(
  peer: GenerateLoop, environment: dialogues.Scripted, *, rows: int
) -> str:
  """Sets the fastest number of threads and batch size; returns a report.

  Small models are slower with more threads, especially on a busy machine.
  Smaller batches wait for fewer rows and have less padding, and larger batches
  need fewer calls. After a collection to warm up, one collection is timed with
  each setting. Settings close to the fastest are timed a second time, and the
  shorter of their two times counts.

  Args:
    peer: the loop whose batch size is set.
    environment: the dialogues that are collected with each setting.
    rows: the number of these dialogues.
  """
  case = measure.single(lambda: peer.collect(environment))

  def use(threads, batch):
    torch.set_num_threads(threads)
    peer.batch = batch

  def run(setting):
    use(*setting)
    return measure.once(case)[0]

  settings = [
    (threads, batch)
    for threads in dict.fromkeys((1, len(os.sched_getaffinity(0))))
    for batch in (rows, *(x for x in _BATCHES if x < rows))
  ]
  run(settings[0])
  seconds = {setting: run(setting) for setting in settings}
  close = _CLOSE * min(seconds.values())
  for setting, first in seconds.items():
    if first <= close:
      seconds[setting] = min(first, run(setting))
  threads, batch = min(seconds, key=seconds.get)
  use(threads, batch)
  tried = ', '.join(f'{n} x {m}: {x:.2f}' for (n, m), x in seconds.items())
  return (
    f'torch {torch.__version__}, transformers {transformers.__version__}: '
    f'{threads} threads, batches of {batch} rows '
    f'(tried threads x rows: s; {tried})'
  )


async def _together(coroutines):
  return await asyncio.gather(*coroutines)
