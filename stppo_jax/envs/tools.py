"""Question answering with a calculator and with tools of MCP servers."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import re
from typing import Any, Self

from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.envs import actions
from stppo_jax.envs import calculator
from stppo_jax.envs import mcp_tools
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards as rewards_lib
from stppo_jax.envs import tool as tool_lib
from stppo_jax.retrieval import protocol as retrieval

# The built-in tools: the choices of `env.tools.names`.
TOOLS = {'calculator': calculator.Calculator}

Status = types.TrajectoryStatus

REWARD_NAMES = ('exact_match', 'substring_match', 'f1', 'format')
STOP_STRINGS: tuple[str, ...] = ('</tool_call>', '</answer>')

# Llama writes this token before a call without tags.
_PYTHON_TAG = '<|python_tag|>'
_END_OF_TURN = re.compile(r'(?:\s|<\|[a-z_]+\|>|</s>)*')
_TAG_NAMES = ('think', 'answer', 'tool_call', 'tool_response')
_RESPONSE = ('\n<tool_response>\n', '\n</tool_response>\n')
_CALL = '{"name": "...", "arguments": {...}}'
_CORRECTION = (
  f'No valid action. Write <tool_call>{_CALL}</tool_call> to call a tool, or '
  'the answer inside <answer> and </answer>.'
)
# Longer output of a tool is cut before tags are sought in it and before it is
# tokenised, because both would take long. `env.max_observation_tokens` usually
# cuts an observation to a shorter text than this anyway.
_MAX_OUTPUT_CHARS = 65536

# The prompt describes the tools. The chat template of a model may describe them
# a second time.
BUILT_IN = f"""\
Answer the question at the end of this message. You may call these tools:
{{tools}}
First reason inside <think> and </think>. To call a tool, write \
<tool_call>{_CALL}</tool_call>: its result then appears between \
<tool_response> and </tool_response>. Once you know the answer, give it \
without any explanation inside the answer tag, for example \
<answer> Lake Victoria </answer>.
Question: {prompts.PLACEHOLDER}
"""


class ToolsEnvironment(protocol.Environment):
  """Answers at most `max_turns` calls; one more turn may give the answer.

  The scores are `rewards.SCORE_NAMES`.
  """

  stop_strings = STOP_STRINGS
  tags = tuple(f'<{slash}{n}>' for n in _TAG_NAMES for slash in ('', '/'))
  main_score = rewards_lib.EXACT_MATCH

  def __init__(
    self,
    *,
    tools: Sequence[tool_lib.Tool],
    max_turns: int,
    prompt_template: str,
    rewards: Mapping[str, float],
  ):
    """Makes an environment.

    Args:
      tools: the tools that the policy can call.
      max_turns: the largest number of calls per question.
      prompt_template: a file that contains `{question}`. If it also contains
        `{tools}`, this is replaced by a line for each tool. '' for the built-in
        prompt.
      rewards: the weight of each of REWARD_NAMES.

    Raises:
      ValueError: if two tools have the same name, or the file of the prompt
        cannot be used.
    """
    self.tools = tuple(tool.description for tool in tools)
    # A call names a tool but no server, so the names of all tools must differ.
    names = [description['function']['name'] for description in self.tools]
    for name in names:
      if names.count(name) > 1:
        raise ValueError(f'two tools have the name {name!r}')
    self._tools = dict(zip(names, tools))
    self._max_turns = max_turns
    template = prompts.load_template(prompt_template, BUILT_IN)
    self._template = template.replace('{tools}', _lines(self.tools))
    self._weights = {name: rewards[name] for name in REWARD_NAMES}

  @classmethod
  def from_options(
    cls, options: Mapping[str, Any], retriever: retrieval.Retriever | None
  ) -> Self:
    """See `protocol.Environment`; asks the MCP servers for their tools.

    Raises:
      ValueError: if an option has a bad value, or the command of a server
        fails.
      mcp_tools.ServerUnreachable: if no server answers at an address.
    """
    del retriever
    chosen = options['tools']
    tools: list[tool_lib.Tool] = [
      TOOLS[name](timeout=chosen['timeout']) for name in chosen['names']
    ]
    for address in chosen['mcp_servers']:
      tools += mcp_tools.connect(address, timeout=chosen['timeout'])
    return cls(
      tools=tools,
      max_turns=options['max_turns'],
      prompt_template=options['prompt_template'],
      rewards=options['rewards'],
    )

  @staticmethod
  def phrases(vocabulary: Sequence[str]) -> list[str]:
    """See `protocol.Environment`.

    The strings are tags, parts of calls and of replies, `vocabulary` and the
    correction.
    """
    calls = [
      f'{{"name": "{name}", "arguments": {{"{argument}": "'
      for name, kind in TOOLS.items()
      for argument in kind.description['function']['parameters']['required']
    ]
    tags = ToolsEnvironment.tags
    return [*tags, *_RESPONSE, *calls, '"}}', *vocabulary, _CORRECTION]

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns the mean number of calls of a trajectory."""
    return {
      'env/number_of_tool_calls': protocol.mean_turns(trajectories, 'tool')
    }

  def prompt(self, question: types.Question) -> str:
    """See `protocol.Environment`."""
    return prompts.fill(self._template, question)

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> protocol.Step:
    """See `protocol.Environment`.

    If a call fails by the policy's fault, the policy reads the error. If a tool
    cannot be reached, the trajectory ends with INFRA_ERROR. If a turn after
    `max_turns` turns does not answer, the trajectory ends with TRUNCATED_TURNS.
    """
    del question
    action, content = parse(text)
    if action == 'answer':
      return protocol.Step('answer', None, Status.COMPLETED)
    if turn_index >= self._max_turns:
      return protocol.Step(action, None, Status.TRUNCATED_TURNS)
    if not isinstance(content, Call):
      correction = protocol.Observation(f'\n{_CORRECTION}\n', '', '')
      return protocol.Step(protocol.INVALID, correction, None)
    if content.name not in self._tools:
      choices = ', '.join(self._tools) or 'none'
      line = f'Error: no tool {content.name!r}; choices: {choices}'
      return protocol.Step(protocol.INVALID, _response(line), None)
    try:
      output = await self._tools[content.name].call(content.arguments)
    except tool_lib.ToolError as error:
      output = f'Error: {error}'
    except tool_lib.ToolUnavailable as error:
      return protocol.Step('tool', None, Status.INFRA_ERROR, cause=str(error))
    return protocol.Step('tool', _response(output), None)

  def rewards(
    self,
    question: types.Question,
    prompt: str,
    texts: Sequence[str],
    status: Status,
  ) -> tuple[dict[str, float], dict[str, float]]:
    """See `protocol.Environment`; the rewards are REWARD_NAMES.

    The score `format` is 1 if the last turn answers and every earlier turn
    calls a tool.
    """
    del prompt
    scores = dict.fromkeys(rewards_lib.SCORE_NAMES, 0.0)
    turns = [parse(text) for text in texts]
    answered = bool(turns) and turns[-1][0] == 'answer'
    if answered and status is not Status.INFRA_ERROR:
      scores |= rewards_lib.answer_scores(question, str(turns[-1][1]))
      kinds = {action for action, _ in turns[:-1]}
      scores['format'] = float(kinds <= {'tool'})
    return rewards_lib.weighted(self._weights, scores), scores


