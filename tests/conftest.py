"""Every test runs on eight virtual CPU devices, alone with itself.

The environment is set before jax is imported anywhere.
"""

import gc
import importlib.metadata
import os
import pathlib
import signal

import hypothesis
import pytest

# Garbage is seldom collected: a pass over all objects takes half a second.
gc.set_threshold(20_000, 10, 100)

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_NUM_DEVICES = 8

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_NUM_CPU_DEVICES'] = str(_NUM_DEVICES)
# Threads of XLA's pool. A collective holds one per device until all have come:
# with no more threads than devices, two programs in flight can starve it.
os.environ['NPROC'] = str(4 * _NUM_DEVICES)
# Of torch: threads that wait for each other in a loop are slow on a busy
# machine.
os.environ['OMP_NUM_THREADS'] = '1'
# Compiled programs outlive a run of the tests, also in their subprocesses.
os.environ.setdefault(
  'JAX_COMPILATION_CACHE_DIR', str(_ROOT / '.cache' / 'jax')
)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
# [B] + [B, L] is a bug far more often than a wish.
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
# Compiling is most of the time of the tests. The older of two generators of
# fused loops, and a program in one piece instead of 32, take the compiler half
# the time; without fused multiply-adds, that generator rounds like operations
# that are not fused. Later compilers do not have it, and an unknown flag ends
# the process. Flags of the caller come last and win.
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  os.environ['XLA_FLAGS'] = ' '.join(
    (
      '--xla_cpu_use_fusion_emitters=false',
      '--xla_cpu_parallel_codegen_split_count=1',
      '--xla_cpu_max_isa=AVX',
      os.environ.get('XLA_FLAGS', ''),
    )
  )
os.environ['HF_HUB_OFFLINE'] = '1'
# gcsfs would ask for the kind of a bucket by gRPC, which no stand-in answers.
os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'
# Where transformers copies the code of a folder that it is told to trust.
os.environ['HF_MODULES_CACHE'] = str(_ROOT / '.cache' / 'hf_modules')
# Under `nohup` it is ignored, and every process of a test would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# A shell lets jobs in the background ignore SIGINT; run.sh could not trap it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _name in ('http_proxy', 'https_proxy', 'all_proxy', 'no_proxy'):
  os.environ.pop(_name, None)
  os.environ.pop(_name.upper(), None)

import jax  # noqa: E402

from stppo_jax import streams  # noqa: E402

# Compiling is most of the time of the tests. What they run is small, so the
# compiler's expensive passes cost more than they save. Subprocesses are left
# alone: they run larger models, for which it is the other way round.
jax.config.update('jax_disable_most_optimizations', True)

# The same cases in every run, and no failure because a machine is busy.
hypothesis.settings.register_profile('tests', deadline=None, derandomize=True)
hypothesis.settings.load_profile('tests')

# Of the 65,530 pieces of memory that Linux grants a process; a compiled program
# takes some ten, and the next one more than granted crashes the compiler.
_MANY_PIECES = 45_000


# They train, or collect as a run does, with programs that take long to compile.
_OF_RUNS = (
  'tests/tools/',
  'tests/commands/',
  'tests/docs_test.py',
  'tests/learner/learner_test.py',
  'tests/training/',
)


# They save and restore. Orbax reads the leaves of a checkpoint at once, and
# gives up at the first that is damaged: the reads still under way then die
# without a listener, now or a little later.
_OF_CHECKPOINTS = ('tests/records/', 'tests/training/')
_UNHEARD = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


def pytest_collection_modifyitems(items):
  """Puts the tests of runs first, so that one worker has their programs.

  Each of two workers begins with half of the list.
  """
  items.sort(key=lambda item: not item.nodeid.startswith(_OF_RUNS))
  for item in items:
    if item.nodeid.startswith(_OF_CHECKPOINTS):
      item.add_marker(_UNHEARD)


def pytest_collection_finish():
  """Leaves modules and tests, which live to the end, out of later passes."""
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='session')
def _storage():
  """A stand-in for Google's storage: TensorStore looks for one only once."""
  from tests.storage import emulator

  with emulator.served() as storage:
    yield storage


@pytest.fixture
def google(_storage, monkeypatch):
  """An empty stand-in for Google's storage, whose only bucket is `mine`."""
  _storage.reset()
  for name, value in _storage.environment.items():
    monkeypatch.setenv(name, value)
  yield _storage
  _storage.reset()


@pytest.fixture
def hub(tmp_path, monkeypatch):
  """An empty stand-in for the Hugging Face Hub, with an empty cache."""
  from huggingface_hub import constants

  from stppo_jax import hub as hub_lib
  from tests.storage import hub as stand_in

  for cached in hub_lib.CACHED:
    cached.cache_clear()  # as in another process
  with stand_in.served() as served:
    # The library reads its environment when it is imported.
    for name, value in {
      'ENDPOINT': served.address,
      'HUGGINGFACE_CO_URL_TEMPLATE': served.address
      + '/{repo_id}/resolve/{revision}/{filename}',
      'HF_HUB_CACHE': str(tmp_path / 'hub'),
      'HF_HUB_OFFLINE': False,
      'HF_HUB_DISABLE_XET': True,
      'HF_TOKEN_PATH': str(tmp_path / 'token'),
    }.items():
      monkeypatch.setattr(constants, name, value)
    yield served
  for cached in hub_lib.CACHED:
    cached.cache_clear()


@pytest.fixture
def refused(capsys):
  """Returns a function that gives the one line that refuses a command."""
  from stppo_jax import __main__

  def refused(*command, main=__main__.main):
    capsys.readouterr()
    assert main([*map(str, command)]) == 2
    out, err = capsys.readouterr()
    assert out == '' and err.count('\n') == 1, err
    return err

  return refused


@pytest.fixture
def double_precision():
  """Computes in float64 during the test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture
def said():
  """Returns the lines that the package logs during the test."""
  lines = []
  with streams.logged(lines.append):
    yield lines


@pytest.fixture(scope='module', autouse=True)
def _little_left_behind():
  """Leaves little behind each module.

  Compiled programs are forgotten before there are too many. What the module
  keeps is not looked at again by the collector of later ones.
  """
  yield
  pieces = pathlib.Path('/proc/self/maps')
  if pieces.exists() and pieces.read_bytes().count(b'\n') > _MANY_PIECES:
    jax.clear_caches()
  if gc.get_count()[2] > 1:  # hundreds of thousands of new objects
    gc.collect()
    gc.freeze()


@pytest.fixture(scope='session')
def finished(tmp_path_factory) -> pathlib.Path:
  """Returns the folder of an uninterrupted run of three steps."""
  # Imported late: most tests need no run.
  from tests.training import runs

  workdir = tmp_path_factory.mktemp('finished')
  assert runs.train(workdir) == 0
  return workdir
