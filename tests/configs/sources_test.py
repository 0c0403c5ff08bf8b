"""Every default that differs from its source does so for a reason."""

import pytest

from docs import descriptions
from docs import sources
from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import defaults

_NAMES = pytest.mark.parametrize('name', sources.SOURCES)


def test_every_algorithm_has_a_source_or_is_our_version():
  ours = {
    name
    for name, text in descriptions.ALGORITHMS.items()
    if text.sure.startswith('Our choice.')
  }
  assert sources.SOURCES.keys() | ours == algorithms.ALGORITHMS.keys()
  assert not sources.SOURCES.keys() & ours


@_NAMES
def test_every_difference_has_a_reason_and_every_reason_a_difference(name):
  assert sources.SOURCES[name].why.keys() == sources.differences(name).keys()


@_NAMES
def test_sources_speak_of_keys_that_exist(name):
  known = settings.flatten(base.get_config(name))
  for key, value in sources.SOURCES[name].values.items():
    section = key.rpartition('.')[0]
    # Another choice of the section may have other options.
    options = {
      option
      for choice in defaults.DEFAULTS.get(section.split('.')[-1], {}).values()
      for option in choice
    }
    assert key in known or key.rpartition('.')[2] in options
    assert key not in known or type(value) is type(known[key])


@_NAMES
def test_a_source_says_what_it_knows(name):
  source = sources.SOURCES[name]
  assert source.values and source.where
  assert source.sure in ('read in code', 'read in the paper', 'a definition')
  for sentence in (*source.why.values(), *source.notes):
    assert sentence.endswith('.')
