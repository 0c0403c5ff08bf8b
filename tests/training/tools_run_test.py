"""Runs in which tools are called: the calculator, and a real MCP server's."""

import pathlib
import sys

import pytest

from stppo_jax import __main__
from tests.training import runs

_CHANGES = {
  'num_steps': 2,
  'data__name': 'arithmetic',
  'env__name': 'tools',
  'env__max_turns': 1,
  'env__rewards__format': 0.5,
  'evaluate__every': 2,
  'sft__before_training': True,
  'sft__num_steps': 2,
}
_SERVER = pathlib.Path(__file__).parents[1] / 'envs' / 'mcp_server.py'


@pytest.mark.slow
def test_a_run_starts_from_calls_of_the_calculator(tmp_path, capsys):
  assert runs.train(tmp_path / 'run', **_CHANGES) == 0
  printed = capsys.readouterr().out
  assert 'step 2/2  loss' in printed
  assert f'start: the supervised start in {tmp_path}/run/start' in printed
  lines = runs.metrics(tmp_path / 'run')
  assert [line['step'] for line in lines] == [0, 1, 2]
  assert 'env/number_of_tool_calls' in lines[1]
  assert 'val/em/arithmetic' in lines[-1]
  assert not any(name.startswith('retrieval/') for name in lines[1])


def test_a_training_step_calls_an_mcp_server(tmp_path):
  pytest.importorskip('mcp')
  log = tmp_path / 'calls'
  command = f'{sys.executable} {_SERVER} --log {log}'
  changes = {
    'env__tools__names': '()',
    'env__tools__mcp_servers': f'("{command}",)',
    'env__tools__timeout': 60.0,
  }
  command = ['sft', *runs.flags(**_CHANGES | changes)]
  assert __main__.main([*command, f'--workdir={tmp_path / "run"}']) == 0
  # The two steps have eight dialogues each; some do not call.
  expressions = log.read_text(encoding='utf-8').splitlines()
  assert 8 <= len(expressions) <= 16
  assert all(len(expression.split()) == 3 for expression in expressions)
