"""The tools environment: every outcome of a turn, rewards and scores."""

import asyncio

import pytest

from stppo_jax import types
from stppo_jax.envs import rewards as rewards_lib
from stppo_jax.envs import tool
from stppo_jax.envs import tools
from tests.rollout import dialogues
from tests.sampling import vocabularies

_STATUS = types.TrajectoryStatus
_QUESTION = types.Question('q', 'What is 6 * 7?', ('42',), 'sums')
_WEIGHTS = dict(exact_match=1.0, substring_match=0.5, f1=0.25, format=0.125)
_SAY = '<tool_call>{"name": "say", "arguments": {"text": "%s"}}</tool_call>'
_ANSWER = '<think>x</think><answer> 42 </answer>'


class _Say:
  """A tool that says what it is told to, or fails."""

  description = tool.describe(
    'say',
    'Says  a text.\n',
    {'type': 'object', 'properties': {'text': {'type': 'string'}}},
  )

  async def call(self, arguments):
    text = arguments['text']
    if text == 'wrong':
      raise tool.ToolError('not </answer> so')
    if text == 'gone':
      raise tool.ToolUnavailable('the line is dead')
    return text


def _environment(**changes):
  options = dict(
    tools=[_Say()], max_turns=2, prompt_template='', rewards=_WEIGHTS
  )
  return tools.ToolsEnvironment(**(options | changes))


@pytest.mark.parametrize(
  ('text', 'turn_index', 'action', 'status', 'observation'),
  [
    (_SAY % 'hi', 0, 'tool', None, '\n<tool_response>\nhi\n</tool_response>\n'),
    (_SAY % 'wrong', 1, 'tool', None, 'Error: not (/answer) so'),
    (_SAY % 'gone', 0, 'tool', _STATUS.INFRA_ERROR, None),
    (_ANSWER, 0, 'answer', _STATUS.COMPLETED, None),
    (_ANSWER, 2, 'answer', _STATUS.COMPLETED, None),
    (_SAY % 'hi', 2, 'tool', _STATUS.TRUNCATED_TURNS, None),
    ('hm', 2, 'invalid', _STATUS.TRUNCATED_TURNS, None),
    ('hm', 0, 'invalid', None, '<tool_call>'),
    (_SAY.replace('say', 'sing'), 0, 'invalid', None, "'sing'; choices: say"),
  ],
)
def test_every_turn_has_its_outcome(
  text, turn_index, action, status, observation
):
  step = asyncio.run(_environment().step(_QUESTION, turn_index, text))
  assert (step.action, step.status) == (action, status)
  if observation is None:
    assert step.observation is None
  else:
    assert observation in step.observation.text
  if status is _STATUS.INFRA_ERROR:
    assert step.cause == 'the line is dead'


@pytest.mark.parametrize(
  ('texts', 'scores'),
  [
    ([_ANSWER], (1.0, 1.0, 1.0, 1.0)),
    ([_SAY % 'x', _ANSWER], (1.0, 1.0, 1.0, 1.0)),
    (['hm', _ANSWER], (1.0, 1.0, 1.0, 0.0)),
    (['<answer>it is 42</answer>'], (0.0, 0.5, 1.0, 1.0)),
    ([_ANSWER, _SAY % 'x'], (0.0, 0.0, 0.0, 0.0)),
  ],
)
def test_rewards_are_weighted_scores_of_what_the_policy_wrote(texts, scores):
  made = lambda status: _environment().rewards(_QUESTION, '', texts, status)
  rewards, found = made(_STATUS.COMPLETED)
  assert tuple(found[name] for name in rewards_lib.SCORE_NAMES) == scores
  measures = found | {'exact_match': found['em']}
  assert rewards == {n: w * measures[n] for n, w in _WEIGHTS.items()}
  rewards, found = made(_STATUS.INFRA_ERROR)
  assert not any(rewards.values()) and not any(found.values())


def test_the_prompt_describes_the_tools(tmp_path):
  prompt = _environment().prompt(_QUESTION)
  line = '- say: Says a text. Arguments: {"text": {"type": "string"}}\n'
  assert line in prompt and prompt.endswith('Question: What is 6 * 7?\n')
  template = tmp_path / 'prompt.txt'
  template.write_text('{tools}|{question}', encoding='utf-8')
  short = _environment(prompt_template=str(template), tools=[])
  assert short.prompt(_QUESTION) == '|What is 6 * 7?'


def test_two_tools_of_one_name_are_refused():
  with pytest.raises(ValueError, match="two tools have the name 'say'"):
    _environment(tools=[_Say(), _Say()])


# As in the templates of Qwen2.5 and Qwen3, shortened.
_TEMPLATE = (
  '{% if tools %}TOOLS{% for t in tools %}{{ t | tojson }}{% endfor %}\n'
  '{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}'
)


@pytest.mark.parametrize('has_template', [True, False])
def test_a_chat_template_describes_the_tools_in_its_own_format(has_template):
  tokenizer = vocabularies.with_added(
    tools.ToolsEnvironment.tags,
    chat_template=_TEMPLATE if has_template else None,
  )
  environment = _environment()
  (trajectory,) = dialogues.collect_scripts(
    [[_ANSWER]],
    environment,
    [_QUESTION],
    tokenizer=tokenizer,
    max_length=3000,
    max_turn_tokens=400,
    max_observation_tokens=200,
  )
  prompt = tokenizer.decode(trajectory.prompt_ids)
  assert prompt.endswith(environment.prompt(_QUESTION))
  described = 'TOOLS{"type": "function", "function": {"name": "say", '
  assert prompt.startswith(described) == has_template
  assert trajectory.reward == sum(_WEIGHTS.values())
