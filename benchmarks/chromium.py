"""Starts the headless Chromium of this machine, to load pages."""

from collections.abc import Iterator
import contextlib
import shutil
from typing import Any

_NAMES = ('chromium', 'chromium-browser', 'google-chrome')
# The pages load nothing from a network, and the browser should not either.
_FLAGS = (
  '--no-sandbox --disable-gpu --disable-quic --no-first-run '
  '--disable-background-networking --disable-component-update --disable-sync'
).split()


class Missing(Exception):
  """Raised if a program or a package is missing; the message is one line."""


@contextlib.contextmanager
def started() -> Iterator[Any]:
  """Starts the browser, yields it as an object of playwright, and closes it.

  Raises:
    Missing: if Chromium or playwright is not installed.
  """
  path = next((p for name in _NAMES if (p := shutil.which(name))), None)
  if path is None:
    raise Missing('needs Chromium: apt-get install chromium')
  try:
    from playwright import sync_api
  except ImportError as error:
    raise Missing('needs the Python package playwright') from error
  with sync_api.sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=path, args=_FLAGS)
    yield browser
    browser.close()
