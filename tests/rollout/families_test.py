"""Dialogues of every kind of tokenizer, against a slow reader of their text.

The reader decodes the whole dialogue again after each token and looks for stop
strings in the text; it knows nothing of automata, bytes and masks.
"""

import itertools
import random
import re

import numpy as np
import pytest
import tokenizers

from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.retrieval import fakes
from stppo_jax.rollout import pack
from stppo_jax.sampling import chat_template
from stppo_jax.sampling import stops
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.rollout import dialogues
from tests.sampling import families

_ROWS = 4  # dialogues for each choice of options
_MAX_TURNS = 2
_LIMITS = {'max_turn_tokens': 1000, 'max_observation_tokens': 2000}
_TAGGED = {'plain': {}, 'added': {'added': families.TAGS}}
_TAGGED |= {'special': {'special': families.TAGS}}
_WORDS = 'the king of a lake is it tower 12 é 日本 -- ( x'.split()
_CORRECTION = (
  '\n\nNo valid action. Write a query inside <search> and </search>, or the '
  'answer inside <answer> and </answer>.\n\n'
)
_SYSTEM = 'Be brief, é.'


def _words(rng, most=5):
  return ' '.join(rng.choices(_WORDS, k=rng.randint(1, most)))


class _Reader:
  """Reads text only; the tokenizer is that of the file, as it is."""

  def __init__(self, directory, family):
    self.family = family
    self._raw = tokenizers.Tokenizer.from_file(
      str(directory / 'tokenizer.json')
    )
    self.ids_of = self._raw.token_to_id
    self.added = self._raw.get_added_tokens_decoder()
    self.ends = {self.ids_of(x) for x in (family.eos, *family.special[:1])}

  def text(self, ids):
    return self._raw.decode(list(ids), skip_special_tokens=False)

  def spaced(self, text):
    """Returns text with the spaces that come with added tokens.

    Where a normaliser puts a space before each text, it does so for an added
    token that is not special, too: its text begins with that space.
    """
    tokens = [t.content for t in self.added.values() if t.normalized]
    if self.family.backend != 'prepend' or not tokens:
      return text
    return re.sub('|'.join(tokens), r' \g<0>', text)

  def prompt(self, text, options):
    """Returns the ids of a prompt."""
    family, system = self.family, options.system
    if system and not family.takes_system:
      text, system = f'{system}\n\n{text}', ''
    if family.template:
      written = family.written(system, text, options.enable_thinking)
      ids = self._raw.encode(written, add_special_tokens=False).ids
    else:
      ids = self._raw.encode(text).ids
    bos = self.ids_of(family.bos)
    if options.bos == 'on' and ids[0] != bos:
      return [bos, *ids]
    return ids[1:] if options.bos == 'off' and ids[0] == bos else ids

  def turn(self, before, stream):
    """Returns the part of a stream that is a turn, and its text."""
    start = len(self.text(before))
    for count in range(1, len(stream) + 1):
      written = stream[:count]
      text = self.text([*before, *written])[start:]
      if written[-1] in self.ends or re.search('</(search|answer)>', text):
        break
    return written, text

  @staticmethod
  def action(text):
    """Returns the action of a turn and what is in it."""
    closing = re.search('</(search|answer)>', text)
    if closing:
      opening = text[: closing.start()].find(f'<{closing[1]}>')
      content = text[: closing.start()][opening:].partition('>')[2].strip()
      if opening >= 0 and (content or closing[1] == 'answer'):
        return closing[1], content
    return 'invalid', ''


def _passages(query):
  # Tags in passages are broken up, which other tests are about.
  query = re.sub('[<>|/_]', '', query)
  return [
    types.Passage(f'{n}', f'{query[:9]} {n}', f'  It is {query} é. ')
    for n in range(len(query) % 3)
  ]


def _observed(action, query):
  if action == 'invalid':
    return _CORRECTION
  body = ''.join(
    f'Doc {n}(Title: {p.title}) {p.text}\n'
    for n, p in enumerate(_passages(query), 1)
  )
  return f'\n\n<information>{body}</information>\n\n'


def _streams(rng, tokenizer, others):
  """Returns what a policy might write in each turn, were it never stopped."""
  single = {}
  for token_id, piece in enumerate(tokenizer.token_bytes()):
    if len(piece) == 1:
      single.setdefault(piece, []).append(token_id)

  def spell(text):
    return [rng.choice(single[bytes([byte])]) for byte in text.encode()]

  def encode(text):
    return tokenizer.encode_text(text, tags=families.TAGS).tolist()

  def piece():
    kind, word = rng.random(), _words(rng)
    if kind < 0.3:
      return encode(f'<think> {word} </think>')
    if kind < 0.5:
      # Where tags are several tokens, the stop string ends within one: '><'.
      return encode(f'<search> {word} </search><think>')
    if kind < 0.6:
      return encode(f'<answer> {word} </answer> {word}')
    if kind < 0.7:
      return spell(f'<search>{word}</search>')
    if kind < 0.8:
      return [*encode(f'<search>{word}</sea'), *spell('rch'), *encode('>')]
    if kind < 0.85:
      return encode('</answer>') if rng.random() < 0.5 else spell('<search>')
    return spell(word) if kind < 0.9 else [rng.choice(others)]

  return [
    [*itertools.chain(*(piece() for _ in range(rng.randint(1, 4))))]
    for _ in range(_MAX_TURNS + 1)
  ]


def _options(name):
  """Returns some options that a family allows."""
  found = [chat_template.Options(), chat_template.Options(system=_SYSTEM)]
  if families.FAMILIES[name].bos:
    found += [chat_template.Options(bos='on', system=_SYSTEM)]
    found += [chat_template.Options(bos='off')]
  if name == 'Qwen3':
    found += [chat_template.Options('', 'off'), chat_template.Options('', 'on')]
  return found


