"""Runs `serve` in this process while a thread uses it."""

import json
import os
import signal
import threading
import time
from urllib import request

from stppo_jax.commands import serve


def post(url, body):
  """Returns the JSON values of the reply to a body."""
  data = json.dumps(body).encode()
  with request.urlopen(request.Request(url, data), timeout=60) as reply:
    return json.load(reply)


def run(capsys, flags, use, *, number=signal.SIGTERM):
  """Serves until `use(url)` returns, then sends a signal; 0 is none.

  Returns:
    (the printed URL, what `use` returned for it).
  """
  found = []

  def use_and_end():
    url = ''
    while not url.endswith('\n'):  # printed once it is ready
      time.sleep(0.01)
      url += capsys.readouterr().out
    try:
      found.append((url, use(url.strip())))
    finally:
      os.kill(os.getpid(), number)

  user = threading.Thread(target=use_and_end, daemon=True)
  user.start()
  assert serve.main([*flags, '--port=0']) == 0
  user.join()
  assert capsys.readouterr() == ('', '')
  return found[0]
