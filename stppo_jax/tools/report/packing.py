"""Packs data small and safe into a page.

Large parts are JSON that is compressed and written in base64, which a browser
unpacks when it needs them.
"""

import base64
import json
import math
from typing import Any
import zlib

_DIGITS = 6


def pack(content: bytes) -> str:
  """Returns compressed content as text of letters, digits, + / and =."""
  return base64.b64encode(zlib.compress(content, 6)).decode()


def pack_json(value: Any) -> str:
  """Returns a value as compressed JSON."""
  text = json.dumps(value, separators=(',', ':'), allow_nan=False)
  return pack(text.encode())


def script_json(value: Any) -> str:
  """Returns JSON that ends no script element, whatever texts are in it."""
  text = json.dumps(value, separators=(',', ':'), allow_nan=False)
  for character in '<>&':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text


def rounded(value: float | None) -> float | None:
  """Returns six digits of a number; None for none, and if it is not finite."""
  if value is None or not math.isfinite(value):
    return None
  return float(f'{value:.{_DIGITS}g}')
