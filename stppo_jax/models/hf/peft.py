"""Reads and writes low-rank adapters in the format of PEFT.

    adapter_config.json          ranks, alphas, and how the adapters compute
    adapter_model.safetensors    lora_A [rank, in] and lora_B [out, rank] of
                                 each matrix that has an adapter

In such files each matrix may have a rank and a scale of its own. Our layers are
stacked, so the adapters of one kind of matrix, such as q_proj, share one scale
and the largest of their ranks in all layers. A and B of a smaller rank are
padded with zeros, which stay zero in training because their gradients are zero.
B is also multiplied by the quotient of the file's scale and the shared scale.

PEFT on `transformers` 5 keeps the experts of a layer in one parameter. Their
adapters are then one tensor too, in which gate_proj and up_proj share A. `read`
accepts this form as well. `write` writes the experts one by one, which all
versions of PEFT read.
"""

from collections.abc import Callable, Iterator, Mapping
import json
import math
import pathlib
import re
import sys
from typing import Any, NamedTuple

import numpy as np

from stppo_jax import hub
from stppo_jax import settings
from stppo_jax.models import config as model_config
from stppo_jax.models.hf import families
from stppo_jax.models.hf import safetensors_file
from stppo_jax.models.hf import weight_files

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
_TENSOR = re.compile(r'base_model\.model\.(.+)\.(lora_[AB])\.weight')
_EXPERTS = re.compile(r'(.+\.experts)(\.base_layer)?')
_FUSED, _DOWN = 'gate_up_proj', 'down_proj'
# Options that this module reads, or that do not change a trained adapter.
_HARMLESS = (
  *('r', 'lora_alpha', 'rank_pattern', 'alpha_pattern', 'use_rslora'),
  *('target_modules', 'target_parameters', 'exclude_modules'),
  *('layers_to_transform', 'layers_pattern', 'lora_dropout', 'inference_mode'),
  *('auto_mapping', 'base_model_name_or_path', 'revision', 'task_type'),
  *('peft_version', 'runtime_config', 'megatron_core', 'qalora_group_size'),
  *('eva_config', 'loftq_config', 'ensure_weight_tying'),
)
# The supported values of other options. Methods that initialise adapters from
# the base weights, such as pissa, change the base too and are not supported.
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
  'peft_type': ('LORA',),
  'bias': ('none',),
  'init_lora_weights': (True, False, 'gaussian', 'orthogonal', 'eva'),
}
_RANK = settings.Rule(
  lambda x: type(x) is int and 0 < x < 2**31, 'an integer from 1 to 2147483647'
)
_ALPHA = settings.Rule(
  lambda x: type(x) in (int, float) and 0 < x <= sys.float_info.max,
  'a finite number greater than 0',
)
_BOOL = settings.Rule(lambda x: x is None or type(x) is bool, 'true or false')
_TEXTS = settings.Rule(
  lambda x: (
    x is None
    or isinstance(x, str)
    or (isinstance(x, list) and all(isinstance(y, str) for y in x))
  ),
  'a string or a list of strings',
)


class _Matrices(NamedTuple):
  """The adapter of a matrix, or the adapters of all experts of a layer.

  Attributes:
    name: name of the matrix in the model. For the matrices of all experts, the
      name has '*' in place of the expert's number.
    rank: the rank of the adapter.
    scale: the scale of the adapter, see `lora`.
    read: function that returns A [..., rank, in] and B [..., out, rank].
  """

  name: str
  rank: int
  scale: float
  read: Callable[[], tuple[np.ndarray, np.ndarray]]

  @property
  def layer(self) -> str:
    """The name of the layer in this package, such as 'layers/q_proj'."""
    experts = 'moe/' if '.experts.' in self.name else ''
    return f'layers/{experts}{self.name.rpartition(".")[2]}'


