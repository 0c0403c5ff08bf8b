"""Shows the tokens of a dialogue, as the model reads and writes them.

The collector of training makes the dialogue. But its engine does not sample the
turns of a policy: it returns turns that the user wrote.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import re

import numpy as np

from stppo_jax import exits
from stppo_jax import streams
from stppo_jax import types
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.retrieval import fakes
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import scripted
from stppo_jax.sampling import stops
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import components
from stppo_jax.training import model_files

_PASSAGE = types.Passage('0', 'A title', 'The text of a passage.')


def lines(config, question: str, turns: Sequence[str]) -> Iterator[str]:
  """Yields the lines that show a dialogue.

  Args:
    config: the config of a run; no weights are read.
    question: the text of the question; '' for the first question of the
      training data.
    turns: the texts that stand for the policy's turns; () for an example turn
      for each stop string.

  Raises:
    Misconfigured: the config is wrong, or a file that it names is missing or
      does not fit the config.
  """
  with exits.as_misconfigured():
    questions = components.build_questions(config)
    tokenizer = model_files.build_tokenizer(config, questions)
    model_files.check_tokenizer(config, tokenizer)
    ends = model_files.end_token_ids(config, tokenizer)
    environment = environments.find(config.env.name).from_options(
      config.env.to_dict(), fakes.FakeRetriever(lambda query: [_PASSAGE])
    )
    (asked,) = questions.train(0, 1)
    stop_strings = environment.stop_strings
    automaton = stops.build(
      tokenizer.token_bytes(), stop_strings=stop_strings, eos_ids=ends
    )
    if question:
      asked = dataclasses.replace(asked, text=question)
    # A stop string is a closing tag, such as </search>, and <search> is the
    # opening tag. A text between both tags is an action of the policy.
    turns = turns or [
      f'{x.replace("/", "", 1)} words {x}' for x in stop_strings
    ]
    encoded = [
      tokenizer.encode_text(turn, tags=environment.tags) for turn in turns
    ]
    script = [_cut(ids, automaton, tokenizer.eos_id) for ids in encoded]
    with event_loop.EventLoop() as loop:
      collector = collect.Collector(
        engine=scripted.ScriptedEngine([script], config.env.max_length),
        environment=environment,
        tokenizer=tokenizer,
        loop=loop,
        max_turn_tokens=config.env.max_turn_tokens,
        max_observation_tokens=config.env.max_observation_tokens,
      )
      (row,) = collector.collect([asked], keys=None)
  yield streams.escape(tokenizer.decode(row.prompt_ids))
  yield from _notes(row.prompt_ids, tokenizer, environment)
  parts = [('prompt: {} tokens', row.prompt_ids, '')]
  # A dialogue may have more turns than were given. These further turns are
  # empty, and are not shown.
  for number, (turn, whole) in enumerate(zip(row.turns, script), start=1):
    ids, observed = turn.token_ids, turn.observation_ids
    end = 'end' if whole[-1] in ends else 'stop'
    end = end if len(ids) == len(whole) else 'cut'
    parts += [(f'turn {number}: {{}} tokens, action {turn.action}', ids, end)]
    if len(observed):
      parts += [('observation: {} tokens, not trained on', observed, '')]
  position = 0
  for title, ids, end in parts:
    yield f'-- {title.format(len(ids))}'
    yield from _tokens(tokenizer, environment.tags, ids, position, end)
    position += len(ids)
  if len(row.turns) > len(script):
    yield '-- the next turn begins here'
  else:
    yield f'-- the dialogue ends: {row.status.value} {row.cause}'.rstrip()
  yield f'stop strings: {" ".join(stop_strings)}'
  yield f'end tokens: {", ".join(f"{i} {tokenizer.decode([i])}" for i in ends)}'


def _cut(
  ids: np.ndarray, automaton: stops.StopAutomaton, eos_id: int
) -> np.ndarray:
  """Returns the tokens of a turn up to the token at which the engine stops.

  If the engine would not stop in this turn, the token `eos_id` is appended.
  """
  state = automaton.START
  for count, token_id in enumerate(ids, start=1):
    state = automaton.next_state_ZV[state, token_id]
    if state == automaton.stopped:
      return ids[:count]
  return np.append(ids, np.int32(eos_id))


def _notes(
  prompt_ids: np.ndarray,
  tokenizer: tokenizer_lib.Tokenizer,
  environment: protocol.Environment,
) -> Iterator[str]:
  """Yields notes about details of the prompt that are easily overlooked."""
  if tokenizer.prompts.folds_system:
    yield "note: prompt.system begins the user's message"
  encode = tokenizer.encode_prompt
  if environment.tools and np.array_equal(
    encode('x', tools=environment.tools), encode('x')
  ):
    yield 'note: no chat template describes the tools'
  text = tokenizer.decode(prompt_ids)
  for tag in environment.tags:
    if '/' not in tag and text.count(tag) > text.count(f'</{tag[1:]}'):
      yield f'note: the prompt leaves {tag} open'


def _tokens(
  tokenizer: tokenizer_lib.Tokenizer,
  tags: Sequence[str],
  ids: np.ndarray,
  position: int,
  last: str,
) -> Iterator[str]:
  """Yields a line for each token, with its position, id, marks and text.

  Args:
    tokenizer: the policy's tokenizer. It says which tokens get the mark
      'special' or 'added'.
    tags: the tags, such as <search>. Each token that has a part of a tag gets
      the mark 'tag'.
    ids: the ids of the tokens.
    position: the position in the dialogue of the first of these tokens.
    last: the mark of the last token, such as 'stop'; '' for no mark.
  """
  pieces = [tokenizer.token_bytes()[i] for i in ids]
  pattern = re.compile('|'.join(map(re.escape, tags)).encode() or b'(?!)')
  tagged = [match.span() for match in pattern.finditer(b''.join(pieces))]
  end = 0
  for n, (token_id, piece) in enumerate(zip(ids.tolist(), pieces)):
    start, end = end, end + len(piece)
    in_tag = any(a < end and start < b for a, b in tagged)
    is_last = n == len(ids) - 1
    kinds = tokenizer.kind(token_id), 'tag' * in_tag, last * is_last
    text = streams.one_line(piece.decode(errors='backslashreplace'))
    known = ' '.join(filter(None, kinds))
    yield f"{position + n:6} {token_id:7}  {known:12} '{text}'"
