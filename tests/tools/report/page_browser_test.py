"""The page in a real browser: figures, tables, switches, and nothing loaded."""

import json
import re
import statistics

from matplotlib import figure as figure_lib
import pytest

from tests.tools.report import conftest
from tests.training import runs


@pytest.fixture
def opened(made_opened):
  made_opened.open()
  yield made_opened
  made_opened.check()


def _numbers(text):
  return [float(word) for word in re.findall(r'-?\d+\.?\d*(?:e-?\d+)?', text)]


def test_the_tables_show_the_numbers_of_the_metrics(opened, made):
  row = opened.page.locator('#summary tr[data-row="last reward"] td')
  for place, folders in enumerate((made[:2], made[2:])):
    means = [
      statistics.fmean([line['critic/score/mean'] for line in lines[-10:]])
      for lines in map(runs.metrics, folders)
    ]
    shown = _numbers(row.nth(place).inner_text())
    expected = [statistics.fmean(means), min(means), max(means)]
    assert shown == [round(x, 3) for x in expected]
  row = opened.page.locator('#evaluation tr[data-row="val/em/one_hop"] td')
  last = [lines[-1]['val/em/one_hop'] for lines in map(runs.metrics, made)]
  expected = [statistics.fmean(last[:2]), min(last[:2]), max(last[:2])]
  shown = _numbers(row.nth(0).inner_text())[:3]
  assert shown == [round(x, 3) for x in expected]


def test_a_figure_shows_mean_and_band_under_the_pointer(opened, made):
  opened.open('tab=curves')
  figure = opened.page.locator('figure[data-title="Reward"]')
  figure.locator('svg .curve').first.wait_for()
  assert figure.locator('svg .curve').count() == 2
  assert figure.locator('svg .band').count() == 2
  box = figure.locator('.plot svg').bounding_box()
  opened.page.mouse.move(box['x'] + 0.6 * box['width'], box['y'] + 60)
  values = figure.locator('.value')
  step = int(values.first.get_attribute('data-step'))
  assert 10 < step < 25
  for group, folders in enumerate((made[:2], made[2:])):
    rewards = [
      runs.metrics(folder)[step]['critic/score/mean'] for folder in folders
    ]
    shown = _numbers(values.nth(group).inner_text())
    expected = [statistics.fmean(rewards), min(rewards), max(rewards)]
    assert shown == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_zoom_and_smoothing_are_in_the_address(opened):
  opened.open('tab=curves')
  page = opened.page
  figure = page.locator('figure[data-title="Reward"]')
  figure.locator('svg').first.wait_for()
  box = figure.locator('.plot svg').bounding_box()
  page.mouse.move(box['x'] + 0.4 * box['width'], box['y'] + 50)
  page.mouse.down()
  page.mouse.move(box['x'] + 0.8 * box['width'], box['y'] + 50)
  page.mouse.up()
  low, high = map(int, re.search(r'x=(\d+)-(\d+)', page.url).groups())
  assert 5 < low < high < 28
  page.select_option('#smooth', '5')
  assert 'smooth=5' in page.url
  fragment = page.url.split('#')[1]
  curve = figure.locator('.curve').first.get_attribute('d')
  opened.open(fragment)
  figure.locator('.curve').first.wait_for()
  assert figure.locator('.curve').first.get_attribute('d') == curve


@pytest.mark.slow
def test_an_experiment_can_be_hidden(opened):
  page = opened.page
  page.locator('#legend button').nth(1).click()
  assert 'hide=1' in page.url
  assert page.locator('#summary thead th').count() == 3
  figure = page.locator('figure[data-title="Reward"]')
  figure.locator('svg').first.wait_for()
  assert figure.locator('.curve').count() == 1


@pytest.mark.slow
def test_differences_of_configurations_are_shown(opened):
  opened.open('tab=config')
  page = opened.page
  rows = page.locator('#config tbody tr')
  keys = rows.locator('th').all_inner_texts()
  assert 'algorithm.ratio.level' in keys and 'seed' not in keys
  page.uncheck('#only-differences')
  assert page.locator('#config tbody tr').count() > 100
  page.fill('#config-filter', 'ratio.level')
  assert rows.all_inner_texts() == ['algorithm.ratio.level\tturn\ttoken']


@pytest.mark.parametrize('scheme', ['dark', 'light'])
@pytest.mark.slow
def test_light_dark_and_narrow(browser, made_page, scheme):
  size = {'width': 400, 'height': 800}
  opened = conftest.Opened(
    browser, made_page, color_scheme=scheme, viewport=size
  )
  page = opened.page
  colour = 'getComputedStyle(document.body).backgroundColor'
  system = page.evaluate(colour)
  for tab in ('overview', 'curves', 'dialogues', 'config'):
    page.click(f'#tab-{tab}')
    page.wait_for_selector(f'main.{tab}')
    # Nothing is wider than the screen.
    assert page.evaluate('document.documentElement.scrollWidth') <= 400
  page.click('#theme')
  page.click('#theme')  # auto, light, dark
  assert (page.evaluate(colour) == system) == (scheme == 'dark')
  opened.close()


def test_every_metric_gets_to_the_page_as_it_is(opened, made):
  """The columns that figures are drawn from, against metrics.jsonl."""
  columns = json.loads(opened.page.evaluate('JSON.stringify(metricsOfRun)'))
  for folder, run in zip(made, columns):
    lines = runs.metrics(folder)
    assert run['steps'] == [line['step'] for line in lines]
    names = {name for line in lines for name in line} - {'step'}
    assert names <= set(run['columns'])
    for name in names:
      expected = [line.get(name) for line in lines]
      assert run['columns'][name] == [
        None if x is None else pytest.approx(x, rel=1e-5, abs=1e-12)
        for x in expected
      ]


def test_pictures_of_other_commands_are_part_of_the_page(
  browser, made, tmp_path, capsys
):
  picture, out = tmp_path / 'levels.png', tmp_path / 'report.html'
  figure_lib.Figure(figsize=(2, 1)).savefig(picture, dpi=100)
  for other, line in (
    (tmp_path / 'absent.png', 'No such file or directory'),
    (made[0] / 'metrics.jsonl', 'is no PNG file'),
  ):
    assert conftest.report(made[0], f'--picture={other}') == 2
    assert capsys.readouterr().err == f'--picture={other}: {line}\n'
  words = (made[0], f'--picture={picture}', f'--out={out}')
  assert conftest.report(*words) == 0
  picture.unlink()
  opened = conftest.Opened(browser, out, 'tab=pictures')
  size = opened.page.locator('img').evaluate(
    'image => image.decode().then('
    '() => [image.alt, image.naturalWidth, image.naturalHeight])'
  )
  assert size == ['levels', 200, 100]
  opened.requests = [x for x in opened.requests if not x.startswith('data:')]
  opened.close()
