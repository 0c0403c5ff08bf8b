"""`evaluate` equals a loop written with `transformers`; needs torch.

The loop generates each turn greedily from all that was said so far, with
nothing kept from the turn before, one dialogue after the other.
"""

import json
import shutil

import pytest

from stppo_jax import __main__
from stppo_jax.data import passages as passages_lib
from stppo_jax.data import readers
from stppo_jax.envs import actions
from stppo_jax.envs import prompts
from stppo_jax.envs import rewards
from stppo_jax.retrieval.indexes import bm25
from tests.training import question_files
from tests.training import runs

torch = pytest.importorskip('torch', exc_type=ImportError)
pytestmark = pytest.mark.torch

import transformers  # noqa: E402

_QUICKSTART = runs.REPO / 'assets' / 'quickstart'
_TEMPLATE = runs.REPO / 'configs' / 'prompts' / 'quickstart.txt'
_MAX_TURNS, _MAX_TURN_TOKENS, _MAX_LENGTH = 2, 24, 192
_MAX_OBSERVATION_TOKENS = 64
_TOPK = 2
_TAGS = ('<search>', '</search>', '<answer>', '</answer>')


def _save_random_model(folder):
  """Saves random weights that often write tags, and a tokenizer with them."""
  for path in _QUICKSTART.iterdir():
    if path.name.startswith(('tokenizer', 'special')):
      shutil.copy(path, folder)
  torch.manual_seed(3)
  config = transformers.Qwen2Config(
    vocab_size=290,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
  )
  model = transformers.Qwen2ForCausalLM(config).float().eval()
  tokenizer = _tokenizer(folder)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
    for tag in _TAGS:
      (row,) = tokenizer.encode(tag, add_special_tokens=False)
      model.lm_head.weight[row] *= 2.5  # a larger row wins more often
  model.save_pretrained(folder)
  return model


def _tokenizer(folder):
  return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


class _Loop:
  """Answers questions with a model of `transformers`."""

  def __init__(self, model, tokenizer, passages):
    self._model, self._tokenizer = model, tokenizer
    self._index = bm25.Bm25Index(passages)
    self._template = prompts.load_template(str(_TEMPLATE))

  def _ids(self, text):
    return self._tokenizer.encode(text, add_special_tokens=False)

  def dialogue(self, question):
    """Returns the texts of the turns."""
    ids, texts = self._ids(prompts.fill(self._template, question)), []
    for turn in range(_MAX_TURNS + 1):
      new = self._generate(ids, min(_MAX_TURN_TOKENS, _MAX_LENGTH - len(ids)))
      ids = ids + new
      texts.append(self._tokenizer.decode(new))
      action = actions.parse_action(texts[-1])
      if action.kind == 'answer' or turn == _MAX_TURNS:
        break
      ids = ids + self._observe(action)
      if len(ids) >= _MAX_LENGTH:
        break
    return texts

  def _generate(self, ids, room):
    def stop(input_ids, scores, **_):
      text = self._tokenizer.decode(input_ids[0, len(ids) :])
      return torch.tensor([any(s in text for s in actions.STOP_STRINGS)])

    prompt = torch.tensor([ids])
    out = self._model.generate(
      prompt,
      attention_mask=torch.ones_like(prompt),
      max_new_tokens=room,
      do_sample=False,
      eos_token_id=self._tokenizer.eos_token_id,
      pad_token_id=self._tokenizer.eos_token_id,
      stopping_criteria=[stop],
    )
    return out[0, len(ids) :].tolist()

  def _observe(self, action):
    if action.kind != 'search':
      return self._ids(prompts.correction().text)
    (found,) = self._index.search([action.content], _TOPK)
    text = prompts.information(found)
    first, last = self._ids(text.prefix), self._ids(text.suffix)
    room = _MAX_OBSERVATION_TOKENS - len(first) - len(last)
    return [*first, *self._ids(text.body)[:room], *last]


def test_answers_equal_those_of_a_loop_of_transformers(tmp_path):
  question_files.write(tmp_path, 32)
  home, out = tmp_path / 'model', tmp_path / 'results'
  home.mkdir()
  model = _save_random_model(home)
  changes = {
    'data.root': tmp_path,
    'data.corpus': 'corpus.jsonl',
    'env.max_turns': _MAX_TURNS,
    'env.max_turn_tokens': _MAX_TURN_TOKENS,
    'env.max_observation_tokens': _MAX_OBSERVATION_TOKENS,
    'env.max_length': _MAX_LENGTH,
    'env.prompt_template': _TEMPLATE,
    'retrieval.topk': _TOPK,
    'rollout.slots': 16,
  }
  command = [
    'evaluate',
    f'--checkpoint={home}',
    f'--sets={tmp_path}/questions.jsonl',
    f'--out={out}',
    *(f'--config.{key}={value}' for key, value in changes.items()),
  ]
  assert __main__.main(command) == 0
  lines = (out / 'dialogues.jsonl').read_text().splitlines()
  ours = {row['id']: row for row in map(json.loads, lines)}
  passages = passages_lib.read_corpus(tmp_path / 'corpus.jsonl')
  loop = _Loop(model, _tokenizer(home), passages)
  questions = readers.read_questions(tmp_path / 'questions.jsonl')
  assert len(ours) == len(questions) == 64
  answers, searches = [], 0
  for question in questions:
    texts = loop.dialogue(question)
    row = ours[question.id]
    assert [turn['text'] for turn in row['turns']] == texts
    answers.append(rewards.response_answer('', texts))
    assert row['answer'] == answers[-1]
    searches += rewards.count_searches(texts)
  # Random weights do all that a policy can do.
  given = [answer for answer in answers if answer is not None]
  assert 5 < len(given) < 60 and len(set(given)) > 3
  assert searches > 5
