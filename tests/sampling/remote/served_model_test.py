"""A run accepts servers that suit it and says what is wrong with others."""

import pytest

from stppo_jax.sampling.remote import client as client_lib
from tests.sampling.remote import fake_servers


@pytest.mark.parametrize(
  ('changes', 'line'),
  [
    ({'model': 'large'}, "serves tiny, not 'large'"),
    ({'max_length': 41}, 'holds 40 tokens, fewer than max_length=41'),
  ],
)
def test_a_server_that_does_not_suit_is_refused(served, changes, line):
  with pytest.raises(client_lib.EngineUnsuited, match=line) as caught:
    served.engine(**changes)
  assert caught.value.exit_code == 2 and '\n' not in str(caught.value)


def test_a_server_without_ids_is_refused_at_the_start(served):
  served.faults.answers = [fake_servers.change_choice(token_ids=None)]
  with pytest.raises(client_lib.EngineUnsuited, match='no token ids'):
    served.vllm_engine()


def test_an_unknown_kind_of_server_is_refused(served):
  served.model.kind = 'llamacpp'
  with pytest.raises(client_lib.EngineUnsuited, match='sglang, vllm'):
    served.engine()


def test_a_server_that_does_not_report_its_weights_is_refused(served):
  served.faults.missing = '/model_info'
  with pytest.raises(client_lib.EngineUnsuited, match='status 404'):
    served.engine()


def test_log_probabilities_at_another_temperature_are_refused(served):
  served.vllm_engine()
  with pytest.raises(client_lib.EngineUnsuited, match='temperature=1.3'):
    served.engine()


def test_a_server_that_does_not_answer_is_unreachable(served):
  with pytest.raises(client_lib.EngineUnreachable) as caught:
    served.engine(url='http://127.0.0.1:9', timeout=0.3)
  assert caught.value.exit_code == 75 and '\n' not in str(caught.value)


@pytest.mark.parametrize('url', ['', 'ftp://host', 'http://u:p@host'])
def test_bad_urls_are_refused(url):
  with pytest.raises(ValueError):
    client_lib.EngineClient(url, timeout=1.0, retries=0)


def test_the_client_sends_the_token_of_the_environment(served, monkeypatch):
  monkeypatch.setenv(client_lib.TOKEN_VARIABLE, 'secret')
  client = client_lib.EngineClient(served.url + '/v1/', timeout=5.0, retries=0)
  assert client.url == served.url
  assert b'tiny' in served.loop.run(client.get('/v1/models', bytes))
  assert served.faults.tokens == ['Bearer secret']
