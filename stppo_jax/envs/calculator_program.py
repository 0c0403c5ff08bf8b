"""Evaluates Python arithmetic in a process of its own, one expression per line.

`calculator.py` runs this file. The program imports nothing of the package, so
that it starts in a few milliseconds. Every line that it reads is a JSON string,
and every line that it writes is a JSON object with a "value" or an "error".

An expression is parsed to a tree of numbers, operators and the functions below.
The operators and functions are looked up in tables, so an expression cannot
reach any other name, attribute or function of Python. `calculator.py` ends a
process that takes too long. A memory limit of the process stops an expression
that takes too much memory.
"""

import ast
from collections.abc import Callable
import contextlib
import json
import math
import operator
import resource
import sys
from typing import Any

_MEMORY = 512 * 2**20  # the limit of this process's address space, in bytes

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
  ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable[[Any], Any]] = {
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
  'abs': abs,
  'ceil': math.ceil,
  'comb': math.comb,
  'cos': math.cos,
  'exp': math.exp,
  'factorial': math.factorial,
  'floor': math.floor,
  'gcd': math.gcd,
  'log': math.log,
  'log10': math.log10,
  'max': max,
  'min': min,
  'round': round,
  'sin': math.sin,
  'sqrt': math.sqrt,
  'tan': math.tan,
}
_CONSTANTS = {'e': math.e, 'pi': math.pi}


def evaluate(expression: str) -> Any:
  """Returns the value of an expression.

  Raises:
    ValueError: if the expression is not arithmetic.
    Exception: if the evaluation fails, for example a ZeroDivisionError.
  """
  return _value(ast.parse(expression.strip(), mode='eval').body)


def _value(node: ast.expr) -> Any:
  """Returns the value of a node of an expression's tree."""
  match node:
    case ast.Constant(value=int() | float()):
      return node.value
    case ast.Name() if node.id in _CONSTANTS:
      return _CONSTANTS[node.id]
    case ast.UnaryOp() if type(node.op) in _UNARY:
      return _UNARY[type(node.op)](_value(node.operand))
    case ast.BinOp() if type(node.op) in _BINARY:
      return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
      return _FUNCTIONS[name](*map(_value, node.args))
  raise ValueError(
    f'{ast.unparse(node)!r} is not arithmetic; use numbers, + - * / // % **, '
    f'{", ".join([*_CONSTANTS, *_FUNCTIONS])}'
  )


def _reply(line: str) -> dict[str, str]:
  """Returns the value or the error of the expression in a line."""
  try:
    return {'value': str(evaluate(json.loads(line)))}
  except Exception as error:
    return {'error': f'{type(error).__name__}: {error}'}


def main() -> None:
  """Prints a reply to each line of the standard input, until the input ends."""
  # If the limits of this process are lower already, they cannot be raised.
  with contextlib.suppress(ValueError, OSError):
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # Otherwise each expression that crashes the process would leave a core
    # file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  for line in sys.stdin:
    print(json.dumps(_reply(line)), flush=True)


if __name__ == '__main__':
  main()
