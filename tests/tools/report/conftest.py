"""A browser for the tests of pages, and runs that are made up once."""

import contextlib
import json
import os
import pathlib
import re

import pytest

from benchmarks import chromium
from benchmarks import made_runs
from stppo_jax import __main__


# While it runs, its thread has an event loop, in which tests of other modules
# could start none of their own.
@pytest.fixture(scope='module')
def browser():
  """A headless Chromium."""
  with contextlib.ExitStack() as stack:
    try:
      yield stack.enter_context(chromium.started())
    except chromium.Missing as missing:
      pytest.skip(str(missing))


class Opened:
  """A page in a browser, with what went wrong in it and what it asked for.

  Attributes:
    page: the page of playwright.
    errors: messages of errors, of scripts and of the console.
    requests: the addresses of all requests.
  """

  def __init__(self, browser, path, fragment='', **options):
    self.page = browser.new_page(**options)
    self.errors, self.requests = [], []
    self.page.on('pageerror', lambda error: self.errors.append(str(error)))
    self.page.on('console', lambda line: self.errors.append(line.text))
    self.page.on('request', lambda asked: self.requests.append(asked.url))
    self.address = pathlib.Path(path).resolve().as_uri()
    self.open(fragment)

  def open(self, fragment=''):
    """Opens the page anew, with a fragment of its address."""
    self.page.goto('about:blank')
    self.page.goto(self.address + (f'#{fragment}' if fragment else ''))
    self.page.wait_for_selector('html[data-ready]', state='attached')

  def shown(self, number):
    """Waits until the dialogue of this number is shown."""
    self.page.wait_for_selector(f'#detail[data-number="{number}"]')

  def check(self):
    """Asserts that no error was raised and no other address was asked for."""
    assert not self.errors
    assert set(self.requests) <= {self.address, 'about:blank'}

  def close(self):
    """Closes the page and checks it."""
    self.page.close()
    self.check()


@pytest.fixture(scope='module')
def made_opened(browser, made_page):
  """The page about runs that are made up, open in a browser."""
  opened = Opened(browser, made_page)
  yield opened
  opened.close()


@pytest.fixture(scope='session')
def made(tmp_path_factory):
  """Two experiments of two seeds; the second one collapses."""
  root = tmp_path_factory.mktemp('made')
  for seed in range(2):
    made_runs.make(root / f'st{seed}', seed=seed, steps=30)
    made_runs.make(
      root / f'token{seed}',
      seed=seed,
      steps=30,
      algorithm='token_ppo',
      collapses=True,
    )
  return [root / name for name in ('st0', 'st1', 'token0', 'token1')]


@pytest.fixture(scope='session')
def made_page(made, tmp_path_factory):
  """The page about these runs."""
  out = tmp_path_factory.mktemp('page') / 'report.html'
  assert report(*made, f'--out={out}') == 0
  return out


def data(page):
  """Returns the JSON of a page."""
  text = page.read_text('utf-8')
  (found,) = re.findall(
    r'<script type="application/json"[^>]*>(.*)</script>', text
  )
  return json.loads(found)


def report(*words) -> int:
  """Runs the command in this process; returns its exit code."""
  return __main__.main(['report', *map(os.fspath, words)])
