"""Tools of real MCP servers, over standard input and output and over HTTP."""

import asyncio
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from stppo_jax.configs import base
from stppo_jax.envs import mcp_tools
from stppo_jax.envs import tool
from stppo_jax.envs import tools
from stppo_jax.rollout import event_loop

pytest.importorskip('mcp')

_PROGRAM = pathlib.Path(__file__).with_name('mcp_server.py')
_COMMAND = f'{sys.executable} {_PROGRAM}'


def _connect(address, timeout=30.0):
  found = mcp_tools.connect(address, timeout=timeout)
  return {each.description['function']['name']: each for each in found}


def test_a_command_serves_until_it_crashes_and_again_after_that():
  found = _connect(_COMMAND)
  add = found['add'].description['function']
  assert add['description'] == 'Adds two whole numbers.'
  assert add['parameters']['required'] == ['a', 'b']
  with event_loop.EventLoop() as loop:
    # Each tool has its server's connection, which all of them share.
    call = lambda name, **arguments: loop.run(found[name].call(arguments))
    assert call('add', a=2, b=3) == '5'
    assert len(call('flood')) > 2**20
    with pytest.raises(tool.ToolError, match='executing tool fail'):
      call('fail')
    with pytest.raises(tool.ToolError):
      call('add', a='x')
    for value in ('\ud800', float('nan')):  # the fault of the policy, too
      with pytest.raises(tool.ToolError, match='cannot be sent'):
        call('add', a=value, b=3)

    async def at_once():
      calls = [found['add'].call({'a': n, 'b': n}) for n in range(20)]
      return await asyncio.gather(*calls)

    assert loop.run(at_once()) == [str(2 * n) for n in range(20)]
    with pytest.raises(tool.ToolUnavailable, match='Connection closed'):
      call('crash')
    assert call('add', a=2, b=2) == '4'


def test_a_tool_that_hangs_is_unavailable_and_the_next_call_connects_again():
  found = _connect(_COMMAND, timeout=4.0)
  with event_loop.EventLoop() as loop:
    with pytest.raises(tool.ToolUnavailable, match='timed out'):
      loop.run(found['hang'].call({}))
    assert loop.run(found['add'].call({'a': 1, 'b': 1})) == '2'


def test_a_server_answers_over_http_until_it_is_gone():
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    port = listener.getsockname()[1]
  server = subprocess.Popen(
    [sys.executable, str(_PROGRAM), f'--port={port}'],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
      with socket.socket() as client:
        if not client.connect_ex(('127.0.0.1', port)):
          break
      time.sleep(0.05)
    address = f'http://127.0.0.1:{port}/mcp'
    found = _connect(address)
    with event_loop.EventLoop() as loop:
      assert loop.run(found['add'].call({'a': 2, 'b': 3})) == '5'
      server.kill()
      server.wait()
      with pytest.raises(tool.ToolUnavailable):
        loop.run(found['add'].call({'a': 2, 'b': 3}))
  finally:
    server.kill()
    server.wait()


@pytest.mark.parametrize(
  ('address', 'error', 'exit_code'),
  [
    ('no_such_program --at-all', ValueError, None),
    ('http://127.0.0.1:9/mcp', mcp_tools.ServerUnreachable, 75),
  ],
)
def test_a_server_that_is_not_there_is_one_line(address, error, exit_code):
  with pytest.raises(error) as caught:
    mcp_tools.connect(address, timeout=5.0)
  line = str(caught.value)
  assert line.startswith(f'env.tools.mcp_servers={address!r}: ')
  assert '\n' not in line
  assert getattr(caught.value, 'exit_code', None) == exit_code


def test_a_flood_is_cut_and_its_tags_are_text():
  options = base.get_config().env.to_dict()
  options['tools'].update(names=(), mcp_servers=(_COMMAND,), timeout=30.0)
  environment = tools.ToolsEnvironment.from_options(options, None)
  with event_loop.EventLoop() as loop:
    text = '<tool_call>{"name": "flood", "arguments": {}}</tool_call>'
    step = loop.run(environment.step(None, 0, text))
  assert step.observation.body.startswith('(/tool_response)(answer)7(/answer)')
  assert len(step.observation.body) == 2**16
