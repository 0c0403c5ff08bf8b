"""Statistics of evaluations, by hand and by enumeration."""

import itertools

import numpy as np
import pytest

from stppo_jax.tools import score_report


def _record(identity, em, sample=0, **more):
  return {
    'id': identity,
    'data_set': 'nq',
    'sample': sample,
    'scores': {'em': em, 'f1': em / 2},
    'golden_answers': ['x'],
    'options': {},
    'answer': 'x' if em else None,
    'searches': 2,
    'turns': [1, 2, 3],
    'passages': [],
    'gold_passages': [],
    **more,
  }


@pytest.mark.parametrize(('samples', 'right'), [(1, 0), (1, 1), (5, 2), (8, 7)])
def test_pass_at_k_is_the_share_of_the_draws_with_a_right_one(samples, right):
  dialogues = [1] * right + [0] * (samples - right)
  for k in range(1, samples + 1):
    draws = list(itertools.combinations(dialogues, k))
    expected = np.mean([max(draw) for draw in draws])
    assert score_report.pass_at_k(samples, right, k) == pytest.approx(expected)


def test_means_are_over_questions_and_samples():
  ems = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
  records = [
    _record(str(q), em, s)
    for q, row in enumerate(ems)
    for s, em in enumerate(row)
  ]
  report = score_report.report('nq', records, 'em')
  assert (report.questions, report.samples) == (3, 4)
  assert report.scores == pytest.approx({'em': 3 / 12, 'f1': 1.5 / 12})
  assert report.pass_at == pytest.approx(
    # 1 - C(3, 2) / C(4, 2) = 1/2 and 1 - C(2, 2) / C(4, 2) = 5/6.
    {1: 3 / 12, 2: (1 / 2 + 5 / 6) / 3, 4: 2 / 3}
  )
  assert report.means == {'searches': 2, 'turns': 3, 'answered': 3 / 12}
  low, high = report.intervals['em']
  assert 0 <= low < 0.25 < high <= 0.5
  # A question with a sample that failed is left out.
  assert score_report.report('nq', records[1:], 'em').questions == 2


def test_the_interval_covers_the_mean_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(60):
    low, high = score_report.interval((rng.random(200) < 0.3).astype(float))
    covered += low <= 0.3 <= high
    # As wide as the normal approximation says.
    width = 2 * 1.96 * np.sqrt(0.3 * 0.7 / 200)
    assert high - low == pytest.approx(width, rel=0.25)
  assert 52 <= covered <= 60


def test_a_share_of_all_is_not_certain():
  low, high = score_report.interval(np.ones(16))
  assert (low, high) == (pytest.approx(0.806, abs=1e-3), 1.0)
  low, high = score_report.interval(np.array([0.5, 0.5, 0.25]))  # samples
  assert 0.25 <= low < high == 0.5


def test_recall_is_the_share_of_gold_passages_that_any_search_found():
  found = [
    _record('1', 1, passages=[['a', 'b'], [], ['c']], gold_passages=['a', 'c']),
    _record('2', 1, passages=[['a', 'a'], ['d']], gold_passages=['a', 'c']),
    _record('3', 1, passages=[], gold_passages=['a']),
    _record('4', 1, passages=[['a']]),  # gold passages are not known
  ]
  means = score_report.report('nq', found, 'em').means
  assert means['recall'] == pytest.approx((1 + 0.5 + 0) / 3)
  assert means['all_gold'] == pytest.approx(1 / 3)
  assert 'recall' not in score_report.report('nq', found[3:], 'em').means


def test_the_majority_is_the_most_frequent_golden_answer():
  golden = [['Yes'], ['yes!', 'no'], ['no'], ['maybe'], ['the yes']]
  records = [
    _record(str(n), 0, golden_answers=answers)
    for n, answers in enumerate(golden)
  ]
  records = [x | {'scores': {'em': 0, 'substring_match': 0}} for x in records]
  for score in ('em', 'substring_match'):
    assert score_report.report('nq', records, score).baseline == 3 / 5
  # Of options, a letter or a text: "B" is right in three, "two" in two.
  options = [
    ({'A': 'one', 'B': 'two'}, 'two'),
    ({'A': 'one', 'B': 'ten'}, 'ten'),
    ({'A': 'two', 'B': 'one'}, 'one'),
    ({'A': 'two', 'B': 'six'}, 'two'),
  ]
  records = [
    _record(str(n), 0, options=texts, golden_answers=[answer])
    for n, (texts, answer) in enumerate(options)
  ]
  assert score_report.report('nq', records, 'em').baseline == 3 / 4
  assert score_report.report('nq', records, 'f1').baseline is None


def test_tables_have_a_line_for_each_set():
  first = score_report.report('nq', [_record('1', 1), _record('2', 0)], 'em')
  gold = {'gold_passages': ['a'], 'passages': [['a']]}
  second = score_report.report('hotpotqa', [_record('1', 1, **gold)], 'em')
  head, *rows = score_report.rows([first, second])
  nq, hotpotqa = (dict(zip(head, row, strict=True)) for row in rows)
  assert (nq['em'], nq['95 %'], nq['f1']) == ('0.500', '0.095-0.905', '0.250')
  assert (nq['recall'], hotpotqa['recall']) == ('', '1.000')


def test_a_table_has_sets_of_different_numbers_of_samples():
  reports = [
    score_report.report(name, [_record('1', 1, s) for s in range(count)], 'em')
    for name, count in (('nq', 4), ('hotpotqa', 3))
  ]
  for order in (reports, reports[::-1]):
    head, *body = score_report.rows(order)
    ks = [head.index(f'pass@{k}') for k in (2, 3, 4)]
    lines = {line[0]: [line[k] for k in ks] for line in body}
    assert lines == {
      'nq': ['1.000', '', '1.000'],
      'hotpotqa': ['1.000', '1.000', ''],
    }
