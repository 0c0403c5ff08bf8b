"""Builds the components and services of a run from its config.

`Components` need no weights and no server. They are built before anything is
written and before any server is waited for, so that every error in a config,
its files or the devices is reported at once. `Services` run beside the policy:
an event loop and the client of a retriever that answers.

Only `training`, `analysis` and `commands` read configs; all other packages take
numbers.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import typing

import jax

from stppo_jax import exits
from stppo_jax.data import arithmetic
from stppo_jax.data import demonstrations
from stppo_jax.data import games
from stppo_jax.data import kinds
from stppo_jax.data import questions as questions_lib
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.envs import reward_function
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import moe
from stppo_jax.parallel import distributed
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.retrieval import client
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training.building import model_files
from stppo_jax.training.building import retriever as retriever_lib
from stppo_jax.training.checks import batch_sizes
from stppo_jax.training.checks import data_check


@dataclasses.dataclass(frozen=True)
class Services:
  """The services that run beside the policy.

  Attributes:
    questions: the data set.
    environment: opens the dialogues and answers the policy's turns.
    retriever: the client of the retrieval server; None if the environment needs
      none.
    loop: the event loop on which the environment and its clients run.
  """

  questions: questions_lib.Questions
  environment: protocol.Environment
  retriever: client.HttpRetriever | None
  loop: event_loop.EventLoop


@dataclasses.dataclass(frozen=True)
class Components:
  """The components of a config that fits its files and the devices.

  Attributes:
    questions: the data set.
    tokenizer: the policy's tokenizer.
    learner: models and compiled programs; no weight is read yet.
    placement: the devices that decode; None with rollout.engine=remote.
    notes: lines about questions that cannot be used as they are.
  """

  questions: questions_lib.Questions
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner
  placement: publish_lib.Placement | None
  notes: Sequence[str]


def build_components(config) -> Components:
  """Builds and checks everything that needs no weights and no retriever.

  Raises:
    Misconfigured: the config does not fit its files or the devices.
  """
  with exits.as_misconfigured():
    questions = build_questions(config)
    tokenizer = build_tokenizer(config, questions)
    model_files.check(config, tokenizer)
    mesh = build_mesh(config)
    shape = build_model_config(config, tokenizer, mesh)
    learner = learner_lib.Learner(config, shape, mesh)
    placement = build_placement(config, shape, mesh)
    batch_sizes.check(config, shape, mesh, placement)
    notes = data_check.check(config, questions, tokenizer)
  return Components(questions, tokenizer, learner, placement, notes)


def build_questions(config) -> questions_lib.Questions:
  """Returns the data set of a config."""
  return kinds.KINDS[config.data.name].load(config.data, seed=config.seed)


def build_demonstrations(
  config,
  questions: questions_lib.Questions,
  environment: protocol.Environment,
) -> demonstrations.Demonstrations:
  """Returns the demonstrations that the supervised start imitates.

  Raises:
    ValueError: there are none; one line.
  """
  if isinstance(questions, games.GameQuestions):
    if not hasattr(environment, 'demonstrate'):
      raise ValueError(
        f'env.name={config.env.name}: has no demonstrations to imitate; start '
        'from a model that can follow the prompt (model.path), without '
        'sft.before_training'
      )
    if not questions.count:
      raise ValueError(
        'data.games.count=0: must be greater than 0 for demonstrations, '
        'because a new game takes long to make'
      )
    return games.GameDemonstrations(
      questions=questions,
      player=typing.cast(games.Player, environment),
      error_rate=config.sft.error_rate,
      clean_steps=config.sft.clean_one_hop_steps + config.sft.clean_steps,
    )
  if isinstance(questions, questions_lib.SyntheticQuestions):
    return demonstrations.SyntheticDemonstrations(
      questions=questions,
      error_rate=config.sft.error_rate,
      clean_one_hop_steps=config.sft.clean_one_hop_steps,
      clean_steps=config.sft.clean_steps,
      think_words=config.data.synthetic_wiki.think_words,
    )
  if isinstance(questions, arithmetic.ArithmeticQuestions):
    return arithmetic.CalculatorDemonstrations(
      questions=questions,
      error_rate=config.sft.error_rate,
      clean_steps=config.sft.clean_one_hop_steps + config.sft.clean_steps,
    )
  return demonstrations.LookupDemonstrations(
    questions=questions, seed=config.seed, error_rate=config.sft.error_rate
  )


@contextlib.contextmanager
def build_services(
  config, questions: questions_lib.Questions
) -> Iterator[Services]:
  """Builds the environment of a run, and its retriever if it needs one.

  Raises:
    Misconfigured: if passages cannot be read, or an option of the environment
      has a bad value.
    RetrieverUnreachable: if no server answers within retrieval.start_grace.
    RewardFunctionFailed: if the user's reward function fails.
  """
  with contextlib.ExitStack() as stack:
    with exits.as_misconfigured():
      kind = environments.find(config.env.name)
    loop = stack.enter_context(event_loop.EventLoop())
    retriever = None
    if kind.needs_retriever:
      with exits.as_misconfigured():
        connected = retriever_lib.connect(config, questions, loop)
        retriever = stack.enter_context(connected)
    with exits.as_misconfigured():
      environment = kind.from_options(config.env.to_dict(), retriever)
      name = config.env.reward_function
      if name:
        question = questions.train(0, 1, resample_round=0)[0]
        reward_function.try_once(name, environment, question)
    yield Services(questions, environment, retriever, loop)


def build_tokenizer(
  config, questions: questions_lib.Questions | None
) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer of the model, or one made from the data.

  For questions that are made here it has a token for each phrase; for files,
  byte-level BPE is trained on their passages.
  """
  path = config.model.tokenizer_path or config.model.path
  if path:
    return model_files.load_tokenizer(path)
  environment = environments.find(config.env.name)
  vocabulary = kinds.KINDS[config.data.name].vocabulary
  if vocabulary is not None:
    phrases = environment.phrases(vocabulary(config.data))
    return tokenizer_lib.phrase_tokenizer(phrases)
  assert questions is not None, 'there is no directory with a tokenizer'
  passages = questions.passages()
  assert passages is not None  # files have a corpus
  texts = [
    f'Doc 1(Title: {passage.title}) {passage.text}\n' for passage in passages
  ]
  # The tags are in every dialogue but in no passage. They are repeated, so that
  # BPE merges each of them into few tokens.
  texts += list(environment.tags) * len(texts)
  return tokenizer_lib.train_byte_level_bpe(
    texts, config.data.tokenizer_vocab_size
  )


