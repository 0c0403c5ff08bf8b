"""Compiled programs are kept, also the short ones."""

import jax
import pytest

from stppo_jax.parallel import compilation


@pytest.fixture
def settings(monkeypatch):
  """The settings of jax, which are restored."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  monkeypatch.delenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS')
  jax.config.update(names[1], 1.0)
  yield lambda: tuple(getattr(jax.config, name) for name in names)
  for name, value in before.items():
    jax.config.update(name, value)


def test_a_folder_of_the_environment_gets_short_programs_too(
  settings, tmp_path, monkeypatch
):
  own, shared = tmp_path / 'own', str(tmp_path / 'shared')
  jax.config.update('jax_compilation_cache_dir', shared)
  compilation.keep(own)
  assert settings() == (shared, 0.0)
  jax.config.update('jax_compilation_cache_dir', None)
  compilation.keep(own)
  assert settings() == (str(own), 0.0)
  # Unless somebody wants it otherwise.
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '5')
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 5.0)
  compilation.keep(own)
  assert settings() == (str(own), 5.0)
