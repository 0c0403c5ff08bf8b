"""Faults at known moments of a run, through the tables that a run reads.

The environment and the KL controller are entries of tables: those here work
like the entries they replace, and call a function at each of these moments.

    ('collect', n)    the nth collection of this start begins
    ('collected', n)  its trajectories have ended
    ('evaluate', n)   its nth evaluation begins
    ('evaluated', n)  its trajectories have ended
    ('updated', n)    the updates of its nth step are done, nothing is written
"""

from collections.abc import Callable
import contextlib
import dataclasses
import os
import resource
import signal
import sys
from typing import Any

import pytest

from stppo_jax import types
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.retrieval import fakes
from stppo_jax.rl import kl
from stppo_jax.training import components

Moment = tuple[str, int]


@contextlib.contextmanager
def at(settings, act: Callable[[Moment], float | None], *, num_hosts: int = 1):
  """Calls `act` at the moments of a run inside this context.

  Args:
    settings: the config of the run.
    act: may raise, send signals, or return which share of the trajectories of a
      collection that the infrastructure shall fail.
    num_hosts: the hosts of the run. The moments are those of this host, which
      collects and evaluates one of as many equal parts.
  """
  watch = _Watch(settings, act, num_hosts)
  base = environments.find(settings.env.name)

  class Environment(base):
    """The environment of the run, which reports its moments."""

    @classmethod
    def from_options(cls, options, retriever):
      environment = super().from_options(options, retriever)
      # The check of the data before a run asks for prompts too.
      environment.collects = not isinstance(retriever, fakes.FakeRetriever)
      return environment

    def prompt(self, question):
      if self.collects:
        watch.prompted(question)
      return super().prompt(question)

    async def step(self, question, turn_index, text):
      step = await super().step(question, turn_index, text)
      if question.id not in watch.failing:
        return step
      return dataclasses.replace(
        step,
        action=protocol.INVALID,
        observation=None,
        status=types.TrajectoryStatus.INFRA_ERROR,
        cause='the server is away',
      )

    def rewards(self, question, prompt, texts, status):
      watch.rewarded(question)
      return super().rewards(question, prompt, texts, status)

  controller = kl.CONTROLLERS[settings.algorithm.kl.controller]

  def adapt(*args, **options):
    watch.happened('updated')
    return controller(*args, **options)

  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(environments.ENVIRONMENTS, settings.env.name, Environment)
    patch.setitem(kl.CONTROLLERS, settings.algorithm.kl.controller, adapt)
    yield


def printed(text: str, act: Callable[[Moment], Any]):
  """Returns a context in which `act(('printed', 1))` follows each such text.

  Args:
    text: what is printed at once, or a part of it.
    act: see `at`.
  """
  return contextlib.redirect_stdout(_Stdout(text, act))


class _Stdout:
  """The standard output, which reports that a text was printed."""

  def __init__(self, text, act):
    self._stdout, self._text, self._act = sys.stdout, text, act

  def __getattr__(self, name):
    return getattr(self._stdout, name)

  def write(self, text):
    written = self._stdout.write(text)
    if self._text in text:
      self._act(('printed', 1))
    return written


def send_at(moment: Moment, number: signal.Signals) -> Callable:
  """Returns a function that sends a signal to this process at a moment."""

  def act(now):
    if now == moment:
      os.kill(os.getpid(), number)

  return act


def fill_disk(num_bytes: int = 1024) -> None:
  """Lets this process write no file beyond a few bytes."""
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


@contextlib.contextmanager
def room_in_the_end():
  """Makes room again on a disk that is filled inside this context."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Crash(Exception):
  """Ends the process like a power cut.

  It has an exit code, because other errors of an environment only fail a
  trajectory.
  """

  exit_code = 70


def crash_at(moment: Moment) -> Callable:
  """Returns a function that raises an error at a moment."""

  def act(now):
    if now == moment:
      raise Crash('a bug, or a power cut')

  return act


class _Watch:
  """Counts the moments of a run.

  Attributes:
    failing: ids of the questions whose trajectories fail now.
  """

  def __init__(self, settings, act, num_hosts):
    self._act = act
    self._counts: dict[str, int] = {}
    self.failing: set[str] = set()
    self._prompted: dict[str, list[str]] = {'collect': [], 'evaluate': []}
    self._num_rewarded = {'collect': 0, 'evaluate': 0}
    self._group_sizes = {'collect': settings.rollout.group_size, 'evaluate': 1}
    questions = components.build_questions(settings)
    groups = questions.evaluation(settings.evaluate.num_questions)
    self._evaluation = {q.id for group in groups.values() for q in group}
    rollout = settings.rollout
    num_groups = rollout.trajectories_per_step // rollout.group_size
    self._sizes = {
      'collect': num_groups // num_hosts,
      'evaluate': len(self._evaluation) // num_hosts,
    }
    self._share = 0.0

  def happened(self, kind: str) -> float:
    count = self._counts[kind] = self._counts.get(kind, 0) + 1
    return self._act((kind, count)) or 0.0

  def prompted(self, question: types.Question) -> None:
    kind = self._kind(question)
    ids = self._prompted[kind]
    if not ids:  # the first question of a collection
      self.failing.clear()
      self._share = self.happened(kind)
    if len(ids) < int(self._share * self._sizes[kind]):
      self.failing.add(question.id)
    ids.append(question.id)
    if len(ids) == self._sizes[kind]:
      ids.clear()

  def rewarded(self, question: types.Question) -> None:
    kind = self._kind(question)
    self._num_rewarded[kind] += 1
    size = self._sizes[kind] * self._group_sizes[kind]
    if self._num_rewarded[kind] % size == 0:
      self.happened({'collect': 'collected', 'evaluate': 'evaluated'}[kind])

  def _kind(self, question: types.Question) -> str:
    return 'evaluate' if question.id in self._evaluation else 'collect'
