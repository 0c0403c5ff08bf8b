"""Plans of small models counted by hand, of published ones on 64 devices."""

import json
import pathlib
import re

import jax
import pytest

from stppo_jax import __main__
from stppo_jax.commands.flags import configuration
from stppo_jax.models import functional
from stppo_jax.tools.plan import plan
from stppo_jax.training import engines
from stppo_jax.training import model_files
from tests import processes
from tests.models import tiny
from tests.sampling import tiny_engine
from tests.training import runs

_PUBLISHED = pathlib.Path(__file__).parents[1] / 'models' / 'published'
_GIB = 2**30
_LINE = re.compile(r'^ *([\d.]+) GiB  (.*)$', re.MULTILINE)
# Weights of the tiny model of `runs`: width 16, one layer, two heads of 8, one
# key/value head, biases, tied.
_LAYER = 16 * 16 + 16 * 8 * 2 + 16 * 16 + 16 + 8 * 2 + 3 * 16 * 24 + 2 * 16


def _plan(capsys, *flags, algorithm='st_ppo', where='--devices=8'):
  code = __main__.main(['plan', *runs.flags(algorithm), where, *flags])
  out, err = capsys.readouterr()
  return code, out, err


def _sizes(out):
  """Returns name to GiB of the printed lines."""
  return {name: float(size) for size, name in _LINE.findall(out)}


def test_bytes_of_a_small_model():
  found = plan.make(runs.config(mesh__fsdp=2), length=128, loss_fraction=0.5)
  assert found.axes == {'data': 4, 'fsdp': 2, 'expert': 1, 'tensor': 1}
  sizes = found.held.sizes
  # All but norms and biases are cut in two; the value head is one column.
  whole = 4 * (16 + 8 * 2 + 3 * 16)
  embedding = sizes['policy parameters'] - 4 * (_LAYER + 16) / 2 - whole / 2
  assert embedding > 0
  assert embedding % (4 * 16 / 2) == 0  # vectors of half a width
  assert sizes['value parameters'] - sizes['policy parameters'] == 4 * 16 / 2
  assert sizes['reference'] == sizes['policy parameters']
  for name in ('policy', 'value'):
    # Two moments and a counter.
    expected = 2 * sizes[f'{name} parameters'] + 4
    assert sizes[f'{name} optimizer'] == expected
  # The engine has all weights on every device, and two of the 16 slots: keys
  # and values of 128 tokens, one layer, one head of 8.
  collecting = dict(found.held.collecting)
  weights = collecting.pop('weights of the engine')
  assert weights == 2 * sizes['policy parameters'] - whole
  cache = collecting.pop(engines.CACHE)
  assert cache == 2 * 2 * 128 * 8 * 4
  # They are dropped while it learns, and the larger of the two counts.
  assert collecting == sizes
  assert found.total == sum(sizes.values()) + sum(found.estimated.values())
  trained = sizes['policy parameters'] + sizes['value parameters']
  assert found.estimated['gradients'] == trained


def test_devices_that_only_collect_hold_the_engine_and_the_next_weights():
  divided = {'mesh__collect_fraction': 0.5, 'rollout__steps_ahead': 1}
  found = plan.make(runs.config(**divided), length=128, loss_fraction=0.5)
  assert found.axes == {'data': 4, 'fsdp': 1, 'expert': 1, 'tensor': 1}
  beside = runs.config(mesh__data=8, rollout__steps_ahead=1)
  together = plan.make(beside, length=128, loss_fraction=0.5)
  ours, theirs = dict(found.held.collecting), dict(together.held.sizes)
  # Devices that do both at a time hold all of it all the time.
  assert together.held.collecting == theirs
  assert theirs['policies of the next steps'] == 2 * theirs['policy parameters']
  weights = theirs.pop('weights of the engine')
  cache = theirs.pop('keys and values of the engine')
  assert found.held.sizes == theirs
  assert ours == {
    'weights of the engine': weights,
    'weights of the next steps': weights,
    'keys and values of the engine': 2 * cache,  # on half the devices
  }
  # Turns of two versions are written, and a third one may have come.
  swaps = {'rollout__turn_swaps': 'keep'}
  for ahead, count in ((1, 1), (2, 2), (3, 2)):
    beside = runs.config(**swaps, mesh__data=8, rollout__steps_ahead=ahead)
    held = plan.make(beside, length=128, loss_fraction=0.5).held
    assert held.sizes[engines.OLDER] == count * weights
    assert held.collecting == held.sizes
  apart = plan.make(
    runs.config(**swaps, **divided), length=128, loss_fraction=0.5
  )
  assert apart.held == found.held  # they are those of the next steps
  # They collect while the others learn.
  collect = sum(found.phases[name].expected for name in ('extend', 'decode'))
  learn = sum(part.expected for part in found.phases.values()) - collect
  assert found.seconds[1] == pytest.approx(max(collect, learn))
  assert found.phases['update'].computed == pytest.approx(
    2 * together.phases['update'].computed
  )


