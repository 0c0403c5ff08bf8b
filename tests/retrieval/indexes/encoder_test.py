"""The encoder against `transformers`, and what it refuses."""

import json

import numpy as np
import pytest

from stppo_jax.retrieval.indexes import encoder
from tests.retrieval import encoders

_TEXTS = [
  'query: the capital of france',
  '',
  'passage: Paris\nParis is the capital of France. ' + 'the paris of ' * 40,
  'X',
  'half a pair \ud800',
]


@pytest.mark.torch
@pytest.mark.parametrize(
  ('hidden_size', 'num_heads'), [(768, 12), (384, 12)], ids=['e5', 'minilm']
)
def test_it_equals_transformers(tmp_path, hidden_size, num_heads):
  torch = pytest.importorskip('torch', exc_type=ImportError)
  import transformers

  fields = encoders.config(hidden_size, num_heads=num_heads)
  folder = encoders.write(tmp_path / 'model', fields)
  model = transformers.BertModel.from_pretrained(
    folder, add_pooling_layer=False, attn_implementation='eager'
  ).eval()
  tokenizer = transformers.BertTokenizer(str(folder / 'vocab.txt'))
  texts = [text.replace('\ud800', '\ufffd') for text in _TEXTS]
  inputs = tokenizer(
    texts, padding=True, truncation=True, max_length=64, return_tensors='pt'
  )
  with torch.no_grad():
    states_BLD = model(**inputs).last_hidden_state
  mask_BL1 = inputs['attention_mask'][..., None].float()
  mean_BD = (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1)
  expected_BD = torch.nn.functional.normalize(mean_BD, dim=1).numpy()
  ours_BD = encoder.TextEncoder(folder).encode(_TEXTS)
  np.testing.assert_allclose(ours_BD, expected_BD, atol=1e-5)


def test_a_vector_depends_on_its_text_and_the_weights_only(tmp_path):
  folder = encoders.write(tmp_path / 'encoder')
  model = encoder.TextEncoder(folder)
  together_BD = model.encode(_TEXTS)
  assert together_BD.shape == (5, model.size) == (5, 32)
  np.testing.assert_allclose(
    np.linalg.norm(together_BD, axis=1), np.ones(5), rtol=1e-5
  )
  # Weights that lie inside a larger model are the same.
  inside = encoders.write(tmp_path / 'inside', prefix='bert.')
  other = encoder.TextEncoder(inside)
  for text, vector in zip(_TEXTS[::2], together_BD[::2]):
    np.testing.assert_allclose(other.encode([text])[0], vector, atol=1e-5)
  assert len(model.encode([])) == 0
  assert model.sha256 == encoder.TextEncoder(folder).sha256 != other.sha256


def _change(name, **fields):
  def change(folder):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | fields))

  return change


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda f: (f / 'config.json').unlink(), 'config.json is missing'),
    (_change('config.json', model_type='t5'), "model_type='t5': only 'bert'"),
    (_change('config.json', hidden_act='relu'), "only 'gelu' is supported"),
    (_change('config.json', layer_norm_eps=None), 'sizes must be numbers'),
    (_change('config.json', num_attention_heads=5), 'must be a multiple of'),
    (_change('config.json', intermediate_size=64), '128.*, expected'),
    (_change('config.json', num_hidden_layers=3), 'encoder.layer.2.* missing'),
    (
      _change('1_Pooling/config.json', pooling_mode_mean_tokens=False),
      'only the mean over tokens',
    ),
    (lambda f: (f / 'vocab.txt').unlink(), 'no tokenizer.json and no vocab'),
    (lambda f: (f / 'tokenizer.json').write_text('{'), 'no tokenizer'),
    (lambda f: (f / 'model.safetensors').unlink(), 'no model.safetensors'),
  ],
)
def test_a_folder_that_is_no_encoder_is_one_line(tmp_path, change, message):
  folder = encoders.write(tmp_path / 'model')
  change(folder)
  with pytest.raises(ValueError, match=message) as error:
    encoder.TextEncoder(folder)
  assert '\n' not in str(error.value)
