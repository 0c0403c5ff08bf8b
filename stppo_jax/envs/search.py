"""Question answering with a search engine."""

from collections.abc import Mapping, Sequence
import copy
from typing import Any, Self

from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.envs import actions
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.envs import rewards as rewards_lib
from stppo_jax.retrieval import protocol as retrieval

# The names of the rewards of a whole trajectory and of single turns.
OUTCOME_NAMES = (
  'exact_match',
  'substring_match',
  'f1',
  'format',
  'search_penalty',
)
TURN_NAMES = ('turn_search', 'turn_answer_found', 'turn_first_found')
REWARD_NAMES = OUTCOME_NAMES + TURN_NAMES

Status = types.TrajectoryStatus


class SearchEnvironment(protocol.Environment):
  """Answers at most `max_turns` searches; one more turn may give the answer.

  The scores are `rewards.SCORE_NAMES`. The main score is the exact match. If
  the weight of the exact match is 0 and the weight of the substring match is
  not 0, the main score is the substring match.
  """

  stop_strings = actions.STOP_STRINGS
  tags = text_lib.TAGS
  main_score = rewards_lib.EXACT_MATCH
  needs_retriever = True
  phrases = staticmethod(prompts.phrases)

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
      retriever: the retriever that finds the passages.
      max_turns: the largest number of searches per question.
      prompt_template: a file with `{question}`; '' for the built-in prompt.
      rewards: the weight of each of REWARD_NAMES. `search_penalty` is
        subtracted for each search. `turn_search` goes to a turn whose search
        found passages, `turn_answer_found` to a turn whose passages contain a
        golden answer, and `turn_first_found` to the first turn of an episode
        whose passages contain a golden answer.
      reward_scope: a key of `rewards.SCOPES`, which decides in which text the
        answer is sought.

    Raises:
      ValueError: if the file of the prompt cannot be used; the message is one
        line.
    """
    self._max_turns = max_turns
    self._retriever = retriever
    self._template = prompts.load_template(prompt_template)
    self._weights = rewards
    if rewards['substring_match'] and not rewards['exact_match']:
      self.main_score = rewards_lib.SUBSTRING_MATCH
    self._find_answer = rewards_lib.SCOPES[reward_scope]
    # Whether an earlier search of the episode found a golden answer.
    self._has_found = False

  @classmethod
  def from_options(
    cls, options: Mapping[str, Any], retriever: retrieval.Retriever | None
  ) -> Self:
    """See `protocol.Environment`."""
    # `needs_retriever` is True, so the caller passes a retriever.
    assert retriever is not None
    return cls(
      retriever=retriever,
      max_turns=options['max_turns'],
      prompt_template=options['prompt_template'],
      # The collector, not this class, gives the rewards for the length of a
      # trajectory.
      rewards={name: options['rewards'][name] for name in REWARD_NAMES},
      reward_scope=options['reward_scope'],
    )

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns the mean number of valid searches of a trajectory."""
    return {
      'env/number_of_valid_search': protocol.mean_turns(trajectories, 'search')
    }

  def prompt(self, question: types.Question) -> str:
    """See `protocol.Environment`."""
    return prompts.fill(self._template, question)

  def episode(self, question: types.Question) -> Self:
    """Returns this object, or a copy if `turn_first_found` has a weight."""
    del question
    if not self._weights['turn_first_found']:
      return self
    # The shallow copy shares the retriever. It has a `_has_found` of its own,
    # because this attribute belongs to one episode.
    episode = copy.copy(self)
    episode._has_found = False
    return episode

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> protocol.Step:
    """See `protocol.Environment`.

    After `max_turns` turns, a search or an invalid action ends the trajectory
    with TRUNCATED_TURNS. A failed retrieval ends the trajectory with
    INFRA_ERROR.
    """
    action = actions.parse_action(text)
    if action.kind == protocol.ANSWER:
      return protocol.Step(protocol.ANSWER, None, Status.COMPLETED)
    if turn_index >= self._max_turns:
      return protocol.Step(action.kind, None, Status.TRUNCATED_TURNS)
    if action.kind == protocol.INVALID:
      return protocol.Step(protocol.INVALID, prompts.correction(), None)
    try:
      passages = await self._retriever.retrieve(
        action.content, corpus=question.corpus
      )
    except retrieval.RetrievalError as error:
      return protocol.Step('search', None, Status.INFRA_ERROR, cause=str(error))
    return protocol.Step(
      'search',
      prompts.information(passages),
      None,
      self._turn_reward(question, passages),
      # Some servers send no ids.
      passages=tuple(passage.id for passage in passages if passage.id),
    )

  def rewards(
    self,
    question: types.Question,
    prompt: str,
    texts: Sequence[str],
    status: Status,
  ) -> tuple[dict[str, float], dict[str, float]]:
    """See `protocol.Environment`.

    The names of the rewards are OUTCOME_NAMES. The reward of a turn is in the
    `protocol.Step` of the turn. For a choice question, the score 'em' says
    whether the chosen option is right.
    """
    scores = dict.fromkeys(rewards_lib.SCORE_NAMES, 0.0)
    if status is Status.INFRA_ERROR:
      return dict.fromkeys(OUTCOME_NAMES, 0.0), scores
    answer = self._find_answer(prompt, texts)
    if answer is not None:
      scores |= rewards_lib.answer_scores(question, answer)
    scores['format'] = rewards_lib.format_reward(texts)
    penalty = {'search_penalty': 0.0 - rewards_lib.count_searches(texts)}
    weights = {name: self._weights[name] for name in OUTCOME_NAMES}
    return rewards_lib.weighted(weights, scores | penalty), scores

  def _turn_reward(
    self, question: types.Question, passages: Sequence[types.Passage]
  ) -> float:
    """Returns the reward of a turn whose search has found `passages`.

    All passages count, even if the length limit of the observation will cut
    some off. The source of these rewards is MT-GRPO, arXiv 2505.11821. The
    source of `turn_first_found` is the abstract of TSPO, arXiv 2601.22776.
    """
    if not passages:
      return 0.0
    golden = rewards_lib.golden_texts(question)
    found = max(
      rewards_lib.substring_match(f'{passage.title}\n{passage.text}', golden)
      for passage in passages
    )
    weights = self._weights
    reward = weights['turn_search'] + weights['turn_answer_found'] * found
    if found and not self._has_found:
      self._has_found = True
      reward += weights['turn_first_found']
    return reward
