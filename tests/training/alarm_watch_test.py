"""Alarms are told as they begin and end, and end a run that names them."""

import pytest

from stppo_jax import __main__
from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.retrieval import server
from stppo_jax.training import alarms
from tests.training import runs


class _OtherHost(hosts_lib.Hosts):
  """The second host of a run, which the first one tells what is due."""

  def __init__(self, due):
    super().__init__(1, ('a', 'b'))
    self._due = due

  def exchange(self, what, value, *, timeout=None):
    return [self._due, value]


def _silent(count):
  return {'retrieval/answers': 20.0, 'retrieval/empty': float(count)}


def _steps(watch, *counts):
  """Returns the metric of each step."""
  rings = []
  for step, count in enumerate(counts, 1):
    rings.append(watch.measure(_silent(count))['alarm/empty_answers'])
    watch.check(step)
  return rings


def test_an_alarm_is_told_when_it_begins_and_when_it_is_over():
  lines = []
  watch = alarms.Alarms(runs.config(), hosts_lib.ALONE, lines.append)
  rings = _steps(watch, 3, 20, 20, 3, 20, 3, 3, 3, 3, 3, 20)
  assert rings == [0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1]
  told = [line.partition('; ')[0] for line in lines]
  began = (
    'ALARM empty_answers: the share of searches that found nothing '
    '(retrieval/empty) is 1, above alarms.empty_answers'
  )
  assert told == [
    f'step 2: {began}',
    'step 10: alarm empty_answers: over',
    f'step 11: {began}',
  ]


def test_a_retriever_that_never_finds_anything_ends_the_run():
  watch = alarms.Alarms(runs.config(), hosts_lib.ALONE, print)
  _steps(watch, 20, 20, 20, 20, 3, 20, 20, 20, 20)
  with pytest.raises(alarms.Alarmed, match='^the run ends at step 1: alarm em'):
    _steps(watch, 20)


@pytest.mark.slow
def test_a_run_whose_retriever_never_finds_anything_ends(tmp_path, capsys):
  """The policy is that of the quickstart, which searches from the beginning."""
  strange = types.Passage('0', 'zqx', 'zqx')  # no query has this word
  served = server.embedded([strange], world_passages=lambda world: [strange])
  with served:
    code = runs.train(
      tmp_path,
      num_steps=9,
      model__path=runs.REPO / 'assets' / 'quickstart',
      retrieval__url=served.url,
      evaluate__every=0,
      checkpoint__every=99,
      alarms__stop_after=2,
    )
  assert code == 76
  output, errors = capsys.readouterr()
  assert 'step 1: ALARM empty_answers: the share of searches that' in output
  (line,) = errors.splitlines()
  assert line.startswith('the run ends at step 2: alarm empty_answers has rung')
  for line in runs.metrics(tmp_path):
    assert line['retrieval/empty'] == line['retrieval/answers'] >= 10
    assert line['retrieval/failures'] == 0
  assert (tmp_path / 'checkpoints' / '2').is_dir()


def test_all_hosts_end_with_the_first_one():
  lines = []
  watch = alarms.Alarms(runs.config(), _OtherHost([]), lines.append)
  _steps(watch, *[20] * 9)
  assert not lines
  told = alarms.Alarms(runs.config(), _OtherHost(['kl']), lines.append)
  with pytest.raises(alarms.Alarmed, match='alarm kl'):
    _steps(told, 3)


def test_an_alarm_saves_and_ends_a_run_and_is_in_its_files(tmp_path, capsys):
  changes = {
    'evaluate__every': 0,
    'checkpoint__every': 99,
    'alarms__entropy': 99.0,
    'alarms__stop_after': 2,
  }
  stop = "('entropy',)"
  assert runs.train(tmp_path, alarms__stop=stop, **changes) == 76
  output, errors = capsys.readouterr()
  assert 'step 1: ALARM entropy: the entropy (actor/entropy) is' in output
  (line,) = errors.splitlines()
  assert line.startswith('the run ends at step 2: alarm entropy has rung in 2')
  lines = runs.metrics(tmp_path)
  assert [line['alarm/entropy'] for line in lines] == [1, 1]
  assert {line['alarm/kl'] for line in lines} == {0}
  assert lines[0]['rollout/policy_tokens'] > 0
  assert (tmp_path / 'checkpoints' / '2').is_dir()
  assert __main__.main(['status', str(tmp_path)]) == 0
  shown = capsys.readouterr().out
  assert 'step 2: alarm entropy: the entropy' in shown and 'failed' in shown
  assert runs.train(tmp_path, alarms__stop='()', **changes) == 0
  assert len(runs.metrics(tmp_path)) == 3
