"""Every rule refuses a config that breaks it; packaged configs break none."""

import copy
import pathlib
import re

from ml_collections import config_dict
import pytest

from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import base
from stppo_jax.configs import nq_hotpotqa
from stppo_jax.configs import reference
from stppo_jax.configs import relations
from stppo_jax.configs import schema
from stppo_jax.models import attention
from stppo_jax.models import moe
from stppo_jax.models import transformer
from stppo_jax.rl import algorithm
from stppo_jax.rl import corrections
from stppo_jax.rl import preferences

_MOE = {
  'model__qkv_bias': False,
  'model__qk_norm': True,
  'model__num_experts': 4,
  'model__num_experts_per_tok': 2,
  'model__moe_intermediate_size': 8,
}


def _config(**changes):
  config = base.get_config()
  for key, value in changes.items():
    config.update_from_flattened_dict({key.replace('__', '.'): value})
  return config


@pytest.mark.parametrize(
  ('key', 'table'),
  [
    ('model.attention', ('auto', *attention.IMPLEMENTATIONS)),
    ('model.moe', ('auto', *moe.IMPLEMENTATIONS)),
    ('updates.remat', tuple(transformer.POLICIES)),
    ('preference.name', tuple(preferences.PREFERENCES)),
  ],
)
def test_the_choices_of_a_rule_are_those_of_the_code(key, table):
  # Configs cannot import these tables: that would import jax.
  assert schema.KEYS[key].rule.allowed == 'one of ' + ', '.join(table)


@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
def test_every_algorithm_of_the_table_keeps_the_rules(name):
  assert schema.check(base.get_config(name)) == []
  # `schema` trusts the table, so its entries are checked here.
  assert algorithm.check_algorithm(algorithms.ALGORITHMS[name]) == []


@pytest.mark.parametrize(
  'changes',
  [
    {'updates__old_policy': 'current'},
    {
      'updates__old_policy': 'current',
      'rollout__steps_ahead': 1,
      'algorithm__correction__names': ('clipping_bias', 'icepop'),
    },
    {'algorithm__correction__clipping_bias__tau': 1.0},
    _MOE,
    # Neither uses tau.
    {
      'algorithm__correction__names': (),
      'algorithm__correction__clipping_bias__tau': 0.5,
    },
    {
      'algorithm__correction__clipping_bias__norm': 'gradient',
      'algorithm__correction__clipping_bias__tau': 0.5,
    },
  ],
)
def test_relations_that_hold(changes):
  assert schema.check(_config(**changes)) == []


def test_a_broken_option_of_the_algorithm_reaches_no_relation():
  config = base.get_config().to_dict()
  config['algorithm']['correction']['names'] = 3
  config['algorithm']['correction']['clipping_bias']['tau'] = 'x'
  lines = schema.check(config_dict.ConfigDict(config))
  assert [line.split('=')[0] for line in lines] == [
    'algorithm.correction.names',
    'algorithm.correction.clipping_bias.tau',
  ]


def test_staleness_is_corrected_by_the_corrections_of_the_mismatch():
  # Configs cannot import this table: that would import jax.
  of_the_sampler = [
    name
    for name, correction in corrections.CORRECTIONS.items()
    if 'sampler_logprobs_BL' in correction.arrays
  ]
  assert list(relations.STALENESS_CORRECTIONS) == of_the_sampler


def test_lanes_do_not_matter_to_a_remote_engine():
  remote = {'engine': 'remote', 'remote__url': 'http://x', 'remote__model': 'y'}
  config = _config(
    rollout__lanes=3, **{f'rollout__{key}': x for key, x in remote.items()}
  )
  assert schema.check(config) == []
  config.rollout.engine = 'local'
  assert len(schema.check(config)) == 1


def test_all_errors_are_reported_together():
  lines = schema.check(
    _config(
      num_steps=0,
      updates__num_epochs=0,
      rollout__group_size=3,
      mesh__fsdp=-1,
      env__prompt_template='no/such/file',
      retrieval__url='x',
      algorithm__kl__where='somewhere',
    )
  )
  keys = [line.split('=')[0].split(':')[0] for line in lines]
  assert sorted(keys) == [
    'algorithm.kl.where',
    'env.prompt_template',
    'mesh.fsdp',
    'num_steps',
    'retrieval.url',
    'rollout.trajectories_per_step',
    'updates.num_epochs',
  ]


