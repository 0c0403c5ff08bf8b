"""Additions of environments, dialects, models and keys that tests make."""

import pathlib
import textwrap
from typing import NamedTuple

from tests import pages


class Insertion(NamedTuple):
  """Code that goes behind a line of a file; a new file if there is no line.

  It is indented like the line, or one level more if the line opens a table.
  """

  path: str
  line: str
  code: str

  def apply(self, root: pathlib.Path) -> None:
    path = root / self.path
    code = textwrap.dedent(self.code).strip() + '\n'
    if not self.line:
      assert not path.exists(), f'{self.path} exists already'
      path.write_text(code, encoding='utf-8')
      return
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    (found,) = [i for i, x in enumerate(lines) if x.strip() == self.line]
    line = lines[found]
    indent = len(line) - len(line.lstrip()) + 2 * line.endswith('{\n')
    lines.insert(found + 1, textwrap.indent(code, ' ' * indent))
    path.write_text(''.join(lines), encoding='utf-8')


class Addition(NamedTuple):
  """Code that a person inserts, and a program that uses it.

  Attributes:
    insertions: the code that a person writes.
    program: a program that raises unless the addition works.
    documented: whether its pages and records have to be generated.
  """

  insertions: tuple[Insertion | pages.Step, ...]
  program: str
  documented: bool = False


ENVIRONMENT = Addition(
  tuple(
    step
    for step in pages.steps('adding_an_environment')
    if step.path.startswith('stppo_jax')
  ),
  """
  from stppo_jax import types
  from stppo_jax.commands.flags import configuration
  from stppo_jax.envs import environments
  from tests.rollout import dialogues

  flags = ['--config=configs/base.py', '--config.env.name=guess']
  flags.append('--config.env.max_turns=2')
  config = configuration.parse(flags)
  kind = environments.find(config.env.name)
  say = lambda *texts: [f'<answer>{text}</answer>' for text in texts]
  trajectories = dialogues.collect_scripts(
    [say('5', '9', '7'), say('x', '8', '8')],
    kind.from_options(config.env.to_dict(), None),
    [types.Question('1', 'Below ten.', ('7',), 'numbers')],
    group_size=2,
    max_length=300,
  )
  assert [t.rewards['guessed'] for t in trajectories] == [1.0, 0.0]
  hints = [dialogues.Letters().decode(turn.observation_ids)
           for turn in trajectories[0].turns]
  assert hints == ['\\nIt is larger.\\n', '\\nIt is smaller.\\n', '']
  assert trajectories[1].turns[0].action == 'invalid'
  assert kind.statistics(trajectories) == {'env/number_of_guesses': 3.0}
  """,
)

DIALECT = Addition(
  (
    Insertion(
      'stppo_jax/retrieval/dialects.py',
      'DIALECTS: Mapping[str, Dialect] = {',
      """
        'find': dataclasses.replace(
          _SEARCH_R1, path='/find', queries='find', topk='at_most', scores=''
        ),
      """,
    ),
  ),
  """
  import json
  from stppo_jax.commands.flags import configuration
  from stppo_jax.retrieval import dialects

  flags = ['--config=configs/base.py', '--config.retrieval.dialect=find']
  flags.append('--config.retrieval.url=http://localhost:1')
  config = configuration.parse(flags)
  dialect = dialects.DIALECTS[config.retrieval.dialect]
  assert dialect.body(['lake 7'], 2) == {'find': ['lake 7'], 'at_most': 2}
  document = {'id': '7', 'contents': '"Lake 7"\\nIt is 7 km long.'}
  reply = json.dumps({'result': [[{'document': document, 'score': 0.5}]]})
  ((passage,),) = dialect.read(reply.encode(), 1)
  assert (passage.title, passage.score) == ('Lake 7', 0.5)
  """,
)

MODEL = Addition(
  tuple(pages.steps('adding_a_model_family')),
  """
  from stppo_jax.models.hf import config_json
  from stppo_jax.models.hf import families

  hf = {
    'model_type': 'seed_oss',
    'vocab_size': 16,
    'hidden_size': 8,
    'intermediate_size': 16,
    'num_hidden_layers': 1,
    'num_attention_heads': 2,
    'attention_out_bias': True,
  }
  options = {'dtype': 'float32', 'remat': 'none', 'scan_unroll': 1}
  config = config_json.read(hf, **options)
  assert config.qkv_bias and config.o_bias and config.head_dim == 128
  written = config_json.write(config)
  assert hf.items() <= written.items() and written['attention_bias']
  tensors = {entry.hf_name for entry in families.entries(config)}
  names = ('q_proj.bias', 'o_proj.bias', 'q_norm.weight')
  found = [f'model.layers.0.self_attn.{name}' in tensors for name in names]
  assert found == [True, True, False]
  hf['attention_out_bias'] = 'yes'
  try:
    config_json.read(hf, **options)
  except ValueError as error:
    assert "attention_out_bias='yes': must be" in str(error)
  else:
    raise AssertionError('the field was not checked')
  """,
)

KEY = Addition(
  (
    Insertion(
      'configs/base.py',
      "'name': 'search',  # a key of ENVIRONMENTS in envs/environments.py",
      "'greeting': 'hi',  # printed before the configuration\n",
    ),
    Insertion(
      'configs/schema.py',
      "'env.max_turns': _asked(rules.NOT_NEGATIVE),",
      "'env.greeting': Key(settings.Rule(str.islower, 'lower case')),\n",
    ),
    Insertion(
      'stppo_jax/commands/config.py',
      'config = configuration.parse(argv)',
      'print(config.env.greeting)\n',
    ),
  ),
  """
  import contextlib
  import io
  from stppo_jax import exits
  from stppo_jax.commands import config
  from stppo_jax.commands.flags import configuration

  flags = ['--config=configs/base.py', '--config.env.greeting=hello']
  with contextlib.redirect_stdout(io.StringIO()) as output:
    config.main(flags)
  lines = output.getvalue().splitlines()
  assert lines[0] == 'hello' and "env.greeting = 'hello'" in lines
  try:
    config.main([*flags, '--config.env.greeting=GOOD'])
  except exits.Misconfigured as error:
    assert 'env.greeting' in str(error) and 'lower case' in str(error)
  else:
    raise AssertionError('the rule was not checked')
  """,
)
