"""The tokenizer, the layer sizes and the files of a run's models."""

from collections.abc import Sequence
import dataclasses
import functools
import pathlib

import jax

from stppo_jax import hub
from stppo_jax.data import kinds
from stppo_jax.data import questions as questions_lib
from stppo_jax.envs import environments
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import moe
from stppo_jax.models.hf import export as export_lib
from stppo_jax.models.hf import load
from stppo_jax.models.hf import peft
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.sampling import chat_template
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.workdir import run_folder

_WORD = ' word '  # a text between tags, which decoding must give back


def load_tokenizer(home: str | pathlib.Path) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer of a directory.

  Raises:
    ValueError: the tokenizer cannot be read; the message is one line that names
      the directory.
  """
  try:
    return tokenizer_lib.Tokenizer.load(hub.local_folder(home))
  except Exception as error:  # a damaged file may raise any exception
    if str(home) in str(error):
      raise
    reason = f'{type(error).__name__}: {" ".join(str(error).split())}'
    raise ValueError(
      f'{home}: its tokenizer cannot be read ({reason})'
    ) from error


def build_tokenizer(
  config, questions: questions_lib.Questions | None
) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer of a run, which formats prompts as the config says.

  The tokenizer is read from the directory that `model.tokenizer_path` or
  `model.path` names. Without a directory, the tokenizer is made from the data.
  If the kind of data has a fixed vocabulary, the tokenizer has a token for each
  phrase. For files of questions, byte-level BPE is trained on the passages.

  Args:
    config: the config of a run; its section `prompt` has the prompt's format.
    questions: the data set; may be None if there is a directory.
  """
  tokenizer = _tokenizer(config, questions)
  return tokenizer.with_prompts(chat_template.Options(**config.prompt))


