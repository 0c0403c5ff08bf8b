"""Removes secrets from texts that are written to files or passed on."""

from collections.abc import Mapping
import re
from typing import Any

# A value in the syntax of a shell: with or without quotes, which may themselves
# be escaped.
_VALUE = (
  r'(?:\\"[^"]*"|\\\'[^\']*\'|"(?:\\.|[^"\\])*"|\'[^\']*\''
  r'|(?:\\?["\'])?[^\s"\'&]+)'
)
# Patterns and replacements for a password in an address, an Authorization
# header, and a secret in a flag or a parameter.
_SECRET_TEXTS = (
  (re.compile(r'(//)[^/@\s"]+@'), r'\1***@'),
  (
    re.compile(
      r'(authorization\s*[:=]\s*(?:(?:basic|bearer|token)\s+)?|\bbearer\s+)'
      r'[^\s"\'\\,]+',
      re.IGNORECASE,
    ),
    r'\1***',
  ),
  (
    re.compile(
      r'(--[\w-]*(?:token|secret|key|password)[\w-]*[= ]\s*'
      rf'|(?:(?:token|secret|api_?key|password)[\w-]*|key)=){_VALUE}',
      re.IGNORECASE,
    ),
    r'\1***',
  ),
)


def scrubbed(text: str) -> str:
  """Returns a text without the secrets that it contains.

  Secrets are passwords in addresses, the credentials of an Authorization
  header, and the values of flags and parameters whose names mean a secret.
  """
  for pattern, replacement in _SECRET_TEXTS:
    text = pattern.sub(replacement, text)
  return text


def scrubbed_values(value: Any) -> Any:
  """Returns a config value with the secrets removed from all its texts.

  Call this function before the texts are quoted, because the patterns may not
  match quoted texts.
  """
  if isinstance(value, str):
    return scrubbed(value)
  if isinstance(value, Mapping):
    return {key: scrubbed_values(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(scrubbed_values(x) for x in value)
  return value


def scrubbed_plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the scrubbed values of a config as numbers, texts and booleans.

  A value of another type becomes a text.
  """
  return {
    key: x if isinstance(x, int | float) else str(x)
    for key, x in scrubbed_values(config).items()
  }