def options(directory: str | pathlib.Path) -> dict[str, Any]:
  """Returns the arguments of `lora.Lora` for the adapters of a directory.

  Raises:
    ValueError: the directory has no adapters, or has adapters that are not
      supported; the message is one line.
  """
  content, found = _open(directory)
  rslora = bool(content.get('use_rslora'))
  root = math.sqrt if rslora else float
  layers: dict[str, list[_Matrices]] = {}
  for each in found:
    layers.setdefault(each.layer, []).append(each)
  ranks = {x: max(each.rank for each in layers[x]) for x in layers}
  alphas = {x: layers[x][0].scale * root(ranks[x]) for x in layers}
  patterns = lambda values, rest: tuple(
    f'^{x}$={n}' for x, n in values.items() if not math.isclose(n, rest)
  )
  rank, alpha = content['r'], float(content['lora_alpha'])
  return {
    'rank': rank,
    'alpha': alpha,
    'targets': f'^({"|".join(sorted(layers))})$',
    'rank_pattern': patterns(ranks, rank),
    'alpha_pattern': patterns(alphas, alpha),
    'rslora': rslora,
  }


def read(
  directory: str | pathlib.Path,
  config: model_config.ModelConfig,
  lora: Any,
  shapes: Any,
) -> Mapping[str, Any]:
  """Returns adapters as numpy arrays, float32.

  Args:
    directory: the directory of the adapters, or their name on the Hub.
    config: the model's config.
    lora: the `lora.Lora` of the adapters.
    shapes: the tree of the adapters, whose leaves have the expected shapes.

  Raises:
    ValueError: a tensor belongs to a matrix without an adapter in this model,
      has a wrong shape, or is not finite; the message is one line.
  """
  # Imported here and in `write` only, because checking a config needs no jax.
  from flax import traverse_util

  flat: dict[str, Any] = traverse_util.flatten_dict(shapes, sep='/')
  leaves = {x: np.zeros(leaf.shape, np.float32) for x, leaf in flat.items()}
  places = {name: (layer, index) for name, layer, index in _places(config)}
  for each in _open(directory)[1]:
    layer, index = places.get(each.name, ('', ()))
    if f'{layer}/lora_a' not in leaves:
      raise ValueError(
        f'{directory}: this model has no adapter for {each.name}'
      )
    ratio = each.scale / lora.scale_of(layer)
    for key, values in zip('ab', each.read()):
      values = np.swapaxes(values, -1, -2).astype(np.float32)
      leaf = leaves[f'{layer}/lora_{key}'][index]
      part = leaf[..., : each.rank] if key == 'a' else leaf[..., : each.rank, :]
      if values.shape != part.shape or not np.isfinite(values).all():
        raise ValueError(
          f'{directory}: lora_{key.upper()} of {each.name} must be finite and '
          f'of shape {part.shape[-2:][::-1]}; it has {values.shape[-2:][::-1]}'
        )
      part[...] = values * ratio if key == 'b' else values
  return traverse_util.unflatten_dict(leaves, sep='/')