def _tokenizer(
  config, questions: questions_lib.Questions | None
) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer of a run, without the options of `prompt`."""
  path = config.model.tokenizer_path or config.model.path
  if path:
    return load_tokenizer(path)
  environment = environments.find(config.env.name)
  vocabulary = kinds.KINDS[config.data.name].vocabulary
  if vocabulary is not None:
    phrases = environment.phrases(vocabulary(config.data))
    return tokenizer_lib.phrase_tokenizer(phrases)
  assert questions is not None, 'there is no directory with a tokenizer'
  passages = questions.passages()
  assert passages is not None  # data from files always has a corpus
  texts = [
    f'Doc 1(Title: {passage.title}) {passage.text}\n' for passage in passages
  ]
  # The tags occur in every dialogue but in no passage. They are added to the
  # texts many times, so that BPE merges each tag into few tokens.
  texts += list(environment.tags) * len(texts)
  return tokenizer_lib.train_byte_level_bpe(
    texts, config.data.tokenizer_vocab_size
  )


def shape(
  config, tokenizer: tokenizer_lib.Tokenizer | None
) -> model_config.ModelConfig:
  """Returns the model config of a run, with the sizes of the layers.

  The sizes are read from the directory `model.path`, or from the run's config
  if there is no directory.

  Args:
    config: the config of a run.
    tokenizer: gives the size of the vocabulary if there is no directory. With
      None, the size is the largest that a tokenizer made from the data can
      have.

  Raises:
    ValueError: the model is not supported.
  """
  model, runtime = config.model, weights_lib.compute_options(config)
  if model.path:
    longest = config.env.max_length
    return load.read_config(model.path, longest=longest, **runtime)
  sizes = {
    field.name: model[field.name]
    for field in dataclasses.fields(model_config.ModelConfig)
    if field.name in model and field.name not in runtime
  }
  longest = model_config.ModelConfig.max_position_embeddings
  return model_config.ModelConfig(
    vocab_size=(
      tokenizer.vocab_size if tokenizer else config.data.tokenizer_vocab_size
    ),
    max_position_embeddings=max(longest, config.env.max_length),
    **sizes,
    **runtime,
  )


def build_model_config(
  config,
  tokenizer: tokenizer_lib.Tokenizer | None,
  mesh: jax.sharding.Mesh,
) -> model_config.ModelConfig:
  """Returns the model config of a run, for the devices of a mesh.

  The function adds to the result of `shape` the implementations of attention
  and experts, which depend on the devices, and the dtype of the KV cache.

  Args:
    config: the config of a run.
    tokenizer: see `shape`.
    mesh: the devices that compute.

  Raises:
    ValueError: the model is not supported, `model.attention` does not run on
      these devices, or the config uses experts that the model does not have.
  """
  model, sizes = config.model, shape(config, tokenizer)
  platform = mesh_lib.platform(mesh)
  attends = attention.choose(
    model.attention,
    dtype=sizes.dtype,
    head_dim=sizes.head_dim,
    platform=platform,
  )
  replay = config.updates.routing_replay
  if replay != 'nowhere' and not sizes.num_experts:
    raise ValueError(
      f"updates.routing_replay={replay}: must be 'nowhere', because the "
      f'model in {model.path} has no experts'
    )
  expert = mesh.shape['expert']
  if expert > 1 and not sizes.num_experts:
    raise ValueError(
      f'mesh.expert={expert}: must be 1, because the model in {model.path} '
      'has no experts'
    )
  return dataclasses.replace(
    sizes,
    attention=attends,
    moe=moe.choose(model.moe, platform=platform, expert=expert),
    cache=config.rollout.cache_dtype,
  )


def end_token_ids(
  config, tokenizer: tokenizer_lib.Tokenizer
) -> tuple[int, ...]:
  """Returns the ids of the tokens that end a turn.

  If `model.eos_token_ids` is set, its ids are returned. Otherwise the result is
  the end token of the tokenizer and, if the tokenizer comes from the model's
  directory, the end tokens that this directory lists.

  Raises:
    ValueError: an id is not in the tokenizer's vocabulary; the message is one
      line.
  """
  model = config.model
  ids, source = tuple(model.eos_token_ids), 'model.eos_token_ids'
  if not ids:
    ids, source = (tokenizer.eos_id,), model.path
    if model.path and model.tokenizer_path in ('', model.path):
      ids += load.end_token_ids(model.path)
  # The embedding of a model may have more rows than its tokenizer has tokens.
  # The engine looks for the end of a turn among the tokenizer's tokens, so it
  # would never find a larger id.
  for token_id in ids:
    if token_id >= tokenizer.vocab_size:
      raise ValueError(
        f'{source}: the end token {token_id} must be smaller than '
        f'{tokenizer.vocab_size}, the size of the tokenizer'
      )
  return tuple(dict.fromkeys(ids))


def check(config, tokenizer: tokenizer_lib.Tokenizer) -> None:
  """Checks that the models' files are complete and fit each other and the run.

  The check reads no weights and uses no device.

  Raises:
    ValueError: a file is incomplete or does not fit; the message is one line
      that names the file.
  """
  model, policy = config.model, shape(config, tokenizer)
  if model.path:
    with hub.naming('model.path', model.path):
      load.check_weights(model.path, policy)
    if tokenizer.vocab_size > policy.vocab_size:
      home = model.tokenizer_path or model.path
      raise ValueError(
        f'{home}: the tokenizer has {tokenizer.vocab_size} tokens, but the '
        f'embedding in {model.path} has only {policy.vocab_size} rows'
      )
    _check_length(config, model.path, policy)
  check_tokenizer(config, tokenizer)
  if model.reference_path:
    _check_reference(config, policy)
  if model.value_path:
    values = load.read_config(model.value_path, longest=config.env.max_length)
    _check_length(config, model.value_path, values)
    with hub.naming('model.value_path', model.value_path):
      load.check_weights(model.value_path, values)


def _check_length(config, path: str, sizes: model_config.ModelConfig) -> None:
  """Raises ValueError if dialogues may be longer than the model's context."""
  longest = sizes.max_position_embeddings
  allowed = config.model.allow_beyond_max_position_embeddings
  if config.env.max_length > longest and not allowed:
    raise ValueError(
      f'env.max_length={config.env.max_length}: must be at most {longest}, '
      f'the max_position_embeddings in {path}; or set '
      'model.allow_beyond_max_position_embeddings'
    )


def check_tokenizer(config, tokenizer: tokenizer_lib.Tokenizer) -> None:
  """Checks that the tokenizer can encode and decode the dialogues of a run.

  Raises:
    ValueError: an end token, the prompt or a tag does not fit the tokenizer;
      the message is one line that names the directory.
  """
  model = config.model
  end_token_ids(config, tokenizer)
  home = model.tokenizer_path or model.path or 'the tokenizer of the data'
  try:
    check_dialogue(tokenizer, environments.find(config.env.name).tags)
  except ValueError as error:
    raise ValueError(f'{home}: {error}') from error


