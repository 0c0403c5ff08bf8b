"""A tool that evaluates Python arithmetic in processes of its own.

The processes are reused, because the start of a process takes longer than most
calculations. A process that hangs or crashes is killed. The call that made it
hang or crash fails as a mistake of the policy (`tool.ToolError`), and the next
call gets a new process.
"""

import asyncio
import asyncio.subprocess
from collections.abc import Mapping
import json
import pathlib
import sys
from typing import Any

from stppo_jax.envs import tool

_PROGRAM = pathlib.Path(__file__).with_name('calculator_program.py')
_PROCESSES = 2  # the number of expressions that are evaluated at the same time
_MAX_EXPRESSION_CHARS = 1000


class Calculator:
  """A `tool.Tool` that evaluates arithmetic expressions.

  All calls must be made on one event loop. The processes end when that loop
  cancels its tasks.

  Args:
    timeout: the seconds that the evaluation of an expression may take.
  """

  description = tool.describe(
    'calculator',
    'Evaluates an arithmetic expression in Python syntax.',
    {
      'type': 'object',
      'properties': {
        'expression': {
          'type': 'string',
          'description': 'The expression, such as 12 * (3 + 4).',
        }
      },
      'required': ['expression'],
    },
  )

  def __init__(self, *, timeout: float):
    self._timeout = timeout
    self._calls: asyncio.Queue[tuple[str, asyncio.Future[str]]] | None = None
    self._workers: list[asyncio.Task] = []

  async def call(self, arguments: Mapping[str, Any]) -> str:
    """See `tool.Tool`."""
    expression = arguments.get('expression')
    if not isinstance(expression, str):
      raise tool.ToolError('calculator needs the text "expression"')
    if len(expression) > _MAX_EXPRESSION_CHARS:
      raise tool.ToolError(
        f'the expression has more than {_MAX_EXPRESSION_CHARS} characters'
      )
    # Only a running event loop can create tasks, so the first call creates the
    # tasks that answer all calls.
    if self._calls is None:
      self._calls = asyncio.Queue()
      self._workers = [
        asyncio.create_task(self._work(self._calls)) for _ in range(_PROCESSES)
      ]
    answer = asyncio.get_running_loop().create_future()
    self._calls.put_nowait((expression, answer))
    return await answer

  async def _work(self, calls: asyncio.Queue) -> None:
    """Answers the queued calls, one at a time, until the task is cancelled."""
    process = None
    try:
      while True:
        expression, answer = await calls.get()
        try:
          process = process or await _start()
          result = await asyncio.wait_for(
            _ask(process, expression), self._timeout
          )
        except Exception as error:
          # The process is killed: after a timeout it may still reply, and this
          # late reply would be taken for the reply to the next call.
          process = await _end(process)
          result = self._failure(error)
        if answer.done():
          continue  # the caller was cancelled and waits for no answer
        if isinstance(result, Exception):
          answer.set_exception(result)
        else:
          answer.set_result(result)
    finally:
      await _end(process)

  def _failure(self, error: Exception) -> Exception:
    """Returns the exception that the caller gets if a call fails."""
    if isinstance(error, TimeoutError):
      return tool.ToolError(f'no result after {self._timeout:g} seconds')
    if isinstance(error, EOFError | ConnectionError):
      return tool.ToolError('the calculation crashed')
    return tool.ToolUnavailable(f'the calculator cannot be started: {error}')


async def _start() -> asyncio.subprocess.Process:
  return await asyncio.create_subprocess_exec(
    # Without site packages the process starts at once. Without environment
    # variables the process holds nothing that an expression should not see.
    *(sys.executable, '-I', '-S', str(_PROGRAM)),
    stdin=asyncio.subprocess.PIPE,
    stdout=asyncio.subprocess.PIPE,
    stderr=asyncio.subprocess.DEVNULL,
    env={},
  )


async def _ask(
  process: asyncio.subprocess.Process, expression: str
) -> str | tool.ToolError:
  """Returns the value of an expression, or the error of its evaluation."""
  assert process.stdin is not None and process.stdout is not None
  process.stdin.write(json.dumps(expression).encode() + b'\n')
  await process.stdin.drain()
  line = await process.stdout.readline()
  if not line:
    raise EOFError('the process has ended')
  reply = json.loads(line)
  return reply['value'] if 'value' in reply else tool.ToolError(reply['error'])


async def _end(process: asyncio.subprocess.Process | None) -> None:
  """Kills a process and waits until it has ended."""
  if process is None:
    return
  if process.returncode is None:
    process.kill()
  await process.communicate()
