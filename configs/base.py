"""Defines every config key with its default, its unit and its choices.

Functions in other files of this folder, such as `rollout.py`, make some of the
sections. Other configs start from this config and change some keys. The rules
for the values of keys are in `schema.py` and `relations.py`. A config is a
Python program that runs when it is loaded, so load a config only if you trust
it.
"""

from collections.abc import Mapping
import copy
import functools
import types
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

# A ConfigDict. Its keys are attributes that exist only at run time, so a type
# checker does not know them.
Config = Any


def get_config(algorithm: str = 'st_ppo') -> Config:
  """Returns the base config with the options of an algorithm.

  Args:
    algorithm: a key of `configs.algorithms.ALGORITHMS`.

  Raises:
    UnknownName: there is no such algorithm. The message lists the choices.
  """
  if algorithm not in algorithms.ALGORITHMS:
    choices = settings.closest(algorithm, sorted(algorithms.ALGORITHMS))
    raise algorithms.UnknownName(f'unknown algorithm {algorithm!r}{choices}')
  config: Config = config_dict.ConfigDict(
    {
      'seed': 0,  # the seed of questions, sampling, shuffles and new weights
      # The number of steps. A step is one collection with its updates.
      'num_steps': 100,
      # The name of the run in plots, which show the seed after the title.
      # Commands put the name of the config file before the title.
      'title': algorithm,
      'algorithm': copy.deepcopy(algorithms.ALGORITHMS[algorithm]),
      # The folder of another run of `train`. This run then starts from the
      # newest policy of that run. '' = this run starts from the model below.
      # See docs/models.md.
      'init_from': '',
      'model': model.section(),
      # The number of devices along each axis of the mesh; -1 = all devices that
      # the other axes leave.
      'mesh': {
        'data': -1,  # shards batches; weights are replicated along this axis
        'fsdp': 1,  # shards batches and weights
        'expert': 1,  # shards batches and weights; an expert stays whole
        'tensor': 1,  # shards weights within a layer
        # The share of each host's devices that only collect, rounded to whole
        # devices. The other devices form the mesh, and learn at the same time.
        # A share above 0 needs rollout.steps_ahead > 0. 0 = all devices collect
        # and learn.
        'collect_fraction': 0.0,
        # The number of hosts that only collect: the last hosts of the run. The
        # devices of the other hosts form the mesh, and learn at the same time.
        # A number above 0 needs rollout.steps_ahead > 0. 0 = all hosts collect
        # and learn.
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
        # Training questions: a file in data.root, a data set, or a mixture of
        # several data sets, such as
        # 'nq:train weight=2, hotpotqa:train weight=1 hops>=2'. See
        # docs/data.md.
        'train': '',
        # Evaluation questions, written like the training questions, without
        # weights; '' = no evaluation.
        'evaluation': '',
        # A file of passages in data.root; '' = an external server has the
        # passages.
        'corpus': '',
        # With jsonl and tfds, if the model has no tokenizer, a BPE tokenizer is
        # trained on the passages. This is the size of its vocabulary.
        'tokenizer_vocab_size': 4096,
        'synthetic_wiki': {
          # Seed of the encyclopedia. It does not depend on the run's seed, so
          # evaluations of different runs ask the same questions.
          'seed': 0,
          # The numbers of facts that lead to an answer; (1, 2) alternates
          # between one fact and two facts.
          'hops': (1, 2),
          'entities_per_type': 42,  # entities of each of the five types
          'name_pieces': 2,  # sub-word pieces that a name consists of
          'distractors': 0,  # extra entities to which no fact points
          'think_words': 0,  # filler words in each <think> of a demonstration
          # The number of first turns of a demonstration that may have an error;
          # 0 = all turns. With 1, the reward of a dialogue is decided early, so
          # a value model can predict it.
          'error_turns': 0,
          # The probability that a demonstration searches again with the whole
          # name after a search with half of the name has found nothing.
          'repair_rate': 0.0,
        },
        'arithmetic': {'max_number': 20},  # the largest number in a question
        'games': {
          # The number of games to train on; 0 = new games in every step.
          'count': 0,
        },
      },
      'env': {
        'name': 'search',  # a key of ENVIRONMENTS in envs/environments.py
        # The number of turns that may get an observation. One more turn may
        # follow, which can only give the answer.
        'max_turns': 4,
        'max_turn_tokens': 500,  # the most tokens of a turn
        'max_observation_tokens': 500,  # longer observations are cut off
        # The longest trajectory (prompt, turns and observations), in tokens.
        'max_length': 4096,
        # A text file that contains {question}; '' = the built-in prompt.
        'prompt_template': '',
        # module:function, a function of yours that computes an additional
        # reward of a trajectory; '' = no function. See docs/data.md.
        'reward_function': '',
        # The weight of each reward.
        'rewards': {
          # Rewards of the trajectory, on its last token.
          'exact_match': 1.0,  # if the answer is a golden answer
          'substring_match': 0.0,  # if the answer contains a golden answer
          # Times the F1 score of the words of the answer and a golden answer.
          'f1': 0.0,
          'format': 0.0,  # if every turn has the right form
          'search_penalty': 0.0,  # subtracted once per search
          # Subtracted from the reward of long trajectories: nothing up to a
          # length of max_length - n, the whole weight at max_length, and a
          # linear share in between, where n is overlong_fraction times
          # max_length (DAPO). Without this penalty, a trajectory that was cut
          # off has the reward of a wrong answer.
          'overlong': 0.0,
          # Rewards of a turn, on the last token of the turn.
          'turn_search': 0.0,  # if its search found passages
          # If the passages of its search contain a golden answer.
          'turn_answer_found': 0.0,
          # If the passages of its search contain a golden answer, and no
          # passages of earlier searches did.
          'turn_first_found': 0.0,
          # Multiplied by how much the observation after the turn raises the
          # probability of the first golden answer. The probabilities come from
          # the policy that is about to be updated, also with
          # rollout.steps_ahead. They cost up to max_turns + 1 forward passes
          # for each trajectory, each over all tokens so far.
          'information_gain': 0.0,
          # Rewards of env.name=textworld.
          'solved': 1.0,  # reward of the trajectory, if the game is solved
          # Reward of a turn: added if the solution is fewer commands away than
          # before the turn, subtracted if it is more. 0 = sparse rewards.
          'turn_progress': 0.0,
        },
        # rewards.overlong grows over this last share of max_length.
        'overlong_fraction': 0.2,
        # The text in which the scorer looks for the answer. response: the turns
        # of the policy. search_r1: the prompt and the response, as the scorer
        # of Search-R1 does, with its faults.
        'reward_scope': 'response',
        # env.name=tools: functions that the policy can call.
        'tools': {
          # The built-in tools that the policy can call: keys of TOOLS in
          # envs/tools.py.
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
          'timeout': 60.0,  # seconds per call of the environment's methods
        },
      },
      # How a question becomes the tokens of a prompt; see docs/prompts.md.
      # `python -m stppo_jax prompt` shows the tokens.
      'prompt': {
        # A system message before the question; '' = the system message of the
        # chat template, if it has one. If the template allows no system
        # message, the message becomes the start of the question.
        'system': '',
        # Whether the model thinks first, for chat templates with this option,
        # such as the template of Qwen3: auto | on | off. auto: the template
        # decides.
        'enable_thinking': 'auto',
        # Whether the chat template describes the tools of the environment, if
        # it can. The built-in prompt lists the tools in any case.
        'tools': True,
        # Whether a prompt begins with the tokenizer's bos_token: auto | on |
        # off. auto: as in the chat template or, without a chat template, as the
        # tokenizer begins any text.
        'bos': 'auto',
      },
      'retrieval': {
        'url': '',  # '' = an embedded server on a free local port
        # Protocol of the server: search_r1 | skyrl | rllm | zerosearch |
        # r1_searcher. Our server speaks all of them. See docs/retrieval.md.
        'dialect': 'search_r1',
        'topk': 3,  # passages per search
        'timeout': 30.0,  # seconds per request
        'retries': 4,  # attempts per query after the first
        # Seconds to wait for the server, at the start and in an outage.
        'ready_timeout': 60.0,
        # If more than this share of the last 6 requests, and at least 3 of
        # them, found no server, all searches wait until the server is ready,
        # for at most ready_timeout seconds; 1 = never.
        'max_failure_rate': 0.5,
        'max_queries_per_request': 64,  # more queries go into several requests
      },
      'rollout': rollout.section(),
      'updates': {
        'minibatch_size': 256,  # trajectories per optimiser step
        'num_epochs': 1,  # passes over a collected batch
        # Additional passes, in which only the value model learns. `plan` and
        # the metrics of throughput do not count these passes.
        'value_epochs': 0,
        # The number of earlier steps whose collections these passes repeat,
        # before the new collection. Devices and checkpoints hold these
        # collections, with 10 bytes for each token of env.max_length.
        'value_replay': 0,
        # True: every epoch divides the batch into minibatches in a new random
        # order. False: in the order of collection.
        'shuffle': True,
        # The updates of a step end after the first update whose mean of
        # log(old / new) over the policy tokens (actor/ppo_kl) exceeds this
        # number; 0 = never.
        'kl_stop': 0.0,
        # The tokens of a row of the forward pass. A row holds several
        # trajectories. 0 = env.max_length. Longer rows have less padding.
        'row_length': 0,
        # Rows per forward pass, on all devices together; 0 = all rows of a
        # minibatch.
        'microbatch_size': 0,
        # On a single CPU device, in place of microbatch_size: the rows per
        # forward pass of one core. The cores run in parallel, and each core
        # computes gradients of its own rows. This key has no effect if the
        # scope of a correction is the microbatch. 0 = off.
        'core_rows': 0,
        # The run ends with exit code 76 after this many skipped updates in a
        # row; 0 = never. An update is skipped if its loss, its gradient, a new
        # weight or a new moment is not finite, or if the norm of a gradient is
        # above skip_grad_norm.
        'max_skipped': 8,
        # The number of tokens per device whose logits are in memory at once, at
        # least one token of each trajectory; 0 = all tokens. The logits take a
        # few arrays of 4 bytes x vocabulary size x tokens. The backward pass
        # computes them again.
        'head_chunk': 4096,
        # The arrays that a layer keeps for the backward pass: none (no
        # recomputation, all arrays are kept) | all_dots (all matrix products) |
        # dots (products with weights, but no products of attention) | full
        # (only the input of the layer).
        'remat': 'none',
        # The old policy, which is the denominator of the ratio. sampled: the
        # policy that collected the trajectories, so the ratio contains the
        # staleness. current: the policy before the updates of this step, so the
        # staleness is in k of the corrections tis, mis, icepop and geo_rs.
        'old_policy': 'sampled',
        # The experts that tokens visit in an update: nowhere | trainer |
        # sampler. nowhere: the experts that the router chooses now. trainer:
        # the choice of the old policy in the trainer (R2). sampler: the choice
        # of the local engine (R3). With trainer and sampler, a change of the
        # routing does not change the ratio.
        'routing_replay': 'nowhere',
      },
      'policy_optimizer': optimizer.adam(learning_rate=1e-6),
      'value_optimizer': optimizer.adam(learning_rate=1e-5),
      'loss': {
        'entropy_coefficient': 0.001,  # weight of the entropy bonus
        # The smallest and the largest return, such as (0.0, 1.0) for an answer
        # that is right or wrong. Values then lie between these two numbers,
        # start in the middle, and learn by cross-entropy. () = values have no
        # bounds, and learn by the squared error.
        'value_range': (),
        # The number of bins of a categorical value. With more than 2, a value
        # is the mean of a distribution over numbers at equal distances in
        # value_range, and learns by cross-entropy with two-hot targets. Use
        # more than 2 if returns are often between the ends of the range.
        'value_bins': 2,
        # How far a value may move from the old value: a value that has moved
        # further towards the return has no gradient.
        'value_clip': 0.5,
        # The weight of the value loss if model.value_backbone=shared.
        'value_coefficient': 0.5,
        # The number of steps at the start in which only the value model learns.
        'value_warmup_steps': 0,
        # The value warm-up ends early once critic/vf_explained_var has not
        # risen for this many steps, even if it never was above 0; 0 = never.
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
        'num_questions': 512,  # per data set, the same in every evaluation
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
        # Of the dialogues that each host writes per step, the number that get
        # ratio, advantage, value and entropy of each token. This takes a
        # forward pass over these dialogues; see docs/report.md.
        'token_details': 4,
        'evaluation': 16,  # dialogues that each host writes per evaluation
        'samples': 2,  # dialogues printed per evaluation
        # The number of newest dialogue files to keep, of each kind of
        # dialogues; 0 = all files.
        'keep_files': 0,
        # metrics.jsonl keeps the lines of at least this many of the newest
        # steps, and of at most twice as many; 0 = all lines.
        'keep_lines': 0,
      },
      # Thresholds for the metrics of a step, which warn of a run that is going
      # wrong: configs/alarms.py.
      'alarms': alarms.section(),
      'profile': {
        # The first step to trace, counted from 1, and the first step after it
        # that is not traced; (0, 0) = no step. See docs/commands.md.
        'steps': (0, 0),
      },
    }
  )
  config.update_from_flattened_dict(algorithms.CHANGES.get(algorithm, {}))
  return config


@functools.cache
def values() -> Mapping[str, Any]:
  """Maps the dotted key of every value of the base config to the value."""
  return types.MappingProxyType(settings.flatten(get_config()))
