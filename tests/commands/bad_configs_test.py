"""Forty bad configs: each is one line with key, value and rule, and exit 2."""

import pytest

from stppo_jax import __main__
from tests.training import runs

_REMOTE = ('rollout.engine=remote', 'rollout.remote.url=http://127.0.0.1:9')
_CONFIGS = [
  # Keys that do not exist, and values of another type.
  (['rollout.temprature=0.7'], 'temprature', 'did you mean temperature?'),
  (['seeed=1'], 'seeed=1', "no key 'seeed' in config"),
  (['rollout=3'], 'rollout=3', 'a section, not a value'),
  (['seed.x=3'], 'seed.x=3', 'config.seed is a value and has no keys'),
  (['num_steps=ten'], 'num_steps=ten', 'expected int, such as'),
  (['rollout.temperature=hot'], 'temperature=hot', 'expected a number'),
  (['writer.tensorboard=maybe'], 'tensorboard=maybe', 'true or false'),
  (['env.tools.names=5'], 'env.tools.names=5', 'expected a tuple'),
  # Rules of one key.
  (['model.dtype=float16'], "dtype='float16'", 'one of float32, bfloat16'),
  (['model.head_dim=33'], 'model.head_dim=33', 'must be even'),
  (['mesh.fsdp=0'], 'mesh.fsdp=0', '-1 for all remaining devices'),
  (['data.name=nq'], "data.name='nq'", 'one of synthetic_wiki, jsonl'),
  (['env.name=maze'], "env.name='maze'", 'must be one of'),
  (['rollout.temperature=0'], 'temperature=0.0', 'must be greater than 0'),
  (['seed=9223372036854775808'], 'seed=9223372036854775808', 'below 2**63'),
  (['rollout.min_p=1.0'], 'rollout.min_p=1.0', 'must be in [0, 1)'),
  (['updates.remat=all'], "remat='all'", 'one of none, all_dots, dots, full'),
  (['policy_optimizer.learning_rate=2'], 'rate=2.0', 'must be in [0, 1]'),
  (['checkpoint.keep=0'], 'checkpoint.keep=0', 'must be greater than 0'),
  (['rollout.cache_dtype=int4'], "cache_dtype='int4'", 'one of model, int8'),
  # Rules of several keys.
  (['updates.minibatch_size=7'], 'trajectories_per_step=16', 'size=7'),
  (['updates.row_length=127'], 'row_length=127', 'env.max_length=128'),
  (['rollout.group_size=3'], 'trajectories_per_step=16', 'group_size=3'),
  (['model.num_kv_heads=3'], 'model.num_heads=2', 'num_kv_heads=3'),
  (['mesh.tensor=-1'], 'mesh.tensor=-1', 'at most one axis may be -1'),
  (['env.max_turn_tokens=128'], 'max_turn_tokens=128', 'env.max_length=128'),
  (['model.qk_norm=true'], 'qk_norm=True', 'are those of no family'),
  (['rollout.resample_rounds=2'], 'resample_rounds=2', 'no variance'),
  (['updates.routing_replay=trainer'], 'replay=trainer', 'num_experts=0'),
  (_REMOTE, 'rollout.engine=remote', 'rollout.remote.model must be set'),
  # Algorithms.
  (
    ['algorithm.ratio.level=word'],
    "level='word'",
    'must be one of token, turn',
  ),
  (['algorithm.bounds.name=loose'], "name='loose'", 'must be one of fixed'),
  (['algorithm.bounds.clip_low=-1'], 'clip_low=-1.0', 'finite number >= 0'),
  # Files and addresses.
  (['model.path=no/such'], "model.path='no/such'", 'no such folder'),
  (['env.prompt_template=no/such'], "template='no/such'", 'No such file'),
  (
    ['retrieval.url=ftp://host'],
    'retrieval.url',
    "'ftp://host' is not an http",
  ),
  (['data.name=jsonl'], "data.root=''", 'must name a folder'),
  # Packages, of which none is installed.
  (["writer.trackers=('wandb',)"], 'writer.trackers', "pip install '.[wandb]'"),
  # Devices: there are eight.
  # The shape of the model, which files decide.
  (
    [f'model.path={runs.REPO}/assets/quickstart', 'env.max_length=99999'],
    'env.max_length=99999',
    'max_position_embeddings',
  ),
  (['mesh.data=3'], 'mesh.data=3', '8 devices: the sizes must multiply'),
]


def test_there_are_forty():
  assert len(_CONFIGS) == 40


@pytest.mark.parametrize(
  ('changes', 'value', 'rule'), _CONFIGS, ids=[c[0][0] for c in _CONFIGS]
)
def test_a_bad_config_is_one_line(tmp_path, capsys, changes, value, rule):
  flags = [f'--config.{change}' for change in changes]
  workdir = tmp_path / 'run'
  code = __main__.main(['train', *runs.flags(), *flags, f'--workdir={workdir}'])
  out, err = capsys.readouterr()
  assert (code, out) == (2, '')
  assert err.count('\n') == 1 and value in err and rule in err
  assert not workdir.exists()
