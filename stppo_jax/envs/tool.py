"""The protocol of a tool that the policy can call."""

from collections.abc import Mapping
from typing import Any, Protocol


class ToolError(Exception):
  """Raised if a call fails by the policy's fault; the policy reads the message.

  Bad arguments are the policy's fault, and so are arguments that make a program
  hang or crash.
  """


class ToolUnavailable(Exception):
  """Raised if the infrastructure fails; the trajectory then has no weight."""


class Tool(Protocol):
  """A function that the policy can call by name.

  Attributes:
    description: the function in the form that chat templates expect:
      `{'type': 'function', 'function': {'name', 'description', 'parameters'}}`.
      The parameters are a JSON schema.
  """

  @property
  def description(self) -> Mapping[str, Any]: ...

  async def call(self, arguments: Mapping[str, Any]) -> str:
    """Returns the answer of the tool.

    Raises:
      ToolError: if the call fails by the policy's fault.
      ToolUnavailable: if the tool cannot be reached.
    """
    ...


def describe(
  name: str, description: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the description of a tool in the form of `Tool.description`."""
  function = {
    'name': name,
    'description': description,
    'parameters': dict(parameters),
  }
  return {'type': 'function', 'function': function}
