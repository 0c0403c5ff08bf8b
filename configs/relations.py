"""Which keys of a configuration go together.

A relation is (keys, function of their values that yields the errors), a line
each. Single keys have their rules in `configs/schema.py`.
"""

from collections.abc import Iterator
import pathlib


def _multiple(key, of) -> tuple:
  """The relation: `key` is divisible by `of` (0 of it means no division)."""

  def relation(number, divisor) -> Iterator[str]:
    if divisor and number % divisor:
      yield f'{key}={number}: must be a multiple of {of}={divisor}'

  return (key, of), relation


def _one_rest(data, fsdp, tensor) -> Iterator[str]:
  sizes = {'data': data, 'fsdp': fsdp, 'tensor': tensor}
  rest = [f'mesh.{axis}' for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    yield f'{rest[1]}=-1: at most one axis may be -1, {rest[0]} is'


def _turn_fits(max_turn_tokens, max_length) -> Iterator[str]:
  if max_turn_tokens >= max_length:
    yield (
      f'env.max_turn_tokens={max_turn_tokens}: must be smaller than '
      f'env.max_length={max_length}'
    )


def _resampling(rounds, group_size) -> Iterator[str]:
  if rounds > 0 and group_size < 2:
    yield (
      f'rollout.resample_rounds={rounds}: must be 0 when '
      f'rollout.group_size={group_size}: one reward has no variance'
    )


def _cut_into_lanes(
  lanes, slots, trajectories, group_size, batch_size, engine
) -> Iterator[str]:
  """Every lane of an engine has as many slots, and holds whole groups."""
  if engine != 'local' or lanes == 1:
    return
  divisors = f'rollout.lanes={lanes}', f'rollout.group_size={group_size}'
  key = 'slots' if slots else 'trajectories_per_step'
  if (slots or trajectories) % (lanes * group_size):
    yield (
      f'rollout.{key}={slots or trajectories}: must be a multiple of '
      f'{lanes * group_size}, which is {" times ".join(divisors)}'
    )
  if batch_size % lanes:
    yield (
      f'evaluate.batch_size={batch_size}: must be a multiple of {divisors[0]}'
    )


def _warmed_up(warmup, backbone) -> Iterator[str]:
  if warmup > 0 and backbone == 'shared':
    yield (
      f'loss.value_warmup_steps={warmup}: must be 0 when '
      'model.value_backbone=shared: values are learned with the policy'
    )


def _replayed(replay, path, experts, engine) -> Iterator[str]:
  key = f'updates.routing_replay={replay}'
  if replay != 'nowhere' and not (path or experts):
    yield f'{key}: must be nowhere when model.num_experts=0'
  if replay == 'sampler' and engine != 'local':
    yield (
      f'{key}: must be nowhere or trainer when rollout.engine={engine}, which '
      'does not tell its experts'
    )


def _reference_waits(rank, path, memory) -> Iterator[str]:
  if rank > 0 and not path and memory == 'host':
    yield (
      'model.reference_memory=host: must be device when '
      f'model.lora.rank={rank} and model.reference_path is empty: the base is '
      'the reference'
    )


def _served(engine, url, model) -> Iterator[str]:
  if engine == 'remote' and not (url and model):
    yield 'rollout.engine=remote: rollout.remote.url and .model must be set'


def _template(path) -> Iterator[str]:
  if not path:
    return
  key = f'env.prompt_template={path!r}'
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    yield f'{key}: must be empty, or a text file that can be read ({error})'
    return
  if '{question}' not in text:
    yield f'{key}: must contain {{question}}'


def _files(name, root, train, evaluation, corpus, url) -> Iterator[str]:
  """Files of a jsonl data set exist and lie under its root."""
  if name != 'jsonl':
    return
  folder = pathlib.Path(root).resolve()
  if not root or not folder.is_dir():
    yield f'data.root={root!r}: must be a folder when data.name=jsonl'
    return
  needed = {'train': True, 'evaluation': False, 'corpus': not url}
  files = {'train': train, 'evaluation': evaluation, 'corpus': corpus}
  for key, file in files.items():
    path = (folder / file).resolve()
    if not file:
      if needed[key]:
        yield f"data.{key}='': must name a file when data.name=jsonl"
    elif not path.is_relative_to(folder):
      yield f'data.{key}={file!r}: must lie under data.root={root}'
    elif not path.is_file():
      yield f'data.{key}={file!r}: must be a file in data.root={root}'


def _architecture(qkv_bias, qk_norm, experts, visited, width) -> Iterator[str]:
  if qk_norm and qkv_bias:
    yield ('model.qk_norm=True: model.qkv_bias must be False, as in Qwen3')
  if not experts:
    return
  if not qk_norm:
    yield (
      f'model.num_experts={experts}: model.qk_norm must be True, as in '
      'Qwen3-MoE'
    )
  if not 0 < visited <= experts:
    yield (
      f'model.num_experts_per_tok={visited}: must be 1 to '
      f'model.num_experts={experts}'
    )
  if not width:
    yield (
      'model.moe_intermediate_size=0: must be greater than 0 when '
      f'model.num_experts={experts}'
    )


RELATIONS = (
  _multiple('rollout.trajectories_per_step', 'updates.minibatch_size'),
  _multiple('rollout.trajectories_per_step', 'rollout.group_size'),
  _multiple('rollout.slots', 'rollout.group_size'),
  _multiple('updates.minibatch_size', 'updates.microbatch_size'),
  _multiple('updates.minibatch_size', 'updates.core_rows'),
  _multiple('model.num_heads', 'model.num_kv_heads'),
  (('loss.value_warmup_steps', 'model.value_backbone'), _warmed_up),
  (
    ('model.lora.rank', 'model.reference_path', 'model.reference_memory'),
    _reference_waits,
  ),
  (
    (
      'model.qkv_bias',
      'model.qk_norm',
      'model.num_experts',
      'model.num_experts_per_tok',
      'model.moe_intermediate_size',
    ),
    _architecture,
  ),
  _multiple('preference.batch_size', 'preference.microbatch_size'),
  (('mesh.data', 'mesh.fsdp', 'mesh.tensor'), _one_rest),
  (('env.max_turn_tokens', 'env.max_length'), _turn_fits),
  (('rollout.resample_rounds', 'rollout.group_size'), _resampling),
  (
    (
      'rollout.lanes',
      'rollout.slots',
      'rollout.trajectories_per_step',
      'rollout.group_size',
      'evaluate.batch_size',
      'rollout.engine',
    ),
    _cut_into_lanes,
  ),
  (('env.prompt_template',), _template),
  (
    (
      'updates.routing_replay',
      'model.path',
      'model.num_experts',
      'rollout.engine',
    ),
    _replayed,
  ),
  (('rollout.engine', 'rollout.remote.url', 'rollout.remote.model'), _served),
  (
    (
      'data.name',
      'data.root',
      'data.train',
      'data.evaluation',
      'data.corpus',
      'retrieval.url',
    ),
    _files,
  ),
)