# With added tokens, few backends differ; that of Llama 2 puts spaces there.
_FAST = ('Qwen3', 'Phi-3', 'Llama 2, base')


@pytest.mark.parametrize(
  ('name', 'tagged'),
  [
    pytest.param(
      name,
      tagged,
      marks=() if tagged == 'plain' or name in _FAST else pytest.mark.slow,
    )
    for name in families.FAMILIES
    for tagged in _TAGGED
  ],
)
def test_dialogues_are_those_of_a_slow_reader(name, tagged, tmp_path):
  family = families.save(name, tmp_path, **_TAGGED[tagged])
  reader = _Reader(tmp_path, family)
  loaded = tokenizer_lib.Tokenizer.load(tmp_path)
  automaton = stops.build(
    loaded.token_bytes(),
    stop_strings=search.SearchEnvironment.stop_strings,
    eos_ids=sorted(reader.ends),
  )
  others = [*reader.ends, *map(reader.ids_of, family.special)]
  rng = random.Random(f'{name} {tagged}')
  for options in _options(name):
    tokenizer = loaded.with_prompts(options)
    streams = [_streams(rng, tokenizer, others) for _ in range(_ROWS)]
    retriever = fakes.FakeRetriever(_passages)
    environment = dialogues.search_environment(retriever)
    questions = [dialogues.question(_words(rng, 9)) for _ in range(_ROWS)]
    rows = _collected(streams, automaton, environment, questions, tokenizer)
    batch = pack.pack(rows, length_bucket=1)
    asked = []
    for number, row in enumerate(rows):
      prompt = reader.prompt(environment.prompt(questions[number]), options)
      tokens, mask = _read(reader, prompt, streams[number], row, asked)
      length = len(tokens)
      assert batch.tokens_BL[number, :length].tolist() == tokens
      turns = batch.turn_ids_BL[number]
      assert turns[:length].tolist() == mask and not turns[length:].any()
      assert (batch.loss_mask_BL[number] == (turns > 0)).all()
    assert sorted(query for _, query in retriever.calls) == sorted(asked)


def _collected(streams, automaton, environment, questions, tokenizer):
  """Returns trajectories whose turns end where the automaton ends them."""

  def cut(stream):
    state = automaton.START
    for count, token_id in enumerate(stream, 1):
      state = automaton.next_state_ZV[state, token_id]
      if state == automaton.stopped:
        return np.array(stream[:count], np.int32)
    return np.array(stream, np.int32)

  engine = dialogues.scripted.ScriptedEngine(
    [[cut(stream) for stream in row] for row in streams], 10_000
  )
  with dialogues.collector(
    engine, environment, tokenizer=tokenizer, **_LIMITS
  ) as made:
    return made.collect(questions, keys=None)


def _read(reader, prompt, streams, row, asked):
  """Returns tokens and turn ids of a dialogue; compares its turns."""
  tokens, mask = list(prompt), [0] * len(prompt)
  for number, turn in enumerate(row.turns):
    written, text = reader.turn(tokens, streams[number])
    action, content = reader.action(text)
    assert (turn.token_ids.tolist(), turn.action) == (written, action)
    tokens += written
    mask += [number + 1] * len(written)
    observation = ''
    if action == 'answer' or number == _MAX_TURNS:
      assert row is not None and number == len(row.turns) - 1
    else:
      observation = reader.spaced(_observed(action, content))
      asked += [content] if action == 'search' else []
    ids = turn.observation_ids.tolist()
    expected = reader.text(tokens) + observation
    tokens += ids
    mask += [0] * len(ids)
    assert reader.text(tokens) == expected
    # A tag that is a token of its own is that token here, too.
    for tag in families.TAGS:
      known = reader.ids_of(tag)
      if known in reader.added:
        assert ids.count(known) == observation.count(tag)
  answered = row.status is types.TrajectoryStatus.COMPLETED
  assert answered == (row.turns[-1].action == 'answer')
  return tokens, mask


def test_thoughts_stay_where_a_template_would_remove_them(tmp_path):
  families.save('Qwen3', tmp_path, added=families.TAGS)
  tokenizer = tokenizer_lib.Tokenizer.load(tmp_path)
  environment = dialogues.search_environment(fakes.FakeRetriever(_passages))
  turns = [
    '<think> a lake </think><search> it </search>',
    '<answer> x </answer>',
  ]
  encoded = [tokenizer.encode_text(x, tags=families.TAGS) for x in turns]
  engine = dialogues.scripted.ScriptedEngine([encoded], 10_000)
  with dialogues.collector(
    engine, environment, tokenizer=tokenizer, **_LIMITS
  ) as made:
    (row,) = made.collect([dialogues.question('Who?')], keys=None)
  first, second = row.turns
  parts = [row.prompt_ids, first.token_ids, first.observation_ids]
  text = tokenizer.decode(np.concatenate([*parts, second.token_ids]))
  prompt = tokenizer.decode(row.prompt_ids)
  observation = _observed('search', 'it')
  assert text == prompt + turns[0] + observation + turns[1]
  # The same dialogue as messages would have lost what the policy wrote.
  messages = [
    {'role': 'user', 'content': row.question.text},
    {'role': 'assistant', 'content': turns[0]},
    {'role': 'user', 'content': observation},
  ]
  rendered = families.loaded(tmp_path).apply_chat_template(
    messages, tokenize=False
  )
  assert '<search> it </search>' in rendered and 'a lake' not in rendered
