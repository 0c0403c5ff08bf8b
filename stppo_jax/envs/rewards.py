"""Scores of an answer and of the form of a dialogue, as pure functions.

All scores lie in [0, 1].
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
import re

from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.envs import actions

# The name of the score that says whether an answer is right. For a choice
# question, this score says whether the chosen option is right.
EXACT_MATCH = 'em'
SUBSTRING_MATCH = 'substring_match'
SCORE_NAMES: tuple[str, ...] = (
  EXACT_MATCH,
  'f1',
  SUBSTRING_MATCH,
  'format',
)
_ANSWER = re.compile('<answer>(.*?)</answer>', re.DOTALL)
# A letter with or without a text: B, (b), B., Option B: two.
_LETTER = re.compile(r'(?:option\s+)?\(?([a-z])(?:[).:]+(?:\s+(.+))?)?', re.S)

_NAMES = '|'.join(text_lib.TAG_NAMES)
_ANY_TAG = re.compile(f'</?(?:{_NAMES})>')
_TURN_FORM = '(?:<think></think>)*<{0}></{0}>'
# The tokens that end a turn in the models that we load. The score `format`
# ignores these tokens after the action of a turn.
_END_OF_TURN = re.compile(
  r'(?:\s|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end_of_text\|>|</s>)+\Z'
)


def exact_match(answer: str, golden_answers: Collection[str]) -> float:
  """Returns 1 if the answer equals a golden answer, both normalised, else 0."""
  normal = text_lib.normalise(answer)
  return float(
    any(normal == text_lib.normalise(golden) for golden in golden_answers)
  )


def substring_match(answer: str, golden_answers: Collection[str]) -> float:
  """Returns 1 if a golden answer is in the answer, both normalised, else 0."""
  normal = text_lib.normalise(answer)
  return float(any(text_lib.normalise(g) in normal for g in golden_answers))


def token_f1(answer: str, golden_answers: Collection[str]) -> float:
  """Returns the largest word F1 with any golden answer, as in SQuAD."""
  return max((_f1(answer, golden) for golden in golden_answers), default=0.0)


def choose(answer: str, options: Mapping[str, str]) -> frozenset[str]:
  """Returns the letters of the options that an answer means.

  The first of these readings that fits any option decides:

  *   the letter, alone or before the text: `B`, `(b)`, `B.`, `Option B: two`;
      a text that follows must be the text of that option;
  *   the text of an option, apart from case and white space;
  *   the normalised text, which several options may share ("<5" and ">5").

  The set is empty if no reading fits an option.
  """
  plain = _plain(answer)
  letter = _LETTER.fullmatch(plain)
  if letter:
    by_letter = {key.lower(): key for key in options}
    if letter[1] in by_letter:
      key = by_letter[letter[1]]
      if letter[2] is None or exact_match(letter[2], [options[key]]):
        return frozenset({key})
  for form in (_plain, text_lib.normalise):
    wanted = form(answer)
    keys = {key for key, text in options.items() if form(text) == wanted}
    if wanted and keys:
      return frozenset(keys)
  return frozenset()


def choice_accuracy(
  answer: str, options: Mapping[str, str], golden_answers: Collection[str]
) -> float:
  """Returns 1 if the answer means only golden options, at least one, else 0.

  Args:
    answer: an option's letter, its text, or both.
    options: the text of each option by its letter.
    golden_answers: the letters or texts of the golden options.
  """
  chosen = choose(answer, options)
  return float(
    bool(chosen) and chosen <= golden_choices(options, golden_answers)
  )


def golden_choices(
  options: Mapping[str, str], golden_answers: Collection[str]
) -> frozenset[str]:
  """Returns the letters of the golden options.

  Golden answers are first read as the texts of options, because the text of an
  option may itself be a letter, such as "A" for the vitamin. If no golden
  answer is the text of an option, the golden answers are read like the policy's
  answer, see `choose`.
  """
  texts = {_plain(golden) for golden in golden_answers}
  keys = {key for key, text in options.items() if _plain(text) in texts}
  if keys:
    return frozenset(keys)
  return frozenset().union(*(choose(g, options) for g in golden_answers))


def answer_scores(question: types.Question, answer: str) -> dict[str, float]:
  """Returns the scores that compare the answer with the golden answers."""
  golden = golden_texts(question)
  if question.kind == 'choice':
    options = question.options
    em = choice_accuracy(answer, options, question.golden_answers)
    chosen = choose(answer, options)
    # F1 compares words, and the answer "C" has no word in common with the text
    # of its option. So the text of the option is compared.
    if len(chosen) == 1:
      (letter,) = chosen
      answer = options[letter]
  else:
    em = exact_match(answer, golden)
  return {
    EXACT_MATCH: em,
    'f1': token_f1(answer, golden),
    SUBSTRING_MATCH: substring_match(answer, golden),
  }


def weighted(
  weights: Mapping[str, float], scores: Mapping[str, float]
) -> dict[str, float]:
  """Returns the rewards by name; a reward is a weight times its score."""
  # In the config, the weight of the score EXACT_MATCH is named `exact_match`.
  measures = {'exact_match': scores[EXACT_MATCH], **scores}
  return {name: weight * measures[name] for name, weight in weights.items()}


def golden_texts(question: types.Question) -> Collection[str]:
  """Returns the golden answers as texts.

  For a choice question, the result has the texts of the golden options.
  """
  if question.kind != 'choice':
    return question.golden_answers
  options = question.options
  golden = golden_choices(options, question.golden_answers)
  return [options[key] for key in golden]


def format_reward(texts: Sequence[str]) -> float:
  """Returns 1 if every turn has the right form, else 0.

  The last turn must answer and all earlier turns must search. The tags of a
  turn are any number of <think></think> pairs and then one action. No tag may
  be inside another or left open, and <information> is not allowed. Only
  end-of-turn tokens may follow the action. Any text may stand between the tags.
  """
  if not texts:
    return 0.0
  kinds = ['search'] * (len(texts) - 1) + ['answer']
  return float(all(map(_well_formed, texts, kinds)))


def count_searches(texts: Sequence[str]) -> int:
  """Returns the number of turns whose action is a search."""
  return sum(actions.parse_action(text).kind == 'search' for text in texts)


def response_answer(prompt: str, texts: Sequence[str]) -> str | None:
  """Returns the answer of the last turn; None if it gives no answer.

  Only text of the policy counts, so the prompt is ignored.
  """
  del prompt
  action = actions.parse_action(texts[-1] if texts else '')
  return action.content if action.kind == 'answer' else None


def search_r1_answer(prompt: str, texts: Sequence[str]) -> str | None:
  """Returns the answer that the scorer of Search-R1 finds, with its faults.

  The scorer reads prompt and response as one text. It takes the last complete
  <answer> element if there are at least two, because it expects one element in
  the prompt. So the only answer of a policy is not found if the prompt has no
  such element. If the prompt has two elements, a policy that never answers is
  scored by the example of the prompt. The prompt of Search-R1 has two elements,
  because "inside <answer> and </answer>" reads as an element.
  """
  answers = _ANSWER.findall(prompt + ''.join(texts))
  return answers[-1].strip() if len(answers) > 1 else None


# The choices of `env.reward_scope`. Each function finds the answer of a
# trajectory in its prompt and its turns.
SCOPES: dict[str, Callable[[str, Sequence[str]], str | None]] = {
  'response': response_answer,
  'search_r1': search_r1_answer,
}


def _f1(answer: str, golden: str) -> float:
  """Returns the harmonic mean of the precision and the recall of words."""
  words, golden_words = (
    text_lib.normalise(answer).split(),
    text_lib.normalise(golden).split(),
  )
  # As in SQuAD, a text without words agrees only with a text without words.
  if not words or not golden_words:
    return float(words == golden_words)
  common = collections.Counter(words) & collections.Counter(golden_words)
  # The precision is common / len(words), and the recall is
  # common / len(golden_words).
  return 2.0 * common.total() / (len(words) + len(golden_words))


def _plain(text: str) -> str:
  """Returns the text in lower case with single spaces."""
  return ' '.join(text.lower().split())


def _well_formed(text: str, kind: str) -> bool:
  """Returns whether a turn has the action `kind` and the right form.

  The function `format_reward` describes the form.
  """
  text = _END_OF_TURN.sub('', text)
  return (
    text.endswith(f'</{kind}>')
    and actions.parse_action(text).kind == kind
    and re.fullmatch(_TURN_FORM.format(kind), ''.join(_ANY_TAG.findall(text)))
    is not None
  )