def build_model_config(
  config,
  tokenizer: tokenizer_lib.Tokenizer | None,
  mesh: jax.sharding.Mesh,
) -> model_config.ModelConfig:
  """Returns the models' shape, from the model's directory or the config.

  Args:
    config: the config of a run.
    tokenizer: gives the vocabulary's size where there is no directory.
    mesh: the devices that compute, whose platform chooses the implementations.

  Raises:
    ValueError: an unsupported model, a `model.attention` that does not run on
      these devices, or a replay of experts by a model without experts.
  """
  model, shape = config.model, model_files.shape(config, tokenizer)
  platform = mesh_lib.platform(mesh)
  attends = attention.choose(
    model.attention,
    dtype=shape.dtype,
    head_dim=shape.head_dim,
    platform=platform,
  )
  replay = config.updates.routing_replay
  if replay != 'nowhere' and not shape.num_experts:
    raise ValueError(
      f'updates.routing_replay={replay}: must be nowhere, the model in '
      f'{model.path} has no experts'
    )
  return dataclasses.replace(
    shape,
    attention=attends,
    moe=moe.choose(model.moe, platform=platform),
    cache=config.rollout.cache_dtype,
  )


def build_mesh(config, devices: Sequence | None = None) -> jax.sharding.Mesh:
  """Returns the mesh of training.

  Args:
    config: the config of a run.
    devices: the devices of the run, of which some may only collect; None: all.

  Raises:
    ValueError: the axes do not fit the devices.
  """
  mesh = mesh_lib.make_learning_mesh(**config.mesh, devices=devices)
  return distributed.by_host(mesh)


def build_placement(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  devices: Sequence | None = None,
) -> publish_lib.Placement | None:
  """Returns the devices that decode; None with rollout.engine=remote.

  Args:
    config: the config of a run.
    shape: the policy's shape.
    mesh: the mesh of training.
    devices: see `build_mesh`.

  Raises:
    ValueError: rollout.tensor does not divide the devices or the model.
  """
  if config.rollout.engine != 'local':
    return None
  tensor = config.rollout.tensor or mesh.shape['tensor']
  _, collecting = mesh_lib.divide(
    devices or jax.devices(), config.mesh.collect_fraction
  )
  # Programs that are only compiled are those of the last host: libtpu 0.0.42
  # fails with an internal error for the first host of v5e and v6e slices that
  # have several, and not for the others.
  host = devices[-1].process_index if devices else jax.process_index()
  here = tuple(d for d in collecting if d.process_index == host)
  try:
    placement = publish_lib.Placement(mesh, tensor, here, host)
    functional.Model(shape, 'vocabulary', mesh=placement.mesh)
  except ValueError as error:
    raise ValueError(f'rollout.tensor={tensor}: {error}') from error
  return placement


def length_unit(config) -> int:
  """Returns the number of tokens that every batch's length is a multiple of."""
  return pack.unit(
    config.rollout.length_bucket, max_length=config.env.max_length
  )
