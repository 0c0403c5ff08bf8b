"""The requests to servers of each kind, and how replies are read."""

import json

import numpy as np
import pytest

from stppo_jax.sampling.remote import dialects
from tests.sampling.remote import fake_servers


@pytest.mark.parametrize(
  ('reply', 'line'),
  [
    ({'output_ids': [4]}, 'other token ids'),
    ({'output_ids': None}, 'other token ids'),
    ({'prompt_tokens': 4}, 'another number of tokens'),
    ({'output_token_logprobs': None}, 'no log-probabilities'),
    ({'output_token_logprobs': [7]}, 'malformed'),
    ({'finish_reason': {'type': 'abort'}}, "finish_reason='abort'"),
  ],
)
def test_sglang_replies(reply, line):
  dialect = dialects.DIALECTS['sglang']
  request = dialects.Request(
    [0, 1, 2], 5, fake_servers.SAMPLING, 9, fake_servers.STOPS, (1,)
  )

  def encoded(**changes):
    ids = changes.pop('output_ids', [7, 8])
    meta_info = {
      'finish_reason': {'type': 'stop', 'matched': 8},
      'prompt_tokens': 3,
      'output_token_logprobs': [[-0.5, 7, None], [-1.5, 8, None]],
      'weight_version': 'v',
    }
    meta = meta_info | changes
    return json.dumps({'output_ids': ids, 'meta_info': meta}).encode()

  answer = dialect.read(request, encoded())
  assert answer == dialects.Answer([7, 8], [-0.5, -1.5], 'v')
  with pytest.raises(ValueError, match=line):
    dialect.read(request, encoded(**reply))


def test_vllm_requests_set_every_field_that_a_model_could_decide():
  request = dialects.Request(
    [3], 5, fake_servers.SAMPLING, 9, fake_servers.STOPS, (1,)
  )
  body = dialects.DIALECTS['vllm'].body('tiny', request)
  assert body == {
    'model': 'tiny',
    'prompt': [3],
    'max_tokens': 5,
    'temperature': 1.3,
    'top_k': -1,
    'top_p': 1.0,
    'min_p': 0.0,
    'n': 1,
    'seed': 9,
    'presence_penalty': 0.0,
    'frequency_penalty': 0.0,
    'repetition_penalty': 1.0,
    'stop': ['</search>', 'ca'],
    'stop_token_ids': [1],
    'include_stop_str_in_output': True,
    'ignore_eos': True,
    'add_special_tokens': False,
    'skip_special_tokens': False,
    'spaces_between_special_tokens': False,
    'logprobs': 1,
    'return_token_ids': True,
  }


def test_seeds_differ_by_key_and_position():
  seeds = {
    dialects.seed_of(np.array(key, np.uint32), position)
    for key in ((0, 0), (0, 1), (1, 0), (2**32 - 1, 7))
    for position in range(50)
  }
  assert len(seeds) == 200
  assert all(0 <= seed < 2**31 for seed in seeds)
  again = dialects.seed_of(np.array([0, 1], np.uint32), 3)
  assert again == dialects.seed_of(np.array([0, 1], np.uint32), 3)