def write(
  folder: pathlib.Path,
  config: model_config.ModelConfig,
  lora: Any,
  adapters: Mapping[str, Any],
  *,
  base: str,
  dtype: str,
) -> None:
  """Writes adapters into a folder.

  Args:
    folder: an empty folder.
    config: the model's config.
    lora: the `lora.Lora` of the adapters.
    adapters: the tree of the adapters.
    base: directory or Hub name of the weights that the adapters adapt.
    dtype: dtype of the tensors; a key of `safetensors_file.DTYPES`.

  Raises:
    ValueError: an adapter belongs to only a part of a tensor, or PEFT would
      misread it; the message is one line.
  """
  from flax import traverse_util

  leaves = {
    name: np.asarray(leaf)
    for name, leaf in traverse_util.flatten_dict(adapters, sep='/').items()
  }
  tensors = {}
  for name, layer, index in _places(config):
    if f'{layer}/lora_a' not in leaves or '*' in name:
      continue
    _refuse_shared(name)
    if layer.startswith('dense_') and '.mlp.' in name:
      raise ValueError(
        f'{name}: PEFT would read this adapter as an adapter of experts; '
        'leave out --adapters, to write merged weights'
      )
    for key in 'ab':
      tensor = f'{_PREFIX}{name}.lora_{key.upper()}.weight'
      tensors[tensor] = leaves[f'{layer}/lora_{key}'][index].T
  layers = sorted({x.rpartition('/')[0] for x in leaves if 'lora_' in x})
  # PEFT takes the rank of experts from `r`, not from the patterns. It also
  # doubles rank and alpha of gate and up, which keeps the scale alpha / rank,
  # but not the scale alpha / sqrt(rank) of rslora.
  first = next((x for x in layers if '/moe/' in x), layers[0])
  rslora = lora.rslora and '/moe/' not in first
  ranks = {x.rpartition('/')[2]: lora.rank_of(x) for x in layers}
  root = math.sqrt if rslora else float
  alphas = {
    x.rpartition('/')[2]: lora.scale_of(x) * root(lora.rank_of(x))
    for x in layers
  }
  rank, alpha = (x[first.rpartition('/')[2]] for x in (ranks, alphas))
  repository, revision = hub.split(base) if hub.is_name(base) else (base, '')
  content = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': repository or None,
    'revision': revision or None,
    'inference_mode': True,
    'r': rank,
    'lora_alpha': alpha,
    'rank_pattern': {x: n for x, n in ranks.items() if n != rank},
    'alpha_pattern': {x: n for x, n in alphas.items() if n != alpha},
    'use_rslora': rslora,
    'target_modules': sorted(ranks),
    'lora_dropout': 0.0,
    'bias': 'none',
  }
  text = json.dumps(content, indent=2) + '\n'
  (folder / CONFIG).write_text(text, encoding='utf-8')
  with open(folder / WEIGHTS, 'wb') as file:
    shapes = {name: x.shape for name, x in tensors.items()}
    safetensors_file.write(file, shapes, dtype, tensors.values())


