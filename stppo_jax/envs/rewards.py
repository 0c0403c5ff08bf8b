"""Measures of an answer and of the form of a dialogue. Pure functions.

All are 0 to 1 but for `count_searches`.
"""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import re
import string

from stppo_jax.envs import actions
from stppo_jax.envs import neutralisation

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_DELETE_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ANSWER = re.compile('<answer>(.*?)</answer>', re.DOTALL)
_LETTER = re.compile(r'(?:option\s+)?\(?([a-z])(?:[).:]+(?:\s+(.+))?)?', re.S)

_NAMES = '|'.join(neutralisation.TAG_NAMES)
_ANY_TAG = re.compile(f'</?(?:{_NAMES})>')
_TURN_FORM = '(?:<think></think>)*<{0}></{0}>'
# What ends a turn in the models we load; it is no part of the form.
_END_OF_TURN = re.compile(
  r'(?:\s|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end_of_text\|>|</s>)+\Z'
)


def normalise(text: str) -> str:
  """Lower case, no ASCII punctuation, no articles, single spaces. (SQuAD)"""
  text = text.lower().translate(_DELETE_PUNCTUATION)
  return ' '.join(_ARTICLES.sub(' ', text).split())


def exact_match(answer: str, golden_answers: Collection[str]) -> float:
  """1 if the normalised answer equals any normalised golden answer."""
  normal = normalise(answer)
  return float(any(normal == normalise(golden) for golden in golden_answers))


def substring_match(answer: str, golden_answers: Collection[str]) -> float:
  """1 if the normalised answer contains any normalised golden answer.

  A golden answer that normalises to nothing ("The") is contained only in
  another such: everything contains the empty string.
  """
  normal = normalise(answer)
  goldens = map(normalise, golden_answers)
  return float(any(g in normal if g else g == normal for g in goldens))


def token_f1(answer: str, golden_answers: Collection[str]) -> float:
  """The largest harmonic mean of precision and recall of words. (SQuAD)"""
  return max((_f1(answer, golden) for golden in golden_answers), default=0.0)


def choose(answer: str, options: Mapping[str, str]) -> frozenset[str]:
  """The options an answer means: letters, none if it means no option.

  The first of these that fits any option:

  *   the letter, alone or before the text: `B`, `(b)`, `B.`, `Option B: two`;
      a text that follows must be that option's;
  *   the text, but for case and white space;
  *   the text normalised. Several options may be left ("<5" and ">5").
  """
  plain = _plain(answer)
  letter = _LETTER.fullmatch(plain)
  if letter:
    by_letter = {key.lower(): key for key in options}
    if letter[1] in by_letter:
      key = by_letter[letter[1]]
      if letter[2] is None or exact_match(letter[2], [options[key]]):
        return frozenset({key})
  for form in (_plain, normalise):
    wanted = form(answer)
    found = {key for key, text in options.items() if form(text) == wanted}
    if wanted and found:
      return frozenset(found)
  return frozenset()


def choice_accuracy(
  answer: str, options: Mapping[str, str], golden_answers: Collection[str]
) -> float:
  """1 if the answer means golden options and no other.

  Args:
    answer: an option's letter, its text, or both.
    options: letter to text.
    golden_answers: letters or texts too.
  """
  chosen = choose(answer, options)
  return float(
    bool(chosen) and chosen <= golden_choices(options, golden_answers)
  )


def golden_choices(
  options: Mapping[str, str], golden_answers: Collection[str]
) -> frozenset[str]:
  """The letters of the golden options.

  Unlike an answer, a golden one is an option's text before it is a letter:
  "A" may be the name of a vitamin.
  """
  texts = {_plain(golden) for golden in golden_answers}
  found = {key for key, text in options.items() if _plain(text) in texts}
  if found:
    return frozenset(found)
  return frozenset().union(*(choose(g, options) for g in golden_answers))


def format_reward(texts: Sequence[str]) -> float:
  """1 if every turn is well formed and the last one, and only it, answers.

  A turn is well formed if its tags are any number of <think></think> and then
  one action, none inside another, none left open, none of <information>, and
  if nothing but an end-of-turn token follows. Text beside tags is free.
  """
  if not texts:
    return 0.0
  kinds = ['search'] * (len(texts) - 1) + ['answer']
  return float(all(map(_well_formed, texts, kinds)))


def count_searches(texts: Sequence[str]) -> int:
  """Turns whose action is a search."""
  return sum(actions.parse_action(text).kind == 'search' for text in texts)


def response_answer(prompt: str, texts: Sequence[str]) -> str | None:
  """The answer of the last turn; None if it gives none.

  Only what the policy wrote counts: the prompt is ignored.
  """
  del prompt
  action = actions.parse_action(texts[-1] if texts else '')
  return action.content if action.kind == 'answer' else None


def search_r1_answer(prompt: str, texts: Sequence[str]) -> str | None:
  """The answer as the scorer of Search-R1 finds it, faults included.

  It reads prompt and response together and takes the last complete answer tag
  if there are at least two, since its prompt contains one. With a prompt that
  contains none, a correct answer is none; with one that contains two (theirs
  does: "inside <answer> and </answer>" reads as one), a silent model is
  scored as the prompt's example.
  """
  answers = _ANSWER.findall(prompt + ''.join(texts))
  return answers[-1].strip() if len(answers) > 1 else None


SCOPES: dict[str, Callable[[str, Sequence[str]], str | None]] = {
  'response': response_answer,
  'search_r1': search_r1_answer,
}


def _f1(answer: str, golden: str) -> float:
  words, golden_words = normalise(answer).split(), normalise(golden).split()
  if not words or not golden_words:
    return float(words == golden_words)
  common = collections.Counter(words) & collections.Counter(golden_words)
  # Harmonic mean of common / len(words) and common / len(golden_words).
  return 2.0 * common.total() / (len(words) + len(golden_words))


def _plain(text: str) -> str:
  return ' '.join(text.lower().split())


def _well_formed(text: str, kind: str) -> bool:
  text = _END_OF_TURN.sub('', text)
  return (
    text.endswith(f'</{kind}>')
    and actions.parse_action(text).kind == kind
    and re.fullmatch(_TURN_FORM.format(kind), ''.join(_ANY_TAG.findall(text)))
    is not None
  )