def _response(output: str) -> protocol.Observation:
  """Returns a tool's output as an observation.

  A tag of a dialogue in the output, such as <answer>, gets round brackets:
  (answer).
  """
  return protocol.Observation(
    prefix=_RESPONSE[0],
    body=text_lib.neutralise_tags(output[:_MAX_OUTPUT_CHARS]),
    suffix=_RESPONSE[1],
  )


def _lines(descriptions: Sequence[Mapping[str, Any]]) -> str:
  """Returns a line for each tool: its name, its purpose and its parameters."""
  lines = []
  for description in descriptions:
    function = description['function']
    parameters = json.dumps(function['parameters'].get('properties', {}))
    purpose = ' '.join(function['description'].split())
    lines.append(f'- {function["name"]}: {purpose} Arguments: {parameters}')
  # MCP servers write these texts, which must not contain our own tags.
  return text_lib.neutralise_tags('\n'.join(lines))


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a tool: its name and its arguments by name."""

  name: str
  arguments: Mapping[str, Any]


def parse(text: str) -> tuple[str, Call | str]:
  """Returns the action of a turn, and the call or the answer in it.

  A call is the JSON object {"name", "arguments"} in a <tool_call> element, as
  Hermes and Qwen write it, or a turn that holds only such an object, as Llama
  writes it. Llama's name for the arguments, "parameters", is accepted too.

  Returns:
    ('tool', the call), ('answer', the text) or (`protocol.INVALID`, '').
  """
  action = actions.parse_action(text, ('tool_call', 'answer'))
  if action.kind == 'answer':
    return 'answer', action.content
  if action.kind == 'tool_call':
    call = _call(action.content, '')
  else:
    call = _call(text.strip().removeprefix(_PYTHON_TAG), _END_OF_TURN)
  return ('tool', call) if call else (protocol.INVALID, '')


def _call(text: str, rest: str | re.Pattern[str]) -> Call | None:
  """Returns the call at the start of a text.

  Args:
    text: the text that begins with the JSON object of a call.
    rest: a pattern for the text after the call.

  Returns:
    The call; None if there is no call, or other text follows.
  """
  text = text.lstrip()
  try:
    # Unlike `loads`, `raw_decode` allows text after the JSON object, such as an
    # end-of-turn token.
    fields, end = json.JSONDecoder().raw_decode(text)
  except (ValueError, RecursionError):
    return None
  if not re.fullmatch(rest, text[end:]) or not isinstance(fields, dict):
    return None
  name = fields.get('name')
  arguments = fields.get('arguments', fields.get('parameters', {}))
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  return Call(name, arguments)