def test_a_config_file_cannot_invent_forget_or_retype_keys():
  config = base.get_config().to_dict()
  config['rollout']['temprature'] = 0.7
  del config['rollout']['temperature']
  config['updates']['num_epochs'] = 1.5
  config['writer']['tensorboard'] = 1
  config['seed'] = True
  config['evaluate'] = 3
  config['algorithm']['ratio']['levle'] = 'turn'
  assert schema.check(config_dict.ConfigDict(config)) == [
    'evaluate=3: no such key in configs/base.py',
    'rollout.temprature=0.7: no such key in configs/base.py',
    'evaluate.every: missing',
    'evaluate.num_questions: missing',
    'rollout.temperature: missing',
    'seed=True: must be of type int',
    'updates.num_epochs=1.5: must be of type int',
    'writer.tensorboard=1: must be of type bool',
    'algorithm.ratio.levle: unknown option; the options are level, '
    'gradient, reduce, normalize',
  ]


def _of_algorithm(key):
  return key.startswith('algorithm.')


def test_every_key_has_one_entry():
  keys = settings.flatten(base.get_config())
  keys = {key for key in keys if not _of_algorithm(key)}
  assert keys == {key for key in schema.KEYS if not _of_algorithm(key)}


def test_every_key_but_switches_has_a_rule():
  ruled = {name for name, key in schema.KEYS.items() if key.rule or key.check}
  for keys, _ in relations.RELATIONS:
    ruled |= set(keys)
  values = {
    key: value
    for key, value in settings.flatten(base.get_config()).items()
    if not _of_algorithm(key)
  }
  switches = {key for key, value in values.items() if isinstance(value, bool)}
  assert values.keys() - ruled == switches - ruled
  assert {key for key in ruled if not _of_algorithm(key)} <= values.keys()


def test_the_files_of_a_jsonl_data_set_exist_under_its_root(tmp_path):
  root = tmp_path / 'data'
  root.mkdir()
  (root / 'train.jsonl').touch()
  (tmp_path / 'outside.jsonl').touch()
  changes = {
    'data__name': 'jsonl',
    'data__root': str(root),
    'data__train': 'train.jsonl',
    'data__corpus': 'train.jsonl',
  }
  assert schema.check(_config(**changes)) == []
  remote = {'data__corpus': '', 'retrieval__url': 'http://127.0.0.1:1'}
  assert schema.check(_config(**(changes | remote))) == []
  broken = {
    'data__train': '../outside.jsonl',
    'data__evaluation': 'none.jsonl',
    'data__corpus': '',
  }
  assert schema.check(_config(**(changes | broken))) == [
    f"data.train='../outside.jsonl': must lie under data.root={root}",
    f"data.evaluation='none.jsonl': no such file in data.root={root}",
    "data.corpus='': must name a file of passages when retrieval.url is empty",
  ]
  for changed, expected in (
    ({'data__root': '/absent'}, "data.root='/absent': no such folder"),
    ({'data__root': __file__}, f'data.root={__file__!r}: not a folder'),
    ({'data__train': '.'}, f"data.train='.': not a file in data.root={root}"),
  ):
    assert schema.check(_config(**(changes | changed))) == [expected]


def test_check_leaves_the_config_alone():
  config = _config(num_steps=0)
  before = copy.deepcopy(config.to_dict())
  schema.check(config)
  assert config.to_dict() == before


def test_the_authors_run_differs_from_ours_in_what_its_page_says():
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'reference_run.md'
  table, _, _ = page.read_text('utf-8').partition('How sure:')
  found = set()
  for name in ('st_ppo', 'so_grpo'):
    ours = settings.flatten(nq_hotpotqa.get_config(name))
    theirs = settings.flatten(reference.get_config(name))
    found |= {key for key in ours if ours[key] != theirs[key]}
  assert found == set(re.findall(r'`([a-z_]+\.[a-z_.]+)` ?[|,]', table))
  assert theirs['algorithm.ratio.level'] == 'token'
  # Two updates in each of 500 steps.
  warmup = reference.get_config('st_ppo').policy_optimizer.warmup_updates
  assert warmup == 285
