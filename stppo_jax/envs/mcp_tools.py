"""Tools of servers that speak the Model Context Protocol (MCP).

A server is given as a command or as an address. A command is started, and its
standard input and output are the connection. An address is reached over HTTP.
The tools need the package `mcp`, which the extra `mcp` of this package
installs.
"""

import asyncio
from collections.abc import Mapping, Sequence
import functools
import json
import logging
import shlex
import sys
from typing import Any

from stppo_jax import exits
from stppo_jax.envs import tool

_log = logging.getLogger(__name__)


class ServerUnreachable(Exception):
  """Raised if no MCP server answers at an address; a later try may succeed."""

  exit_code = exits.TRY_AGAIN


class McpTool:
  """A `tool.Tool` of an MCP server.

  Args:
    server: the server that runs the tool.
    description: see `tool.Tool`.
  """

  def __init__(self, server: '_Server', description: Mapping[str, Any]):
    self.description = description
    self._server = server

  async def call(self, arguments: Mapping[str, Any]) -> str:
    """See `tool.Tool`.

    Arguments that the server refuses and errors that the tool reports are
    mistakes of the policy. A server that is gone, or does not answer within the
    timeout, is a failure of the infrastructure, and the next call connects
    again.
    """
    try:
      # The arguments are encoded here only as a check. Arguments that cannot be
      # encoded would break the connection, which all calls share.
      json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
      raise tool.ToolError(f'the arguments cannot be sent: {error}') from error
    return await self._server.call(
      self.description['function']['name'], dict(arguments)
    )


def connect(address: str, *, timeout: float) -> list[McpTool]:
  """Returns the tools of a server; the list is cached.

  Args:
    address: http://... or https://..., or a command such as 'python server.py'.
    timeout: the seconds that an answer of the server may take.

  Raises:
    ValueError: if the package `mcp` is missing, or the command fails; the
      message is one line.
    ServerUnreachable: if no server answers at an address.
  """
  server = _Server(address, timeout)
  return [McpTool(server, each) for each in _descriptions(address, timeout)]


@functools.cache
def _descriptions(address: str, timeout: float) -> Sequence[Mapping[str, Any]]:
  """Asks a server for its tools; returns the descriptions of the tools."""

  async def ask():
    async with _client(address, timeout) as client:
      page = await client.list_tools()
      tools = list(page.tools)
      while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return [
      tool.describe(each.name, each.description or '', each.input_schema)
      for each in tools
    ]

  try:
    return asyncio.run(ask())
  except ImportError as error:
    raise ValueError(
      f'env.tools.mcp_servers={address!r}: needs the package mcp: run '
      "pip install '.[mcp]' in the clone"
    ) from error
  except Exception as error:
    line = f'env.tools.mcp_servers={address!r}: {_reason(error)}'
    if _is_url(address):
      raise ServerUnreachable(line) from error
    raise ValueError(line) from error


class _Server:
  """The connection to a server, which the first call opens.

  After a failure, the next call opens a new connection. A task of its own holds
  the connection, because `mcp` requires that the task that opened a connection
  closes it. The task ends when the event loop cancels its tasks.
  """

  def __init__(self, address: str, timeout: float):
    self._address = address
    self._timeout = timeout
    self._client: asyncio.Future | None = None
    self._task: asyncio.Task | None = None

  async def call(self, name: str, arguments: dict[str, Any]) -> str:
    """Returns the text of a tool's result; see `tool.Tool`."""
    import mcp  # pyright: ignore[reportMissingImports]
    import mcp_types  # pyright: ignore[reportMissingImports]

    if self._client is None:
      self._client = asyncio.get_running_loop().create_future()
      self._task = asyncio.create_task(self._connect(self._client))
    connected = self._client
    try:
      # Without the shield, the cancellation of this call would also cancel the
      # future for which other calls wait.
      client = await asyncio.shield(connected)
      result = await client.call_tool(name, arguments)
    except mcp.MCPError as error:
      failures = (mcp_types.CONNECTION_CLOSED, mcp_types.REQUEST_TIMEOUT)
      if error.code not in failures:
        raise tool.ToolError(error.message) from error
      self._forget(connected)
      raise tool.ToolUnavailable(f'{self._address}: {error.message}') from error
    except Exception as error:
      self._forget(connected)
      reason = _reason(error)
      raise tool.ToolUnavailable(f'{self._address}: {reason}') from error
    text = '\n'.join(
      getattr(block, 'text', f'[{block.type}]') for block in result.content
    )
    if result.is_error:
      raise tool.ToolError(text)
    return text

  async def _connect(self, connected: asyncio.Future) -> None:
    """Connects, and holds the connection until the task is cancelled."""
    try:
      async with _client(self._address, self._timeout) as client:
        connected.set_result(client)
        await asyncio.Event().wait()
    except Exception as error:
      if connected.done():
        _log.warning('%s: %s', self._address, _reason(error))
      else:
        connected.set_exception(error)

  def _forget(self, connected: asyncio.Future) -> None:
    """Closes a failed connection, if no other call has closed it already."""
    if self._client is connected and self._task is not None:
      self._client = None
      self._task.cancel()


def _client(address: str, timeout: float):
  """Returns a client, a context manager that connects to a server on entry."""
  import mcp  # pyright: ignore[reportMissingImports]
  from mcp.client import stdio  # pyright: ignore[reportMissingImports]

  server = address
  if not _is_url(address):
    command, *arguments = shlex.split(address)
    parameters = mcp.StdioServerParameters(command=command, args=arguments)
    # The server's error output goes to the person who started the run.
    server = stdio.stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)
  return mcp.Client(server, read_timeout_seconds=timeout)


def _is_url(address: str) -> bool:
  return address.startswith(('http://', 'https://'))


def _reason(error: BaseException) -> str:
  """Returns a line about an error.

  If the error is an exception group, the line is about its first exception.
  """
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return ' '.join(f'{type(error).__name__}: {error}'.split())
