"""The viewer of dialogues in a real browser."""

import json
import math

import numpy as np
import pytest

from benchmarks import made_runs
from tests.tools.report import conftest
from tests.training import runs


@pytest.fixture
def opened(made_opened):
  made_opened.open('tab=dialogues')
  made_opened.shown(0)
  yield made_opened
  made_opened.check()


@pytest.fixture(scope='module')
def records(made):
  """(run, step, record) of all dialogues, in the order of the page."""
  found = []
  for run, folder in enumerate(made):
    for path in sorted(folder.glob('trajectories-*.jsonl')):
      step = int(path.stem.split('-')[1])
      for line in path.read_text('utf-8').splitlines():
        found.append((run, step, json.loads(line)))
  return found


def _count(opened):
  text = opened.page.locator('#count').inner_text()
  return int(text.split(' of ')[0].replace(',', ''))


def _searches(record):
  return sum(turn['action'] == 'search' for turn in record['turns'])


def _clipped(record):
  tokens = [turn['tokens'] for turn in record['turns'] if 'tokens' in turn]
  count = sum(len(t['ratio']) for t in tokens)
  return sum(len(t['clipped']) for t in tokens) / count if count else None


def _text(record):
  turns = [turn['text'] + turn['observation'] for turn in record['turns']]
  return ' '.join([record['question'], *turns])


@pytest.mark.slow
def test_each_filter_keeps_what_it_says(opened, records):
  page = opened.page
  assert _count(opened) == len(records) == 480
  for name, value, passes in (
    ('run', '2', lambda run, step, r: run == 2),
    ('step', '7', lambda run, step, r: step == 7),
    ('status', 'completed', lambda run, step, r: r['status'] == 'completed'),
    ('least', '0.5', lambda run, step, r: sum(r['rewards'].values()) >= 0.5),
    ('most', '0.5', lambda run, step, r: sum(r['rewards'].values()) <= 0.5),
    ('clip', '20', lambda run, step, r: (_clipped(r) or -1) >= 0.2),
    ('searches', '2', lambda run, step, r: _searches(r) == 2),
    ('text', 'MUSEUM', lambda run, step, r: 'museum' in _text(r)),
  ):
    expected = sum(passes(*record) for record in records)
    assert 0 < expected < len(records), name
    field = page.locator(f'#filter-{name}')
    if name in ('run', 'step', 'status'):
      field.select_option(value)
    else:
      field.fill(value)
    shown = f'{expected:,} of 480 dialogues'
    page.get_by_text(shown, exact=True).wait_for()
    assert f'{name}={value}' in page.url
    page.click('#clear')
    assert _count(opened) == 480


@pytest.mark.slow
def test_sorting_by_clipped_share(opened, records):
  page = opened.page
  page.select_option('#filter-sort', 'clipped')
  page.click('#direction')
  best = max(_clipped(record) or -1 for *_, record in records)
  text = page.locator('.row').first.locator('.facts').inner_text()
  assert f'{best * 100:.1f} % clipped' in text
  # Dialogues without numbers of tokens are last in both directions.
  page.click('#direction')
  assert '% clipped' in page.locator('.row').first.inner_text()


def test_the_keyboard_goes_through_the_list(opened):
  page = opened.page
  page.keyboard.press('j')
  opened.shown(1)
  page.keyboard.press('ArrowDown')
  opened.shown(2)
  page.keyboard.press('k')
  opened.shown(1)
  page.keyboard.press('End')
  opened.shown(479)
  assert page.locator('.row.on').get_attribute('data-number') == '479'
  assert page.locator('.row').count() < 60  # only those that are visible
  page.keyboard.press('Home')
  opened.shown(0)
  page.keyboard.press('/')
  page.keyboard.type('bridge')  # and its letters move nothing
  opened.shown(0)
  page.keyboard.press('Escape')
  page.keyboard.press('3')
  page.wait_for_selector('[data-colour="turn_ratio"][aria-checked="true"]')
  assert 'colour=turn_ratio' in page.url


