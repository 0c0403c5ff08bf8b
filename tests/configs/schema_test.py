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


def test_the_choices_of_a_rule_are_those_of_the_code():
  # Configs cannot import these tables: that would import jax.
  for key, table in (
    ('model.attention', ('auto', *attention.IMPLEMENTATIONS)),
    ('model.moe', ('auto', *moe.IMPLEMENTATIONS)),
    ('updates.remat', tuple(transformer.POLICIES)),
    ('preference.name', tuple(preferences.PREFERENCES)),
  ):
    assert schema.KEYS[key].rule.allowed == 'one of ' + ', '.join(table)
  of_the_sampler = [
    name
    for name, correction in corrections.CORRECTIONS.items()
    if 'sampler_logprobs_BL' in correction.arrays
  ]
  assert list(relations.STALENESS_CORRECTIONS) == of_the_sampler


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
    # Lanes do not matter to a remote engine.
    {
      'rollout__lanes': 3,
      'rollout__engine': 'remote',
      'rollout__remote__url': 'http://x',
      'rollout__remote__model': 'y',
    },
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


def test_all_errors_are_reported_together_and_the_config_is_left_alone():
  config = _config(
    num_steps=0,
    rollout__group_size=3,
    env__prompt_template='no/such/file',
    algorithm__kl__where='somewhere',
  )
  before = copy.deepcopy(config.to_dict())
  lines = schema.check(config)
  assert config.to_dict() == before
  assert sorted(re.split('[=:]', line)[0] for line in lines) == [
    'algorithm.kl.where',
    'env.prompt_template',
    'num_steps',
    'rollout.trajectories_per_step',
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


def test_every_key_has_one_entry_and_all_but_switches_have_a_rule():
  own = lambda keys: {key for key in keys if not key.startswith('algorithm.')}
  values = settings.flatten(base.get_config())
  assert own(values) == own(schema.KEYS)
  ruled = {name for name, key in schema.KEYS.items() if key.rule or key.check}
  ruled = own(ruled.union(*(keys for keys, _ in relations.RELATIONS)))
  switches = {key for key in own(values) if isinstance(values[key], bool)}
  assert own(values) - ruled == switches - ruled
  assert ruled <= own(values)


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
  for key, value, problem in (
    ('data.train', '../outside.jsonl', f'must lie under data.root={root}'),
    ('data.evaluation', 'none.jsonl', f'no such file in data.root={root}'),
    ('data.train', '.', f'not a file in data.root={root}'),
    ('data.corpus', '', 'must name a file of passages when retrieval.url is'),
  ):
    wrong = changes | {key.replace('.', '__'): value}
    (line,) = schema.check(_config(**wrong))
    assert line.startswith(f'{key}={value!r}: {problem}')


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