def test_hosts_that_only_collect_are_planned_beside_the_others(capsys):
  def made(**changes):
    settings = runs.config(mesh__data=8, rollout__steps_ahead=1, **changes)
    return plan.make(settings, length=128, loss_fraction=0.5)

  found, together = made(mesh__collectors=2), made()
  theirs = dict(together.held.sizes)
  weights = theirs.pop('weights of the engine')
  cache = theirs.pop('keys and values of the engine')
  # All devices learn, and have no engine.
  fetched = {'weights to be fetched': theirs['policy parameters']}
  assert found.held.sizes == theirs | fetched
  assert found.held.collecting == {
    'weights of the engine': weights,
    'weights of the next steps': weights,
    'keys and values of the engine': cache / 2,  # two hosts share the rows
  }
  assert (found.slots, together.slots) == (8, 16)
  assert (found.num_chips, together.num_chips) == (24, 8)
  assert found.phases['update'] == together.phases['update']
  assert together.phases.keys() - found.phases.keys() == {'publish'}
  collect = found.phases['extend'].expected + found.phases['decode'].expected
  learn = found.phases['annotate'].expected + found.phases['update'].expected
  assert found.seconds[1] == pytest.approx(max(collect, learn))
  flags = '--config.mesh.collectors=2', '--config.rollout.steps_ahead=1'
  code, out, _ = _plan(capsys, *flags, '--compile=False')
  assert code == 0 and 'Memory of a device that collects' in out
  assert 'Each of 2 more hosts decodes 8 trajectories at a time' in out


def test_decoding_copies_the_keys_and_values_of_active_slots():
  def made(**changes):
    return plan.make(runs.config(**changes), length=128, loss_fraction=0.5)

  some = {'rollout__deterministic': False}
  cache = made().held.collecting['keys and values of the engine']
  assert made().held.copied == made(**some).held.copied == cache
  # A device has two of the 16 slots, of which a call may be on one.
  assert made(**some, rollout__batch_rows=1).held.copied == cache / 2
  # Nothing is copied during an update, which needs more here.
  assert made(**some).total == made().total
  apart = {**some, 'mesh__collect_fraction': 0.5, 'rollout__steps_ahead': 1}
  long = made(**apart, env__max_length=2**20)
  assert long.held.copied == long.held.collecting[engines.CACHE]
  assert long.total == sum(long.held.collecting.values()) + long.held.copied


def test_a_copy_inside_the_compiled_decode_is_counted_once():
  def copied(batch_rows, *programs):
    config = runs.config(
      rollout__deterministic=False, rollout__batch_rows=batch_rows
    )
    found = plan.make(config, length=64, loss_fraction=0.5, programs=programs)
    return found.held.copied / found.held.collecting[engines.CACHE]

  # A device has two slots. A compiled program has the copy in its temporaries.
  assert copied(0) == 1 and copied(1) == 0.5
  assert copied(0, 'decode') == 0


def test_an_engine_computes_with_weights_of_its_dtype():
  config, placement = runs.config(), tiny_engine.placement(8)
  whole, _ = engines.sizes(config, tiny.model(), placement)
  # Two rows a device, of two layers with one key/value head of 8.
  assert whole['weights of the engine'] == 4 * _size(tiny.model())
  assert whole['keys and values of the engine'] == 2 * 2 * 2 * 128 * 8 * 4
  halved, _ = engines.sizes(config, tiny.model(dtype='bfloat16'), placement)
  assert halved == {name: size / 2 for name, size in whole.items()}


@pytest.mark.parametrize(
  ('name', 'devices', 'tensor'),
  [
    ('qwen2_5_7b', 4, 4),  # as many heads of keys as devices
    ('qwen2_5_7b', 8, 4),
    ('qwen3_30b_a3b', 8, 8),  # half as many heads of keys
  ],
)
def test_an_engine_is_cut_over_the_devices_of_a_host(name, devices, tensor):
  config = runs.config(model__path=str(_PUBLISHED / name))
  shape = model_files.shape(config, None)
  one, cut = (
    engines.sizes(config, functional.Model(shape, 'vocabulary'), where)[0]
    for where in (
      tiny_engine.placement(1),
      tiny_engine.placement(devices, tensor),
    )
  )
  for label, parts in (('weights', tensor), ('keys and values', devices)):
    of_one, of_each = (x[f'{label} of the engine'] for x in (one, cut))
    assert of_each == pytest.approx(of_one / parts, rel=0.03)