def _check_reference(config, policy: model_config.ModelConfig) -> None:
  """Raises ValueError if the reference's model config does not fit the policy.

  The same error is raised if files of the reference are incomplete.
  """
  model, path = config.model, config.model.reference_path
  options = weights_lib.compute_options(config)
  longest = config.env.max_length
  reference = load.read_config(path, longest=longest, **options)
  ours, theirs = dataclasses.asdict(policy), dataclasses.asdict(reference)
  for name in model_config.compared(policy):
    if ours[name] != theirs[name]:
      whose = f'in {model.path}' if model.path else 'of this config'
      raise ValueError(
        f'{path}: {name}={theirs[name]}, but the policy {whose} has '
        f'{ours[name]}'
      )
  with hub.naming('model.reference_path', path):
    load.check_weights(path, reference)


def check_dialogue(
  tokenizer: tokenizer_lib.Tokenizer, tags: Sequence[str]
) -> None:
  """Checks that decoding gives an encoded prompt, tags and words back.

  The environment reads decoded text. If decoding gave a tag back in another
  form, every turn would be invalid. White space beside a tag may change.

  Args:
    tokenizer: the policy's tokenizer.
    tags: the tags of the environment.

  Raises:
    ValueError: decoding does not give the prompt, a tag or a word back; the
      message is one line.
  """
  squeeze, asked = chat_template.without_space, chat_template.PROBE
  prompt = tokenizer.decode(tokenizer.encode_prompt(asked))
  if squeeze(asked) not in squeeze(prompt):
    raise ValueError(
      f'the tokenizer gives the prompt {asked!r} back as {prompt!r}'
    )
  written = _WORD.join(('', *tags, ''))
  read = tokenizer.decode(tokenizer.encode_text(written, tags=tags))
  position = 0
  for tag in tags:
    position = read.find(tag, position)
    if position < 0:
      break
    position += len(tag)
  if position < 0 or squeeze(read) != squeeze(written):
    raise ValueError(
      f'the tokenizer gives the dialogue {written!r} back as {read!r}'
    )


def export(
  config,
  directory: str | pathlib.Path,
  model: functional.Model,
  params: functional.Params,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  dtype: str,
  writes: bool = True,
) -> None:
  """Writes a policy of a run as a directory that `transformers` can load.

  The model's config and tokenizer files are copied from the directory that the
  run started from. If there is no such directory any more, they are written
  from the values in memory. All hosts call this function, and one host writes.

  Raises:
    OSError, ValueError: see `hf.export.export`.
  """
  source = hub.local_folder(config.model.path)
  # The directory may have been deleted since the start, or the run began from
  # random weights and had none.
  has_source = config.model.path and (source / 'config.json').is_file()
  export_lib.export(
    directory,
    model.config,
    params,
    dtype=dtype,
    source=source if has_source else '',
    save_tokenizer=functools.partial(_save_rest, config, tokenizer),
    writes=writes,
  )


def export_adapters(
  config,
  directory: str | pathlib.Path,
  model: functional.Model,
  adapters: functional.Params,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  dtype: str,
) -> None:
  """Writes the adapters of a policy as a directory that `peft` can load.

  Raises:
    ValueError: see `peft.write`; an earlier export is unchanged.
    OSError: writing failed; an earlier export is unchanged.
  """
  with export_lib.replace_dir(directory, ours=export_lib.is_ours) as folder:
    peft.write(
      folder,
      model.config,
      model.lora,
      adapters,
      base=config.model.path,
      dtype=export_lib.DTYPES[dtype],
    )
    _save_rest(config, tokenizer, folder)


def _save_rest(
  config, tokenizer: tokenizer_lib.Tokenizer, folder: pathlib.Path
) -> None:
  """Adds the tokenizer to an export, and marks the folder as an export."""
  home = hub.local_folder(config.model.tokenizer_path or config.model.path)
  if home.name and (home / 'tokenizer.json').is_file():
    export_lib.copy_tokenizer(home, folder)
  else:
    tokenizer.save(folder)
  run_folder.mark_export(folder)
