"""Every default that differs from its source does so for a reason."""

import pytest

from docs import descriptions
from docs import sources
from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import defaults


def test_every_algorithm_has_a_source_or_is_our_version():
  ours = {
    name
    for name, text in descriptions.ALGORITHMS.items()
    if text.sure.startswith('Our choice.')
  }
  assert sources.SOURCES.keys() | ours == algorithms.ALGORITHMS.keys()
  assert not sources.SOURCES.keys() & ours


@pytest.mark.parametrize('name', sources.SOURCES)
def test_a_source_says_what_it_knows_of_keys_that_exist(name):
  source = sources.SOURCES[name]
  # Every difference has a reason, and every reason a difference.
  assert source.why.keys() == sources.differences(name).keys()
  assert source.values and source.where
  assert source.sure in ('read in code', 'read in the paper', 'a definition')
  for sentence in (*source.why.values(), *source.notes):
    assert sentence.endswith('.')
  known = settings.flatten(base.get_config(name))
  for key, value in source.values.items():
    section = key.rpartition('.')[0]
    # Another choice of the section may have other options.
    options = {
      option
      for choice in defaults.DEFAULTS.get(section.split('.')[-1], {}).values()
      for option in choice
    }
    assert key in known or key.rpartition('.')[2] in options
    assert key not in known or type(value) is type(known[key])
