"""The section `rollout`: how trajectories are collected and sampled."""

from typing import Any


def section() -> dict[str, Any]:
  """Returns the section `rollout`."""
  return {
    'trajectories_per_step': 512,  # collected in each step
    # Trajectories per question. Algorithms that compare the trajectories of a
    # question have a larger default, see `CHANGES` in algorithms.py.
    'group_size': 1,
    # Groups whose rewards are all equal have no advantage. They are
    # replaced by groups of new questions, in at most this many extra
    # collections per step (dynamic sampling of DAPO). 0 = never.
    'resample_rounds': 0,
    'temperature': 1.0,  # the logits are divided by this number
    # Three filters choose which tokens may be sampled, one after the other.
    # The first filter keeps the top_k most probable tokens; 0 = all tokens.
    'top_k': 0,
    # The second filter keeps the fewest tokens whose probabilities sum to
    # top_p.
    'top_p': 1.0,
    # The third filter keeps tokens with at least min_p times the largest
    # probability.
    'min_p': 0.0,
    # Trajectories that a host decodes at once, also in evaluations. 0 = all
    # trajectories that the host collects in a step, or as many of them as fit
    # in the memory of its devices beside the training state.
    'slots': 0,
    # local: the engine of this process. remote: a server, see below. With
    # several hosts, it must be local.
    'engine': 'local',
    # A server of completions that receives the weights; docs/engines.md.
    'remote': {
      # The address of vLLM or SGLang.
      'url': '',
      'model': '',  # the name of the model on the server
      'timeout': 300.0,  # seconds per turn, and until the server is ready
      'retries': 4,  # attempts per turn after the first
      'concurrency': 256,  # turns requested at the same time
    },
    # True: all slots are filled together, and refilled when the last dialogue
    # has ended, so the bits of the results do not depend on the timing of the
    # retriever. False: free slots are refilled at once, and only dialogues that
    # are writing a turn are computed. This is faster, and the results are the
    # same up to rounding.
    'deterministic': True,
    # If not deterministic: the most trajectories that one call of a program
    # decodes; 0 = all. Fewer trajectories differ less in length, which
    # saves time on a CPU.
    'batch_rows': 0,
    # The number of lanes: slots are divided into lanes, which are decoded
    # in parallel, each by a thread. Set it to the number of cores on a CPU;
    # it must be 1 on several devices. Every lane has the same number of
    # slots and holds whole groups.
    'lanes': 1,
    'prefill_chunk': 64,  # tokens appended to a slot per call
    # The number of devices over which one copy of the engine's weights is
    # sharded. The other devices of a host hold further copies, which decode
    # other trajectories. 0 = mesh.tensor.
    'tensor': 0,
    # The devices on which a program decodes, if there are several hosts. Each
    # host decodes its own trajectories in any case.
    # host: the devices of one host, which does not wait for other hosts.
    # slice: the devices of all hosts, which call their programs together.
    # auto: slice on TPUs whose compiler refuses programs for one host, and
    # host elsewhere.
    'span': 'auto',
    # The tokens of a chunk: the number of tokens that are decoded before the
    # host reads which turns have ended.
    'decode_chunk': 16,
    # If not deterministic, a chunk ends as soon as this share of its turns
    # has ended; on a GPU a chunk always has decode_chunk tokens.
    'early_exit': 0.25,
    # Chunks that are started before the host has read the previous chunk.
    'lookahead': 1,
    # The tokens of a page of the KV cache. 0 = a quarter of env.max_length, but
    # at most 128. With this default, kernels for TPU and GPU read only the
    # pages that a trajectory has begun. Other programs read, for each
    # trajectory, as many pages as their longest trajectory has begun.
    'page_size': 0,
    # The number of pages of a host. If there are fewer pages than all slots can
    # need, trajectories wait until other trajectories have ended; this needs
    # deterministic=False. 0 = as many pages as all slots can need.
    'pages': 0,
    # The type of cached keys and values: model (as model.dtype) | int8.
    # int8 halves a cache of bfloat16. The engine's log-probabilities then
    # differ more from the trainer's: see mismatch/* in docs/metrics.md.
    'cache_dtype': 'model',
    # Batches are padded to a multiple of this number of tokens. A program is
    # compiled for each length. So a number with which there would be more than
    # 8 lengths up to env.max_length is first replaced by the next multiple that
    # gives at most 8: with an env.max_length of 4096, 256 becomes 512.
    'length_bucket': 256,
    # A step or an evaluation is collected again if too much of it ended in
    # INFRA_ERROR. At least this share of the trajectories must succeed. The
    # same share is required of the turns of one action, such as search: the
    # action with the largest share of failed turns. A single failed turn of
    # this action does not count.
    'min_valid_fraction': 0.5,
    # Trajectories of a step that still ended in INFRA_ERROR are collected again
    # with the same keys, in at most this many extra collections. 0 = never.
    # Trajectories that still fail have no weight in the update.
    'refill_rounds': 0,
    # Step n is collected with the policy after n - steps_ahead steps. On one
    # device, or with mesh.collect_fraction, it is collected while the steps
    # before it are trained on. Otherwise collecting and training alternate.
    # 0 = each step is collected with the newest policy.
    'steps_ahead': 0,
    # With steps_ahead, whether a turn takes the newest weights when it begins:
    # never | keep | recompute. never: a step is collected with one policy, and
    # begins when the collection of the step before it is complete. keep: a turn
    # takes the newest weights, the cached keys and values of earlier tokens are
    # kept, and a step begins in slots that the step before it leaves free.
    # recompute: like keep, but the cached keys and values are computed again.
    # At most steps_ahead steps lie between a turn and its update.
    'turn_swaps': 'never',
    # The folder of a run with turn_swaps that this run repeats bit for bit. A
    # turn waits for the version of the policy that wrote the turn in that run.
    # '' = no run is repeated.
    'replay_order': '',
    # The limit for the difference of the log-probabilities of engine and
    # trainer, which rounding causes. It applies to the mean over the tokens.
    # 99% of the tokens may differ by at most 10 times as much. If the first
    # step exceeds the limit, the run ends. -1 = the limit for model.dtype, see
    # docs/models.md. 0 = no limit.
    'mismatch_limit': -1.0,
  }