def _places(
  config: model_config.ModelConfig,
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
  """Yields each matrix as (name in files, layer in the tree, index in leaf)."""
  for entry in families.entries(config):
    *layer, leaf = entry.path
    name = entry.hf_name.removesuffix('.weight')
    if leaf != 'kernel':
      continue
    yield name, '/'.join(layer), entry.index
    if entry.index[1:] == (0,):
      together = name.replace('.experts.0.', '.experts.*.')
      yield together, '/'.join(layer), entry.index[:1]


def _open(
  directory: str | pathlib.Path,
) -> tuple[dict[str, Any], list[_Matrices]]:
  """Returns the config of adapters, and the adapters; reads no values.

  Raises:
    ValueError: see `options`.
  """
  folder = hub.local_folder(directory)
  if not (folder / CONFIG).is_file():
    raise ValueError(f'no {CONFIG} in {directory}')
  content = weight_files.read_json(folder / CONFIG)
  try:
    _check(folder / CONFIG, content)
  except (re.error, AttributeError, OverflowError, RecursionError) as error:
    raise ValueError(
      f'{folder / CONFIG}: rank_pattern or alpha_pattern: {error}'
    ) from error
  # From the Hub, a weight file is downloaded only if the call names the file.
  folder = hub.local_folder(directory, (WEIGHTS,))
  if not (folder / WEIGHTS).is_file():
    # A Hub model may have a *.bin file, the older format, but is not searched
    # for this file. So for a Hub model the advice is always given.
    is_old = hub.is_name(directory) or (folder / 'adapter_model.bin').is_file()
    advice = '; checkpoint convert makes it from adapter_model.bin' * is_old
    raise ValueError(f'no {WEIGHTS} in {directory}{advice}')
  tensors = safetensors_file.read_header(folder / WEIGHTS)
  pairs: dict[str, dict[str, safetensors_file.Tensor]] = {}
  for name, tensor in tensors.items():
    match = _TENSOR.fullmatch(name)
    if match is None:
      raise ValueError(
        f'{folder / WEIGHTS}: {name} is not supported; supported: lora_A and '
        'lora_B of linear layers'
      )
    pairs.setdefault(match[1], {})[match[2]] = tensor
  for name, pair in pairs.items():
    _refuse_shared(name, f'{folder / WEIGHTS}: ')
    if len(pair) != 2:
      raise ValueError(f'{folder / WEIGHTS}: {name} has {min(pair)} only')
  return content, [
    matrices
    for name, pair in pairs.items()
    for matrices in _matrices(content, name, pair)
  ]


def _refuse_shared(name: str, where: str = '') -> None:
  """Raises ValueError if the tensor `name` contains several of our matrices."""
  # Each of our matrices has its own A, but the file has one A for the tensor.
  if name.endswith(families.SHARED):
    raise ValueError(
      f'{where}{name} is one tensor for several layers of this package, so its '
      'adapters are not supported; use merged weights, which export writes '
      'without --adapters'
    )


def _check(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Raises ValueError for an option that is not supported or not valid."""
  for name, value in content.items():
    allowed = _COMPUTED.get(name, ())
    if name not in _HARMLESS and value and value not in allowed:
      supported = ', '.join(map(repr, allowed)) or 'none'
      raise ValueError(
        f'{path}: {name}={value!r} is not supported; supported: {supported}'
      )
  for name, value, rule in _ruled(content):
    if not rule.holds(value):
      raise ValueError(f'{path}: {name}={value!r}: must be {rule.allowed}')


def _ruled(
  content: Mapping[str, Any],
) -> Iterator[tuple[str, Any, settings.Rule]]:
  """Yields (name, value, rule) of each option that this module uses."""
  for name, patterns, rule in (
    ('r', 'rank_pattern', _RANK),
    ('lora_alpha', 'alpha_pattern', _ALPHA),
  ):
    yield name, content.get(name), rule
    for pattern, number in (content.get(patterns) or {}).items():
      re.compile(_matching(pattern))
      yield f'{patterns}.{pattern}', number, rule
  for name, rule in (('use_rslora', _BOOL), ('target_parameters', _TEXTS)):
    yield name, content.get(name), rule


def _matrices(
  content: Mapping[str, Any],
  name: str,
  pair: Mapping[str, safetensors_file.Tensor],
) -> Iterator[_Matrices]:
  """Yields the adapter of lora_A and lora_B; for gate_up_proj, two adapters."""
  a, b = pair['lora_A'], pair['lora_B']
  match = _EXPERTS.fullmatch(name)
  if match is None:
    rank, scale = _rank_and_scale(content, name)
    yield _Matrices(name, rank, scale, lambda: (a.read(), b.read()))
    return
  # If gate_up_proj and down_proj both have adapters, `base_layer` in the name
  # marks gate_up_proj. Otherwise `target_parameters` names the parameter.
  targets = content.get('target_parameters') or ()
  targets = (targets,) if isinstance(targets, str) else targets
  fused = any(x.endswith(_FUSED) for x in targets)
  is_alone = not any(x.endswith(_DOWN) for x in targets)
  parameter = _FUSED if fused and (match[2] or is_alone) else _DOWN
  rank, scale = _rank_and_scale(content, f'{match[1]}.{parameter}')
  names = ('gate_proj', 'up_proj') if parameter == _FUSED else (_DOWN,)
  for number, projection in enumerate(names):

    def together(number=number):
      a_XRK = a.read().reshape(-1, rank, a.shape[1])
      b_NRX = b.read().reshape(b.shape[0], rank, -1)
      part = np.split(b_NRX, len(names))[number]
      return a_XRK, part.transpose(2, 0, 1)

    yield _Matrices(f'{match[1]}.*.{projection}', rank, scale, together)


def _rank_and_scale(content: Mapping[str, Any], name: str) -> tuple[int, float]:
  """Returns the rank and the scale of the adapter of the named matrix."""

  def first(key: str, default: Any) -> Any:
    for pattern, number in (content.get(key) or {}).items():
      if re.match(_matching(pattern), name):
        return number
    return default

  rank = first('rank_pattern', content['r'])
  alpha = first('alpha_pattern', content['lora_alpha'])
  return rank, alpha / (math.sqrt if content.get('use_rslora') else float)(rank)


def _matching(pattern: str) -> str:
  """Returns a regular expression for dotted names that end with the pattern."""
  return rf'(.*\.)?({pattern})$'