@pytest.mark.slow
def test_a_link_opens_the_same_dialogue(opened, records):
  page = opened.page
  place = [record[:2] for record in records].index((1, 9))
  opened.open('tab=dialogues&d=1.9.0&colour=advantage')
  opened.shown(place)
  pressed = page.locator('#colours [aria-checked="true"]').inner_text()
  assert pressed == 'advantage'
  page.select_option('#filter-status', 'completed')
  page.keyboard.press('Escape')
  fragment = page.url.split('#')[1]
  number = page.locator('.row.on').get_attribute('data-number')
  opened.open(fragment)
  opened.shown(number)


def _channel(name, tokens, place):
  """Returns what the pointer shows of a token."""
  if name == 'turn ratio':
    return tokens['turn_ratio']
  if name == 'old probability':
    return math.exp(tokens['old_logprob'][place])
  if name == 'clipped':
    return 'yes' if place in tokens['clipped'] else 'no'
  if name == 'weight of the corrections':
    return tokens['weight'][place] if 'weight' in tokens else 1
  names = {'token ratio': 'ratio', 'old log-probability': 'old_logprob'}
  return tokens[names.get(name, name)][place]


@pytest.mark.slow
def test_the_pointer_shows_the_numbers_of_a_token(opened, records):
  page = opened.page
  record = records[0][2]
  tokens = record['turns'][0]['tokens']
  for place in range(len(tokens['ratio'])):
    page.locator('.turn').first.locator('.token').nth(place).hover()
    shown = {
      row.locator('th').inner_text(): row.locator('td').inner_text()
      for row in page.locator('#tip tr').all()
    }
    assert len(shown) == 9
    for name, text in shown.items():
      expected = _channel(name, tokens, place)
      if isinstance(expected, str):
        assert text == expected
      else:
        assert float(text) == pytest.approx(expected, rel=6e-3, abs=1e-6)


def test_every_switch_colours_tokens(opened, records):
  page = opened.page
  place = next(
    n
    for n, (*_, r) in enumerate(records)
    if any('weight' in turn.get('tokens', ()) for turn in r['turns'])
    and _clipped(r)
  )
  run, step, record = records[place]
  first = [record[:2] for record in records].index((run, step))
  opened.open(f'tab=dialogues&d={run}.{step}.{place - first}')
  opened.shown(place)
  names = [
    button.get_attribute('data-colour')
    for button in page.locator('#colours button').all()
  ]
  expected = 'none ratio turn_ratio advantage value entropy clipped silenced'
  assert names == expected.split()
  for name in names:
    page.click(f'#colours [data-colour={name}]')
    page.wait_for_selector(f'[data-colour={name}][aria-checked="true"]')
    tokens = '[...document.querySelectorAll(".token")]'
    colours = page.evaluate(f'{tokens}.map((t) => t.style.backgroundColor)')
    assert (len(set(colours)) > 1) == (name != 'none'), name
  # Tokens that are clipped have a mark in every colour.
  cut = sum(len(turn['tokens']['clipped']) for turn in record['turns'])
  assert page.locator('.token.cut').count() == cut


def test_the_same_question_stands_side_by_side(opened, records):
  page = opened.page
  question = records[0][2]['id']
  same = sum(record['id'] == question for *_, record in records)
  button = page.locator('#compare')
  assert button.inner_text() == f'same question, {same}×'
  page.keyboard.press('c')
  page.wait_for_selector('.columns')
  titles = page.locator('.columns .question').all_inner_texts()
  assert len(titles) == min(same, 40) and len(set(titles)) == 1
  places = page.locator('.columns .where').all_inner_texts()
  assert len(set(places)) == len(places)
  assert 'compare=1' in page.url


