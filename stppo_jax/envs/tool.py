"""The protocol of a tool that the policy can call."""

from collections.abc import Mapping
from typing import Any
from typing import Protocol


class ToolError(Exception):
  """A call that failed through the policy's fault; it reads the message.

  Bad arguments are such a fault, and so is a program that hangs or crashes
  because of what it was asked to do.
  """


class ToolUnavailable(Exception):
  """A call that the infrastructure failed; its trajectory has no weight."""


class Tool(Protocol):
  """A function that the policy can call by name.

  Attributes:
    description: the function as chat templates expect it,
      `{'type': 'function', 'function': {'name', 'description', 'parameters'}}`,
      whose parameters are a JSON schema.
  """

  @property
  def description(self) -> Mapping[str, Any]: ...

  async def call(self, arguments: Mapping[str, Any]) -> str:
    """Returns what the tool answers.

    Raises:
      ToolError: the call itself is at fault.
      ToolUnavailable: the tool cannot be reached.
    """
    ...


def describe(
  name: str, description: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the description of a tool."""
  function = {
    'name': name,
    'description': description,
    'parameters': dict(parameters),
  }
  return {'type': 'function', 'function': function}