def _size(model):
  return sum(leaf.size for leaf in jax.tree.leaves(tiny.params(model)))


@pytest.mark.slow
def test_a_compiled_plan_prints_collectives_and_operations(capsys):
  # Without a value model, which takes half the time to compile.
  flags = '--hbm_gib=1e-6', '--config.mesh.fsdp=2'
  code, out, _ = _plan(capsys, *flags, algorithm='reinforce')
  assert code == 2 and '\ndoes not fit in 1e-06 GiB\n' in out
  assert re.search(r'sent by \d+ all-gather along fsdp\n', out)
  assert re.search(r'at most sent by \d+ all-reduce along data\n', out)
  assert re.search(r'[\d.]+ TFLOP  in matrix products\n', out)
  assert 'GiB  other memory of update, as compiled for CPU' in out
  assert re.search(
    r'GiB  of arguments, of which [\d.]+ GiB are updated in', out
  )


def test_a_plan_needs_no_data(capsys):
  flags = ['--config=configs/own.py', '--devices=2', '--compile=false']
  assert __main__.main(['plan', *flags]) == 0
  assert 'fits in' in capsys.readouterr().out
  # Its model has a vocabulary of the config's size.
  config = configuration.parse(flags[:1], ignored=configuration.OF_THIS_MACHINE)
  assert model_files.shape(config, None).vocab_size == 2048


# Name -> billions of parameters, with embedding and output matrix.
_PARAMETERS = {'qwen2_5_7b': 7.616, 'qwen3_30b_a3b': 30.532}


def _published(name, *flags):
  command = [
    *('-m', 'stppo_jax', 'plan', '--config=configs/base.py'),
    f'--config.model.path={_PUBLISHED / name}',
    '--config.model.dtype=bfloat16',
    *('--config.mesh.data=1', '--config.mesh.fsdp=16'),
    *('--config.mesh.tensor=4', '--config.updates.remat=full'),
    '--config.updates.microbatch_size=64',
    *flags,
  ]
  done = processes.python(*command)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize('name', ['qwen2_5_7b', 'qwen3_30b_a3b'])
def test_published_models_are_laid_out_on_64_devices(name):
  # The engine of the largest holds 57 GiB of weights on every device.
  sizes = _sizes(_published(name, '--compile=False', '--hbm_gib=160'))
  per_device = 4e9 * _PARAMETERS[name] / 64 / _GIB
  # Norms and biases are whole on every device.
  assert sizes['policy parameters'] == pytest.approx(per_device, rel=0.005)
  assert sizes['policy optimizer'] == pytest.approx(2 * per_device, rel=0.005)


@pytest.mark.parametrize(
  ('topology', 'gathers'), [('v6e:4x4', True), ('v5e:4x4', False)]
)
def test_a_frozen_base_is_gathered_once_where_it_fits(
  capsys, topology, gathers
):
  flags = [
    *('plan', '--config=configs/base.py', f'--topology={topology}'),
    *('--compile=False', '--config.model.lora.rank=16'),
    f'--config.model.path={_PUBLISHED / "qwen2_5_7b"}',
    *('--config.model.dtype=bfloat16', '--config.updates.remat=full'),
    *('--config.mesh.fsdp=4', '--config.mesh.tensor=4'),
    *('--config.updates.microbatch_size=4', '--config.rollout.slots=16'),
  ]
  assert __main__.main(flags) == 0
  out = capsys.readouterr().out
  # The layers and the output matrix in bfloat16, over four devices of `tensor`.
  table = 152064 * 3584
  base = 2 * (7.616e9 - table) / 4
  whole = _sizes(out).get('the gathered base, estimated', 0.0)
  assert whole == pytest.approx(gathers * base / _GIB, rel=0.03)
  sent = float(re.search(r'([\d.]+) GiB  sent by all-gather.* update', out)[1])
  # Two updates: otherwise, in each of 64 microbatches, twice for both models,
  # and once more for the statistics of the minibatch.
  passes = 1 if gathers else 5 * 64
  layers = 2 * (7.616e9 - 2 * table) / 4
  expected = 2 * 3 / 4 * (passes * layers + 2 * table / 4) / _GIB
  assert sent == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_the_update_of_7b_compiles_for_64_devices():
  out = _published('qwen2_5_7b')
  # 256 rows of 4096 tokens: two multiplications and additions a parameter and
  # token, forward, recomputed and twice backward; policy and value model.
  assert 'fits in 80 GiB' in out
  operations = float(re.search(r'([\d.]+) TFLOP  in', out)[1])
  parameters = 2 * 7.616e9 - 2 * 152064 * 3584  # in products
  assert operations > 8 * parameters * 256 * 4096 / 64 / 1e12


