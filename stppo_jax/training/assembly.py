"""From a config to the parts of a run.

Only `training` and `commands` know configs; everything below takes numbers.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib

import jax

from stppo_jax.data import demonstrations
from stppo_jax.data import questions as questions_lib
from stppo_jax.data import synthetic_wiki
from stppo_jax.envs import prompts
from stppo_jax.envs import search
from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.retrieval import client
from stppo_jax.retrieval import server
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import sentences
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import engine as remote_engine
from stppo_jax.training import model_files


class Misconfigured(Exception):
  """A config that does not fit its files or the devices; one line each."""

  exit_code = 2


@contextlib.contextmanager
def misconfigured() -> Iterator[None]:
  """Turns errors of building parts from a config into `Misconfigured`."""
  try:
    yield
  except (ValueError, OSError) as error:
    raise Misconfigured(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Services:
  """What the policy lives in: where questions come from, who answers them."""

  questions: questions_lib.Questions
  environment: search.SearchEnvironment
  retriever: client.HttpRetriever
  loop: event_loop.EventLoop


def build_questions(config) -> questions_lib.Questions:
  """The data set of a config."""
  if config.data.name == 'synthetic_wiki':
    options = config.data.synthetic_wiki
    return questions_lib.SyntheticQuestions(
      seed=config.seed,
      world_seed=options.seed,
      hops=tuple(options.hops),
      world_options={
        'entities_per_type': options.entities_per_type,
        'name_pieces': options.name_pieces,
        'distractors': options.distractors,
      },
    )
  root = pathlib.Path(config.data.root)
  evaluation = config.data.evaluation
  return questions_lib.FileQuestions(
    seed=config.seed,
    train=root / config.data.train,
    evaluation=root / evaluation if evaluation else None,
    corpus=root / config.data.corpus,
  )


def build_demonstrations(
  config, questions: questions_lib.Questions
) -> demonstrations.Demonstrations:
  """What the supervised start imitates."""
  if config.data.name == 'synthetic_wiki':
    return demonstrations.SyntheticDemonstrations(
      questions=questions,
      error_rate=config.sft.error_rate,
      clean_one_hop_steps=config.sft.clean_one_hop_steps,
      clean_steps=config.sft.clean_steps,
      think_words=config.data.synthetic_wiki.think_words,
    )
  return demonstrations.LookupDemonstrations(
    questions=questions, seed=config.seed, error_rate=config.sft.error_rate
  )


@contextlib.contextmanager
def build_services(
  config, questions: questions_lib.Questions
) -> Iterator[Services]:
  """Starts the event loop and, without a URL, a retrieval server of our own.

  Raises:
    Misconfigured: passages that cannot be read.
    RetrieverUnreachable: nobody answers within retrieval.start_grace.
  """
  with misconfigured():
    passages = questions.passages()
  with contextlib.ExitStack() as stack:
    loop = stack.enter_context(event_loop.EventLoop())
    url = config.retrieval.url
    if not url:
      embedded = server.embedded(
        passages, world_passages=questions.world_passages
      )
      url = stack.enter_context(embedded).url
    retriever = client.HttpRetriever(
      url,
      topk=config.retrieval.topk,
      timeout=config.retrieval.timeout,
      retries=config.retrieval.retries,
      start_grace=config.retrieval.start_grace,
      max_queries_per_request=config.retrieval.max_queries_per_request,
    )
    stack.callback(lambda: loop.run(retriever.close()))
    loop.run(retriever.wait_until_ready())
    environment = search.SearchEnvironment(
      retriever=retriever,
      max_turns=config.env.max_turns,
      prompt_template=config.env.prompt_template,
      rewards=config.env.rewards.to_dict(),
      reward_scope=config.env.reward_scope,
    )
    yield Services(questions, environment, retriever, loop)


def build_tokenizer(
  config, questions: questions_lib.Questions
) -> tokenizer_lib.Tokenizer:
  """The tokenizer of the model, or one made from the data.

  A synthetic world has its own phrases; files get a byte-level BPE trained on
  their passages.
  """
  path = config.model.tokenizer_path or config.model.path
  if path:
    return model_files.load_tokenizer(path)
  if config.data.name == 'synthetic_wiki':
    phrases = synthetic_wiki.vocabulary()
    phrases.append(prompts.correction().body)
    return tokenizer_lib.phrase_tokenizer(phrases)
  texts = [
    f'Doc 1(Title: {passage.title}) {passage.text}\n'
    for passage in questions.passages()
  ]
  # The tags come up in every dialogue: let the merges know them.
  texts += list(tokenizer_lib.TAGS) * len(texts)
  return tokenizer_lib.train_byte_level_bpe(
    texts, config.data.tokenizer_vocab_size
  )


def build_model_config(
  config, tokenizer: tokenizer_lib.Tokenizer | None
) -> model_config.ModelConfig:
  """The shape: from the model's directory, or from the config.

  Args:
    config: of the run.
    tokenizer: its size is the vocabulary where there is no directory.

  Raises:
    ValueError: no model of ours, a `model.attention` that does not run here, or
      a replay of experts that are not there.
  """
  model, shape = config.model, model_files.shape(config, tokenizer)
  attends = attention.choose(
    model.attention,
    dtype=shape.dtype,
    head_dim=shape.head_dim,
    platform=jax.default_backend(),
  )
  replay = config.updates.routing_replay
  if replay != 'nowhere' and not shape.num_experts:
    raise ValueError(
      f'updates.routing_replay={replay}: must be nowhere, the model in '
      f'{model.path} has no experts'
    )
  return dataclasses.replace(shape, attention=attends, moe=model.moe)


def build_mesh(config, *, local: bool = False) -> jax.sharding.Mesh:
  """The mesh of the run, or one of the same axes over this host's devices."""
  if local:
    devices = jax.local_devices()
    return mesh_lib.make_mesh(data=-1, fsdp=1, tensor=1, devices=devices)
  axes = config.mesh
  return mesh_lib.make_mesh(data=axes.data, fsdp=axes.fsdp, tensor=axes.tensor)


