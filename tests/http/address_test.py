"""Checks of URLs, and the messages about those that are refused."""

import pytest

from stppo_jax.http import address


@pytest.mark.parametrize(
  ('url', 'base'),
  [
    ('http://127.0.0.1:8000', 'http://127.0.0.1:8000'),
    ('https://search.example/a/', 'https://search.example/a'),
    # The path of the endpoint is dropped.
    ('http://[::1]:80/v1', 'http://[::1]:80'),
    ('http://h/a/v1/', 'http://h/a'),
  ],
)
def test_good_urls_are_accepted_and_shortened(url, base):
  assert address.check_url(url, token_variable='TOKEN') is None
  assert address.base_url(url, suffix='/v1', token_variable='TOKEN') == base


@pytest.mark.parametrize(
  'url',
  [
    *('', 'localhost:8000', 'ftp://host/', 'file:///etc/passwd'),
    *('http://', 'http://:80', 'http://[::1'),
    *('http://host:port', 'http://host:99999', 'http://host:0'),
    *('http://host/?q=1', 'http://host/#a', 'http://host/a b', 'http://host\n'),
    'http://user:secret@host',
  ],
)
def test_bad_urls_are_refused_in_one_line(url):
  problem = address.check_url(url, token_variable='SOME_TOKEN')
  assert problem and '\n' not in problem and 'secret' not in problem
  assert ('@' in url) == ('SOME_TOKEN' in problem)
  with pytest.raises(ValueError):
    address.base_url(url, suffix='', token_variable='TOKEN')
