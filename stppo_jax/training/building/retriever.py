"""The retriever of a run: the client of a server, which the run may embed."""

from collections.abc import Iterator
import contextlib

from stppo_jax.data import questions as questions_lib
from stppo_jax.retrieval import client
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import faults
from stppo_jax.retrieval import recording
from stppo_jax.retrieval import server
from stppo_jax.rollout import event_loop

# Characters of a passage that are kept for each token of an observation.
_CHARS_PER_TOKEN = 32


@contextlib.contextmanager
def connect(
  config, questions: questions_lib.Questions, loop: event_loop.EventLoop
) -> Iterator[client.HttpRetriever]:
  """Connects to the retriever; without a URL, to an embedded server.

  Raises:
    ValueError, OSError: passages or a recording cannot be read or written.
    RetrieverUnreachable: no server answers within retrieval.start_grace.
  """
  c = config.retrieval
  with contextlib.ExitStack() as stack:
    url = c.url
    if c.replay:
      replayed = server.embedded(recording=recording.Recording(c.replay))
      url = stack.enter_context(replayed).url
    elif not url:
      embedded = server.embedded(
        questions.passages(), world_passages=questions.world_passages
      )
      url = stack.enter_context(embedded).url
    recorder = None
    if c.record:
      recorder = recording.Recorder(c.record, topk=c.topk)
      stack.callback(recorder.close)
    rate, seed = c.faults.rate, c.faults.seed
    retriever = client.HttpRetriever(
      url,
      dialect=dialects.DIALECTS[c.dialect],
      topk=c.topk,
      timeout=c.timeout,
      retries=c.retries,
      start_grace=c.start_grace,
      max_failure_rate=c.max_failure_rate,
      max_queries_per_request=c.max_queries_per_request,
      # Text has some four characters a token; more is cut off anyway.
      max_passage_chars=_CHARS_PER_TOKEN * config.env.max_observation_tokens,
      faults=faults.Faults(rate=rate, seed=seed) if rate else None,
      recorder=recorder,
    )
    stack.callback(lambda: loop.run(retriever.close()))
    loop.run(retriever.wait_until_ready())
    yield retriever
