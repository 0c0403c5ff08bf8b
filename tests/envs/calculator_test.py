"""The calculator's processes evaluate arithmetic and survive what it asks."""

import asyncio
import os
import signal
import subprocess

from hypothesis import given
from hypothesis import strategies as st

from stppo_jax.envs import calculator
from stppo_jax.envs import calculator_program
from stppo_jax.envs import tool
from stppo_jax.rollout import event_loop


def _call(expressions, timeout=20.0):
  """Returns what the calculator answers to each, one after another."""
  pocket = calculator.Calculator(timeout=timeout)

  async def ask(expression):
    try:
      return await pocket.call({'expression': expression})
    except tool.ToolError as error:
      return error

  with event_loop.EventLoop() as loop:
    return [loop.run(ask(expression)) for expression in expressions]


def test_values_and_errors_come_from_a_process():
  answers = _call(
    [
      '12 * (3 + 4)',
      ' 7 // 2 - -1\n',
      'max(2, round(sqrt(17), 3))',
      '1 / 0',
      '2 +',
      '__import__("os").getcwd()',
      '(1).real',
      '"a" * 3',
      '9' * 1001,
    ]
  )
  assert answers[:3] == ['84', '4', '4.123']
  reasons = [str(answer) for answer in answers[3:]]
  assert all(isinstance(answer, tool.ToolError) for answer in answers[3:])
  assert reasons[0] == 'ZeroDivisionError: division by zero'
  assert reasons[1].startswith('SyntaxError')
  for reason in reasons[2:5]:
    assert 'is not arithmetic; use numbers, + - * / // % **, e, pi' in reason
  assert reasons[5] == 'the expression has more than 1000 characters'


def test_hanging_hungry_and_endless_results_are_errors_of_the_call():
  answers = _call(
    ['9**9**9**9', '10**20000', 'factorial(10**9) * 2', '1 + 1'], timeout=0.5
  )
  assert str(answers[0]) == 'no result after 0.5 seconds'
  assert 'Exceeds the limit' in str(answers[1])  # of digits
  assert isinstance(answers[2], tool.ToolError)
  assert answers[3] == '2'


def _children():
  """Returns the process ids of the calculators that this process started."""
  listed = subprocess.run(
    ['ps', '-o', 'pid=,args=', '--ppid', str(os.getpid())],
    capture_output=True,
    text=True,
  ).stdout
  return [
    int(line.split()[0])
    for line in listed.splitlines()
    if 'calculator_program' in line
  ]


def test_a_killed_process_is_replaced_and_none_is_left_behind():
  pocket = calculator.Calculator(timeout=20.0)
  with event_loop.EventLoop() as loop:
    assert loop.run(pocket.call({'expression': '1 + 1'})) == '2'
    for child in _children():
      os.kill(child, signal.SIGKILL)
    outcomes = []
    for _ in range(4):  # the process may still be dying in the first
      try:
        outcomes.append(loop.run(pocket.call({'expression': '2 + 2'})))
      except tool.ToolError as error:
        outcomes.append(str(error))
    assert outcomes[-1] == '4'
    assert set(outcomes) <= {'4', 'the calculation crashed'}
  assert not _children()


def test_calls_are_answered_at_the_same_time():
  pocket = calculator.Calculator(timeout=20.0)

  async def ask():
    calls = [pocket.call({'expression': f'{n} * 2'}) for n in range(200)]
    return await asyncio.gather(*calls)

  with event_loop.EventLoop() as loop:
    assert loop.run(ask()) == [str(2 * n) for n in range(200)]


_TREES = st.recursive(
  st.integers(0, 99).map(str),
  lambda inner: st.tuples(inner, st.sampled_from('+-*'), inner).map(
    lambda parts: f'({" ".join(parts)})'
  ),
  max_leaves=8,
)


@given(_TREES)
def test_values_are_those_of_python(expression):
  expected = eval(expression, {'__builtins__': {}})  # noqa: S307
  assert calculator_program.evaluate(expression) == expected