@pytest.mark.parametrize('name', ['v5e:2x4', 'gpu:h100:8'])
def test_a_plan_without_a_compiler_has_seconds_and_costs(capsys, name):
  flags = '--compile=False', '--json', '--price=2.5', '--config.mesh.fsdp=2'
  code, out, err = _plan(capsys, *flags, where=f'--topology={name}')
  assert (code, err) == (0, '')
  found = json.loads(out)
  assert found['mesh'] == {'data': 4, 'fsdp': 2, 'expert': 1, 'tensor': 1}
  memory = found['memory']
  held = sum(memory['sizes'].values()) + memory['temporaries']['update']
  assert memory['total'] == held == memory['limit'] - memory['headroom']
  step, run = found['step'], found['run']
  assert list(step['parts']) == [
    *('extend', 'decode', 'publish', 'annotate', 'update')
  ]
  seconds = sum(part['seconds'] for part in step['parts'].values())
  assert step['seconds'] == pytest.approx(seconds)
  assert step['tokens_per_second'] == pytest.approx(16 * 128 / seconds)
  assert step['questions_per_second'] == pytest.approx(16 / seconds)
  assert run['chip_hours'] == pytest.approx(8 * 4 * seconds / 3600)
  assert run['cost'] == pytest.approx(2.5 * run['chip_hours'])
  assert 0 < run['cost_at_least'] < run['cost']
  assert any('H200' in line for line in found['assumptions'])


def test_a_plan_says_what_it_assumes_and_what_does_not_fit(capsys):
  flags = '--compile=False', '--hbm_gib=1e-6'
  gains = '--config.env.rewards.information_gain=1.0'
  code, out, _ = _plan(capsys, *flags, gains, where='--topology=gpu:a100:8')
  assert code == 2 and '\ndoes not fit in 1e-06 GiB\n' in out
  assert 'env.rewards.information_gain are not counted' in out


_LARGE = (
  *('plan', '--config=configs/base.py', '--topology=v5e:2x4'),
  f'--config.model.path={_PUBLISHED / "qwen2_5_1_5b"}',
  '--config.model.dtype=bfloat16',
)


def test_a_plan_says_with_which_changes_a_run_fits(capsys, monkeypatch):
  monkeypatch.chdir(runs.REPO)
  large = [*_LARGE, '--compile=False', '--config.mesh.fsdp=8']
  large.append('--config.rollout.slots=64')
  assert __main__.main(large) == 2
  *_, fits, advice = capsys.readouterr().out.splitlines()
  assert fits == 'does not fit in 15.75 GiB'
  found = re.fullmatch(
    r'by the estimate, the run fits in [\d.]+ GiB with (.*)', advice
  )
  flags = found[1].split()
  assert '--config.updates.remat=full' in flags
  assert __main__.main([*large, *flags]) == 0
  assert capsys.readouterr().out.endswith('\nfits in 15.75 GiB\n')


@pytest.mark.slow
def test_a_sweep_ranks_the_meshes_of_a_topology(capsys, monkeypatch):
  monkeypatch.chdir(runs.REPO)
  code = __main__.main(
    [
      *(*_LARGE, '--compile=False', '--sweep_mesh', '--json'),
      *('--config.updates.remat=full', '--config.updates.microbatch_size=8'),
      *('--config.rollout.slots=32', '--config.rollout.tensor=1'),
    ]
  )
  assert code == 0
  rows = json.loads(capsys.readouterr().out)
  meshes = {(row['data'], row['fsdp'], row['tensor']) for row in rows}
  assert len(meshes) == len(rows) == 10  # of eight devices
  fits = [row['fits'] for row in rows]
  assert fits == sorted(fits, reverse=True) and fits[0]
  seconds = [row['seconds'] for row in rows if row['fits']]
  assert seconds == sorted(seconds)
  # Twelve heads cannot be cut over eight devices.
  (refused,) = [row for row in rows if row['tensor'] == 8]
  assert 'tensor=8 does not divide num_heads=12' in refused['problem']