@pytest.mark.slow
def test_evaluations_show_the_same_questions_at_several_steps(
  browser, tmp_path
):
  folder = made_runs.make(tmp_path / 'run', questions=10**6, evaluated=3)
  out = tmp_path / 'report.html'
  assert conftest.report(folder, f'--out={out}') == 0
  opened = conftest.Opened(browser, out, 'tab=dialogues')
  opened.shown(0)
  page = opened.page
  # Four of training in each of six steps, three of evaluation in every second.
  assert page.locator('#count').inner_text() == '24 of 33 dialogues'
  assert page.locator('#compare').is_disabled()
  page.select_option('#filter-kind', 'all')
  page.get_by_text('33 of 33 dialogues', exact=True).wait_for()
  page.select_option('#filter-kind', '1')
  page.get_by_text('9 of 33 dialogues', exact=True).wait_for()
  page.click('.row >> nth=1')
  page.wait_for_function("location.hash.includes('d=0.2.1.e')")
  page.locator('#compare').click()
  page.wait_for_selector('.columns')
  places = page.locator('.columns .where').all_inner_texts()
  for place, step in zip(places, (2, 4, 6), strict=True):
    assert f'evaluation at step {step}, dialogue 2' in place
  titles = page.locator('.columns .question').all_inner_texts()
  assert set(titles) == {'Who built bridge number 1000001?'}
  # The address tells a dialogue of an evaluation from one of training.
  for name, what in (('0.2.1.e', 'evaluation at step 2'), ('0.2.1', 'step 2')):
    opened.open(f'tab=dialogues&kind=all&d={name}')
    page.wait_for_selector('.where')
    assert page.locator('.where').inner_text().startswith(what)
  opened.close()


_HOSTILE = (
  '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'
  '</script><!-- --><b>bold</b> & &lt; \x1b[31m\x07 \u202egnp\u202c \u200b '
  '\u2028 \ud800 "\' ` ${1} [[DATA]] \U0001f600'
)


def test_hostile_text_is_shown_as_text(browser, tmp_path):
  folder = made_runs.make(tmp_path / 'run', dialogues=0)
  record = made_runs.dialogue(np.random.default_rng(0))
  for name in ('question', 'prompt', 'id', 'data_set', 'status'):
    record[name] = _HOSTILE
  record |= {
    'golden_answers': [_HOSTILE],
    'rewards': {_HOSTILE: 1.0},
    'scores': {_HOSTILE: 1.0},
    'cause': _HOSTILE,
  }
  turn = record['turns'][-1]
  turn |= {'text': _HOSTILE, 'observation': _HOSTILE, 'action': _HOSTILE}
  turn['tokens']['characters'][-1] = 100
  text = json.dumps(record) + '\n'
  (folder / 'trajectories-000001.jsonl').write_text(text, 'utf-8')
  config = json.loads((folder / 'config.json').read_text())
  config['title'] = _HOSTILE
  config['env'][_HOSTILE] = _HOSTILE
  (folder / 'config.json').write_text(json.dumps(config))
  lines = runs.metrics(folder)
  lines[-1] |= {f'val/{_HOSTILE}': 1.0, f'alarm/{_HOSTILE}': 1.0}
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'metrics.jsonl').write_text(text)
  out = tmp_path / 'report.html'
  assert conftest.report(folder, f'--out={out}') == 0
  opened = conftest.Opened(browser, out)
  page = opened.page
  for tab in ('overview', 'curves', 'config', 'dialogues'):
    page.click(f'#tab-{tab}')
    page.wait_for_selector(f'main.{tab}')
    if tab == 'curves':
      page.locator('figure').last.scroll_into_view_if_needed()
    if tab == 'dialogues':
      opened.shown(0)
    assert page.evaluate('window.hacked') is None
    foreign = 'main img, main script, main b:text-is("bold")'
    assert page.locator(foreign).count() == 0
    text = page.locator('body').inner_text()
    assert not set(text) & set('\x1b\x07\u202e\u202c\u200b\u2028')
    assert '<script>window.hacked = 1</script>' in text
    assert r'\x1b[31m\x07 \u202egnp\u202c \u200b' in text
  opened.close()
