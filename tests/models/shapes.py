"""Sizes of the arrays in a compiled program."""

import math
import re


def largest(program) -> int:
  """Returns the most elements of a float array in the text of a program."""
  sizes = [
    math.prod(int(n) for n in shape.split(','))
    for shape in re.findall(r'\b(?:f32|bf16)\[([\d,]+)\]', program.as_text())
  ]
  return max(sizes)
