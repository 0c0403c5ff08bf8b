"""Question answering with a search engine."""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence

from stppo_jax import types
from stppo_jax.envs import actions
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards as rewards_lib
from stppo_jax.retrieval import protocol as retrieval

OUTCOME_NAMES = (
  'exact_match',
  'substring_match',
  'f1',
  'format',
  'search_penalty',
)
TURN_NAMES = ('turn_search', 'turn_answer_found')
REWARD_NAMES = OUTCOME_NAMES + TURN_NAMES


class SearchEnvironment:
  """At most `max_turns` searches, then one last generation without.

  A `protocol.Environment`.
  """

  def __init__(
    self,
    *,
    retriever: retrieval.Retriever,
    max_turns: int,
    prompt_template: str,
    rewards: Mapping[str, float],
    reward_scope: str,
  ):
    """Makes an environment.

    Args:
      retriever: finds the passages.
      max_turns: searches per question.
      prompt_template: file with `{question}`; '' = the built-in prompt.
      rewards: weight of each of REWARD_NAMES. `search_penalty` is subtracted
        per search; `turn_search` goes to a turn whose search found passages,
        `turn_answer_found` to one that found a golden answer in them.
      reward_scope: 'response' | 'search_r1', see `rewards.SCOPES`.

    Raises:
      ValueError: a bad value; one line.
    """
    if set(rewards) != set(REWARD_NAMES):
      raise ValueError(
        f'rewards: expected a weight for each of {", ".join(REWARD_NAMES)}; '
        f'got {", ".join(sorted(rewards))}'
      )
    if reward_scope not in rewards_lib.SCOPES:
      raise ValueError(
        f'unknown reward_scope {reward_scope!r}; choices: '
        + ', '.join(sorted(rewards_lib.SCOPES))
      )
    self.max_turns = max_turns
    self._retriever = retriever
    self._template = prompts.load_template(prompt_template)
    self._weights = dict(rewards)
    self._find_answer = rewards_lib.SCOPES[reward_scope]

  def prompt(self, question: types.Question) -> str:
    """See `protocol.Environment`."""
    return prompts.fill(self._template, question)

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> protocol.Step:
    """See `protocol.Environment`.

    A search or an invalid action in the last generation ends the trajectory
    with TRUNCATED_TURNS; a failed retrieval ends it with INFRA_ERROR.
    """
    action = actions.parse_action(text)
    if action.kind == 'answer':
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    if turn_index >= self.max_turns:
      return protocol.Step(
        action.kind, None, types.TrajectoryStatus.TRUNCATED_TURNS
      )
    if action.kind == 'invalid':
      return protocol.Step('invalid', prompts.correction(), None)
    try:
      passages = await self._retriever.retrieve(
        action.content, corpus=question.corpus
      )
    except retrieval.RetrievalError:
      # Counted by the retriever; the status carries it from here.
      return protocol.Step('search', None, types.TrajectoryStatus.INFRA_ERROR)
    return protocol.Step(
      'search',
      prompts.information(passages),
      None,
      self._turn_reward(question, passages),
    )

  def rewards(
    self,
    question: types.Question,
    prompt: str,
    texts: Sequence[str],
    status: types.TrajectoryStatus,
  ) -> tuple[dict[str, float], dict[str, float]]:
    """See `protocol.Environment`.

    Parts are OUTCOME_NAMES; what turns earned is in their steps. Scores are
    'em' (for choice questions the accuracy of the choice), 'f1',
    'substring_match' and 'format'.
    """
    scores = dict.fromkeys(('em', 'f1', 'substring_match', 'format'), 0.0)
    if status is types.TrajectoryStatus.INFRA_ERROR:
      return dict.fromkeys(OUTCOME_NAMES, 0.0), scores
    answer = self._find_answer(prompt, texts)
    if answer is not None:
      scores |= _answer_scores(question, answer)
    scores['format'] = rewards_lib.format_reward(texts)
    measures = {
      'exact_match': scores['em'],
      'substring_match': scores['substring_match'],
      'f1': scores['f1'],
      'format': scores['format'],
      'search_penalty': 0.0 - rewards_lib.count_searches(texts),
    }
    return {
      name: self._weights[name] * measures[name] for name in OUTCOME_NAMES
    }, scores

  def _turn_reward(
    self, question: types.Question, passages: Sequence[types.Passage]
  ) -> float:
    """What a search is worth by what it found, cut or not (MT-GRPO)."""
    if not passages:
      return 0.0
    golden = _golden_texts(question)
    found = max(
      rewards_lib.substring_match(f'{passage.title}\n{passage.text}', golden)
      for passage in passages
    )
    weights = self._weights
    return weights['turn_search'] + weights['turn_answer_found'] * found


def _answer_scores(question: types.Question, answer: str) -> dict[str, float]:
  golden = _golden_texts(question)
  if question.kind == 'choice':
    options = question.options
    em = rewards_lib.choice_accuracy(answer, options, question.golden_answers)
    chosen = rewards_lib.choose(answer, options)
    # Words are compared with words: "C" has none in common with its option.
    if len(chosen) == 1:
      (letter,) = chosen
      answer = options[letter]
  else:
    em = rewards_lib.exact_match(answer, golden)
  return {
    'em': em,
    'f1': rewards_lib.token_f1(answer, golden),
    'substring_match': rewards_lib.substring_match(answer, golden),
  }


def _golden_texts(question: types.Question) -> Collection[str]:
  """The golden answers in words; of choice questions the options' texts."""
  if question.kind != 'choice':
    return question.golden_answers
  options = question.options
  golden = rewards_lib.golden_choices(options, question.golden_answers)
  return [options[key] for key in golden]
