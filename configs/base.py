"""Every key of a run with its default, its unit and its choices.

Some sections are functions of files beside this one, such as `rollout.py`.
Other configs change a few of the keys. The rules for their values are in
`schema.py` and `relations.py`. Configs are Python programs that run when they
are loaded: open one only if you trust it.
"""

import copy
from typing import Any

from ml_collections import config_dict

from stppo_jax import settings
from stppo_jax.configs import alarms
from stppo_jax.configs import algorithms
from stppo_jax.configs import model
from stppo_jax.configs import offline
from stppo_jax.configs import optimizer
from stppo_jax.configs import rollout
from stppo_jax.configs import saving

# A ConfigDict. Its keys are attributes that exist at run time only, where a
# type checker cannot follow them.
Config = Any


def get_config(algorithm: str = 'st_ppo') -> Config:
  """Returns the base configuration with the algorithm of that name.

  Args:
    algorithm: a key of `configs.algorithms.ALGORITHMS`.

  Raises:
    UnknownName: there is none; the message lists the choices.
  """
  if algorithm not in algorithms.ALGORITHMS:
    choices = settings.closest(algorithm, sorted(algorithms.ALGORITHMS))
    raise algorithms.UnknownName(f'unknown algorithm {algorithm!r}{choices}')
  config: Config = config_dict.ConfigDict(
    {
      'seed': 0,  # of questions, sampling, shuffles and new weights
      # The number of steps. A step is one collection with its updates.
      'num_steps': 100,
      # What plots call the run, before its seed. Commands put the name of the
      # config file before it.
      'title': algorithm,
      'algorithm': copy.deepcopy(algorithms.ALGORITHMS[algorithm]),
      # The folder of a run of `train`, from whose newest policy this run starts
      # in place of the model below; '' = from that model. See docs/models.md.
      'init_from': '',
      'model': model.section(),
      # The number of devices along each axis of the mesh; -1 = all that the
      # other axes leave.
      'mesh': {
        'data': -1,  # cuts batches; weights are replicated along it
        'fsdp': 1,  # cuts batches and weights
        'expert': 1,  # cuts batches and weights, experts by whole ones
        'tensor': 1,  # cuts weights within a layer
        # The share of each host's devices that only collects while the others,
        # which are those of the mesh, learn; for rollout.steps_ahead > 0.
        # It is rounded to whole devices. 0 = all devices do both.
        'collect_fraction': 0.0,
        # The hosts that only collect, the last ones of the run, while the
        # others, whose devices are those of the mesh, learn; for
        # rollout.steps_ahead > 0. 0 = all hosts do both.
        'collectors': 0,
      },
      'data': {
        # synthetic_wiki: questions on made-up encyclopedias. jsonl: questions
        # and passages from files, JSONL or parquet. tfds: data sets that the
        # command `data build` has built. arithmetic: sums for env.name=tools.
        # games: numbers from which env.name=textworld and gymnasium make games.
        'name': 'synthetic_wiki',
        # The folder that holds the files of jsonl, or the data sets of tfds.
        'root': '',
        # Training questions: a file in that folder, a data set, or a mixture of
        # several such as 'nq:train weight=2, hotpotqa:train weight=1 hops>=2'.
        # See docs/data.md.
        'train': '',
        # Evaluation questions, written like the training questions, without
        # weights; '' = no evaluation.
        'evaluation': '',
        # A file of passages in that folder; '' = an external server has them.
        'corpus': '',
        # With jsonl and tfds, if the model has no tokenizer, a BPE tokenizer is
        # trained on the passages. This is the size of its vocabulary.
        'tokenizer_vocab_size': 4096,
        'synthetic_wiki': {
          # Seed of the encyclopedia. It does not depend on the run's seed, so
          # evaluations of different runs ask the same questions.
          'seed': 0,
          # How many facts lead to an answer; (1, 2) alternates the two.
          'hops': (1, 2),
          'entities_per_type': 42,  # entities of each of the five types
          'name_pieces': 2,  # sub-word pieces that a name consists of
          'distractors': 0,  # extra entities to which no fact points
          'think_words': 0,  # filler words in each <think> of a demonstration
          # In how many turns of a demonstration, from the first on, there may
          # be an error; 0 = in all. With 1, what a dialogue earns is decided
          # early, which is something that a critic can know.
          'error_turns': 0,
          # The probability that a demonstration asks again with the whole name
          # after half of it has found nothing.
          'repair_rate': 0.0,
        },
        'arithmetic': {'max_number': 20},  # the largest number in a question
        'games': {
          # How many games are trained on; 0 = new ones in every step.
          'count': 0,
        },
      },
      'env': {
        'name': 'search',  # a key of ENVIRONMENTS in envs/environments.py
        # The number of turns that may get an observation. One more turn may
        # follow, which can only give the answer.
        'max_turns': 4,
        'max_turn_tokens': 500,  # longest turn
        'max_observation_tokens': 500,  # longer observations are cut
        # Longest trajectory (prompt, turns and observations), in tokens.
        'max_length': 4096,
        # A text file that contains {question}; '' = the built-in prompt.
        'prompt_template': '',
        # module:function, a function of yours that computes one more reward of
        # a trajectory; '' = none. See docs/data.md.
        'reward_function': '',
        # The weight of each reward.
        'rewards': {
          # Rewards of the trajectory, on its last token.
          'exact_match': 1.0,  # if the answer is a golden answer
          'substring_match': 0.0,  # if the answer contains a golden answer
          'f1': 0.0,  # times the F1 of its words with a golden answer's
          'format': 0.0,  # if every turn has the right form
          'search_penalty': 0.0,  # subtracted once per search
          # Subtracted from trajectories that come near max_length: nothing up
          # to max_length - n, all of it at max_length, linear in between, where
          # n is overlong_fraction times max_length (DAPO). Without it a
          # trajectory that was cut off has the reward of a wrong answer.
          'overlong': 0.0,
          # Rewards of a turn, on the last token of the turn.
          'turn_search': 0.0,  # if its search found passages
          'turn_answer_found': 0.0,  # if these contain a golden answer
          # If these passages contain a golden answer and no earlier ones did.
          'turn_first_found': 0.0,
          # Times the gain in the probability of the first golden answer by what
          # was read after the turn. The policy that is about to be updated is
          # asked, also with rollout.steps_ahead. It costs up to max_turns + 1
          # forward passes of each trajectory, each over all tokens so far.
          'information_gain': 0.0,
          # Rewards of env.name=textworld.
          'solved': 1.0,  # reward of the trajectory, if the game is solved
          # Reward of a turn: added if the solution is fewer commands away than
          # before the turn, subtracted if it is more. 0 = sparse rewards.
          'turn_progress': 0.0,
        },
        # The last part of max_length, in which rewards.overlong grows.
        'overlong_fraction': 0.2,
        # Where the answer is searched for. response: in the policy's turns.
        # search_r1: in prompt and response, like the scorer of Search-R1,
        # faults included.
        'reward_scope': 'response',
        # env.name=tools: functions that the policy can call.
        'tools': {
          # The built-in tools that it can call, keys of TOOLS in envs/tools.py.
          'names': ('calculator',),
          # MCP servers: addresses such as http://localhost:8000/mcp, or
          # commands such as 'python server.py'. All their tools can be called.
          'mcp_servers': (),
          'timeout': 10.0,  # seconds per call
        },
        # env.name=textworld: generated text games.
        'textworld': {
          'rooms': 2,  # the number of rooms in a game
          'objects': 4,  # the least number of objects in these rooms
          'quest_length': 2,  # the number of commands that solve a game
          # Whether observations list the commands that are possible.
          'list_commands': True,
        },
        # env.name=gymnasium: your own environment; docs/environments.md.
        'gymnasium': {
          # module:function, a function that returns an environment.
          'make': '',
          'timeout': 60.0,  # seconds per call of its methods
        },
      },
      # How a question becomes the tokens that the model reads; see
      # docs/prompts.md. `python -m stppo_jax prompt` shows them.
      'prompt': {
        # A system message before the question; '' = the chat template's own, if
        # it has one. Where the template allows none, it begins the question.
        'system': '',
        # Whether the model thinks first, for chat templates that let one choose
        # it, as that of Qwen3: auto | on | off. auto: their own choice.
        'enable_thinking': 'auto',
        # Whether the chat template describes the tools of the environment, if
        # it can. The built-in prompt lists them anyway.
        'tools': True,
        # Whether a prompt begins with the tokenizer's bos_token: auto | on |
        # off. auto: as the chat template writes it, or, without one, as the
        # tokenizer begins any text.
        'bos': 'auto',
      },
      'retrieval': {
        'url': '',  # '' = an embedded server on a free local port
        # Protocol of the server: search_r1 | skyrl | rllm | zerosearch |
        # r1_searcher. Our server speaks all. See docs/retrieval.md.
        'dialect': 'search_r1',
        'topk': 3,  # passages per search
        'timeout': 30.0,  # seconds per request
        'retries': 4,  # attempts per query after the first
        # Seconds to wait for the server, at the start and in an outage.
        'ready_timeout': 60.0,
        # If more than this share of the last 6 requests, and at least 3, found
        # no server, all searches wait until it is ready, for at most
        # ready_timeout seconds; 1 = never.
        'max_failure_rate': 0.5,
        'max_queries_per_request': 64,  # more become several requests
      },
      'rollout': rollout.section(),
      'updates': {
        'minibatch_size': 256,  # trajectories per optimiser step
        'num_epochs': 1,  # passes over a collected batch
        # Further passes, in which the value model learns alone. `plan` and the
        # metrics of throughput do not count them.
        'value_epochs': 0,
        # Whether every epoch divides the batch into minibatches in a random
        # order of its own, or in the order of collection.
        'shuffle': True,
        # The updates of a step end after the first in which log(old / new), the
        # mean over its policy tokens (actor/ppo_kl), exceeds this; 0 = never.
        'kl_stop': 0.0,
        # Tokens of a row of the forward pass, which holds several trajectories;
        # 0 = env.max_length. Longer rows are filled better.
        'row_length': 0,
        # Rows per forward pass, on all devices together; 0 = all of a
        # minibatch.
        'microbatch_size': 0,
        # On a single CPU device, in place of microbatch_size: rows per forward
        # pass of one core. The cores run in parallel, each with gradients of
        # its own. It has no effect if the scope of a correction is the
        # microbatch. 0 = off.
        'core_rows': 0,
        # The run ends with exit code 76 after this many skipped updates in a
        # row; 0 = never. An update is skipped if its loss, its gradient, a new
        # weight or a new moment is not finite, or if the norm of a gradient is
        # above skip_grad_norm.
        'max_skipped': 8,
        # Tokens per device whose logits are held at once, at least one per
        # trajectory; 0 = all tokens. A few arrays of 4 bytes x vocabulary
        # entries x tokens are held; the backward pass computes them again.
        'head_chunk': 4096,
        # What a layer keeps for the backward pass: none (everything is kept) |
        # all_dots (all matrix products) | dots (products with weights, not
        # those of attention) | full (only its input).
        'remat': 'none',
        # The old policy, which is the denominator of the ratio. sampled: the
        # policy that collected, so the ratio contains the staleness. current:
        # the policy before the updates of this step, so the staleness is in k
        # of the corrections tis, mis, icepop and geo_rs.
        'old_policy': 'sampled',
        # Which experts tokens visit in an update: nowhere | trainer | sampler.
        # nowhere: those that the router chooses now. trainer: those of the old
        # policy in the trainer (R2). sampler: those of the local engine (R3).
        # With the last two, a change of the routing does not change the ratio.
        'routing_replay': 'nowhere',
      },
      'policy_optimizer': optimizer.adam(learning_rate=1e-6),
      'value_optimizer': optimizer.adam(learning_rate=1e-5),
      'loss': {
        'entropy_coefficient': 0.001,  # weight of the entropy bonus
        # The smallest and the largest return, such as (0.0, 1.0) for an answer
        # that is right or wrong. Values then lie between the two, start in the
        # middle, and learn by cross-entropy in place of the squared error; ()
        # = any values.
        'value_range': (),
        'value_clip': 0.5,  # most that a value may differ from the old one
        # The weight of the value loss where value_backbone=shared.
        'value_coefficient': 0.5,
        'value_warmup_steps': 0,  # first steps, which update only the values
        # The value warm-up ends early once critic/vf_explained_var has not
        # risen for so many steps, even if it never was above 0; 0 = never.
        'value_warmup_patience': 0,
        # The weight of the load-balance loss of the policy's experts, if any.
        'load_balance_coefficient': 0.001,
      },
      # `sft`: supervised training on demonstrations with errors, before RL.
      'sft': offline.sft(),
      # `prefer`: offline training on pairs of trajectories. It uses
      # policy_optimizer.
      'preference': offline.preference(),
      'evaluate': {
        # Steps between evaluations; the last step is always evaluated.
        # 0 = never.
        'every': 50,
        'num_questions': 512,  # per data set, always the same ones
      },
      # Saving, resuming and preemptions: configs/saving.py.
      'checkpoint': saving.checkpoint(),
      'resume': saving.resume(),
      'preemption': saving.preemption(),
      'writer': {
        'tensorboard': True,  # whether TensorBoard files are written
        # Experiment trackers that get the metrics too: some of wandb, trackio.
        'trackers': (),
        'trajectories': 16,  # dialogues that each host writes per step
        # How many of them have ratio, advantage, value and entropy of each
        # token, which takes a forward pass over them; see docs/report.md.
        'token_details': 4,
        'evaluation': 16,  # dialogues that each host writes per evaluation
        'samples': 2,  # dialogues printed per evaluation
        # Files of dialogues of each kind that are kept, the newest; 0 = all.
        'keep_files': 0,
        # The lines of at least so many of the newest steps are kept in
        # metrics.jsonl, and of at most twice as many; 0 = all.
        'keep_lines': 0,
      },
      # What the metrics of a step are compared with, to warn of a run that is
      # going wrong: configs/alarms.py.
      'alarms': alarms.section(),
      'profile': {
        # The first step to trace, counted from 1, and the first one after it
        # that is not traced; (0, 0) = none. See docs/commands.md.
        'steps': (0, 0),
      },
    }
  )
  config.update_from_flattened_dict(algorithms.CHANGES.get(algorithm, {}))
  return config