def build_collector(
  config,
  services: Services,
  tokenizer: tokenizer_lib.Tokenizer,
  policy: functional.Model,
  *,
  slots: int,
  group_size: int = 1,
) -> tuple[collect.Collector, engine_lib.Engine | remote_engine.RemoteEngine]:
  """A collector and its engine; publish weights to the engine before use.

  Raises:
    EngineUnreachable, EngineUnsuited: of `rollout.engine='remote'`.
  """
  rollout = config.rollout
  options = {
    'automaton': stops.build(tokenizer.token_bytes(), eos_id=tokenizer.eos_id),
    'max_length': config.env.max_length,
    'sampling': sampler.Sampling(
      temperature=rollout.temperature,
      top_k=rollout.top_k,
      top_p=rollout.top_p,
      min_p=rollout.min_p,
    ),
  }
  if rollout.engine == 'remote':
    engine = _build_remote(
      config, services.loop, policy, eos_id=tokenizer.eos_id, **options
    )
  else:
    engine = engine_lib.Engine(
      policy,
      mesh=build_mesh(config, local=True),
      slots=slots,
      extend_chunk=rollout.extend_chunk,
      decode_chunk=rollout.decode_chunk,
      early_exit=rollout.early_exit,
      lookahead=rollout.lookahead,
      cache_blocks=rollout.cache_blocks,
      deterministic=rollout.deterministic,
      lanes=rollout.lanes,
      batch_rows=rollout.batch_rows,
      replays=config.updates.routing_replay == 'sampler',
      **options,
    )
  collector = collect.Collector(
    engine=engine,
    environment=services.environment,
    tokenizer=tokenizer,
    loop=services.loop,
    max_turn_tokens=config.env.max_turn_tokens,
    max_observation_tokens=config.env.max_observation_tokens,
    group_size=group_size,
  )
  return collector, engine


def _build_remote(
  config, loop: event_loop.EventLoop, policy: functional.Model, **options
) -> remote_engine.RemoteEngine:
  served = config.rollout.remote
  client = client_lib.Client(
    loop, served.url, timeout=served.timeout, retries=served.retries
  )
  return remote_engine.RemoteEngine(
    client,
    loop=loop,
    model=served.model,
    shape=policy.config,
    stop_strings=stops.STOP_STRINGS,
    concurrency=served.concurrency,
    **options,
  )


def build_sentences(
  config, tokenizer: tokenizer_lib.Tokenizer
) -> sentences.SentenceSplitter | None:
  """What cuts turns into sentences, if the algorithm looks at them."""
  if config.algorithm.ratio.level != 'sentence':
    return None
  return sentences.SentenceSplitter(tokenizer.token_bytes())
