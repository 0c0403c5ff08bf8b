"""Every key of a run, its unit and its default. Other configs change a few.

Configs are Python and run when loaded: open one only if you trust it.
"""

import copy
from typing import Any

from ml_collections import config_dict

from stppo_jax.configs import algorithms

# A ConfigDict. Its keys are attributes that exist at run time only, where a
# type checker cannot follow them.
Config = Any


def get_config(algorithm: str = 'st_ppo') -> Config:
  """Returns the base configuration with the algorithm of that name.

  Args:
    algorithm: a key of `configs.algorithms.ALGORITHMS`.

  Raises:
    ValueError: if there is no such algorithm; the message lists the choices.
  """
  if algorithm not in algorithms.ALGORITHMS:
    raise ValueError(
      f'unknown algorithm {algorithm!r}; choices: '
      + ', '.join(sorted(algorithms.ALGORITHMS))
    )
  config: Config = config_dict.ConfigDict(
    {
      'seed': 0,
      'num_steps': 100,  # collections, each followed by its updates
      'algorithm': copy.deepcopy(algorithms.ALGORITHMS[algorithm]),
      'model': {
        # A Hugging Face directory (config.json, safetensors, tokenizer);
        # '' = random weights of the shape below.
        'path': '',
        # The reference policy; '' = the start of this run.
        'reference_path': '',
        # Where its weights wait while they are not asked: device | host. The
        # base under adapters, which is always at work, stays.
        'reference_memory': 'device',
        'tokenizer_path': '',  # '' = the tokenizer in model.path
        'dtype': 'float32',  # compute: float32 | bfloat16 (weights: float32)
        'hidden_size': 64,
        'intermediate_size': 176,
        'num_layers': 3,
        'num_heads': 2,
        'num_kv_heads': 2,
        'head_dim': 32,
        'rope_theta': 10000.0,
        'rms_norm_eps': 1e-6,
        'qkv_bias': True,
        'qk_norm': False,  # of each head, as in Qwen3; then without qkv_bias
        'tie_embeddings': True,
        # A mixture in place of the MLP, as in Qwen3-MoE; 0 = none.
        'num_experts': 0,
        'num_experts_per_tok': 0,  # how many of them a token visits
        'moe_intermediate_size': 0,  # width of one expert
        'norm_topk_prob': True,  # the weights of the visited sum to one
        'router_aux_loss_coef': 0.001,  # told to others when exported
        # How experts are computed, auto | dense | grouped: all on every token,
        # or visits sorted by expert. auto is dense on CPU, grouped elsewhere.
        'moe': 'auto',
        # auto | xla | cudnn | splash: auto is cudnn on GPU for bfloat16,
        # splash on TPU, xla elsewhere. Decoding always uses xla.
        'attention': 'auto',
        # `train` trains adapters beside the frozen weights, which are then the
        # reference too (unless reference_path names one). They learn at about
        # ten times the rate. docs/models.md
        'lora': {
          'rank': 0,  # 0 = none: all weights are trained
          'alpha': 32.0,  # scaled by alpha / rank
          # Searched for in names of linear layers, such as layers/q_proj.
          'targets': '(q|k|v|o|gate|up|down)_proj$',
        },
        # own: the value model has layers of its own, and an optimiser. shared:
        # it is a head on the policy's layers; one pass and one optimiser, the
        # policy's, for both losses.
        'value_backbone': 'own',
        'scan_unroll': 1,  # layers per iteration of the scan over layers
      },
      'mesh': {  # devices per axis; -1 = all that remain
        'data': -1,
        'fsdp': 1,
        'tensor': 1,
      },
      'data': {
        'name': 'synthetic_wiki',  # synthetic_wiki | jsonl
        'root': '',  # jsonl: folder that holds the files below
        'train': '',  # jsonl: questions, relative to root
        'evaluation': '',  # jsonl: questions, relative to root; '' = none
        'corpus': '',  # jsonl: passages, relative to root
        'tokenizer_vocab_size': 4096,  # jsonl without tokenizer: BPE size
        'synthetic_wiki': {
          'seed': 0,  # of the encyclopedia; runs of any seed share it
          'hops': (1, 2),  # in turn
          'entities_per_type': 42,
          'name_pieces': 2,  # sub-word pieces per name
          'distractors': 0,  # passages of entities no fact points to
          'think_words': 0,  # free words in a demonstrated <think>
        },
      },
      'env': {
        'name': 'search',  # a key of ENVIRONMENTS in envs/environments.py
        'max_turns': 4,  # searches; one last generation follows
        'max_turn_tokens': 500,
        'max_observation_tokens': 500,
        'max_length': 4096,  # prompt, turns and observations, in tokens
        'prompt_template': '',  # a text file with {question}; '' = built in
        'rewards': {  # weight of each part
          'exact_match': 1.0,
          'substring_match': 0.0,
          'f1': 0.0,
          'format': 0.0,
          'search_penalty': 0.0,  # subtracted per search
          # Of a turn, on its last token, beside the outcome:
          'turn_search': 0.0,  # its search found passages
          'turn_answer_found': 0.0,  # a golden answer stands in them
        },
        'reward_scope': 'response',  # response | search_r1
      },
      'retrieval': {
        'url': '',  # '' = an embedded server on a free loopback port
        'topk': 3,  # passages per search
        'timeout': 30.0,  # seconds per request
        'retries': 4,  # per query, beyond the first attempt
        'start_grace': 60.0,  # seconds to wait for the server at start
        'max_queries_per_request': 64,
      },
      'rollout': {
        'trajectories_per_step': 512,
        # Trajectories of one question; more where the row compares them, see
        # `ROLLOUTS` in algorithms.py.
        'group_size': 1,
        # Groups whose rewards are all equal are replaced by groups of further
        # questions, in at most so many further collections (DAPO); 0 = never.
        'resample_rounds': 0,
        'temperature': 1.0,
        # What may be drawn, one after the other: the top_k most probable
        # tokens (0 = all), the fewest that hold top_p of the mass, those with
        # min_p times the largest probability.
        'top_k': 0,
        'top_p': 1.0,
        'min_p': 0.0,
        'slots': 0,  # dialogues decoded together; 0 = trajectories_per_step
        'engine': 'local',  # local | remote: a server that others run
        'remote': {  # docs/engines.md
          'url': '',  # of vLLM, SGLang or sampling/completions_server.py
          'model': '',  # name under which the server knows the model
          'timeout': 300.0,  # seconds per turn, and for it to be ready
          'retries': 4,  # per turn, beyond the first attempt
          'concurrency': 256,  # turns asked for at once
        },
        # True: the same bits whenever the retriever answers; a slot is used
        # once per wave. False: slots are refilled at once, and only the rows
        # at work are computed: faster, the same to rounding.
        'deterministic': True,
        # Most dialogues that a program works on, without `deterministic`; 0 =
        # all. Fewer are more alike in length, which a CPU makes use of.
        'batch_rows': 0,
        # Parts of the slots that are decoded side by side, each by its own
        # thread: for a CPU, as many as it has cores. 1 on several devices;
        # each has as many slots and whole groups, also when evaluating.
        'lanes': 1,
        'extend_chunk': 64,  # tokens appended to a slot per call
        'decode_chunk': 16,  # tokens decoded between looks from the host
        # Share of the turns at work after whose end the host looks at once;
        # without `deterministic` only.
        'early_exit': 0.25,
        'lookahead': 1,  # chunks started before the last one is looked at
        # Parts of a slot's keys and values; programs read those begun by the
        # longest dialogue at work. More of them compile more programs.
        'cache_blocks': 4,
        'length_bucket': 256,  # batches are padded to a multiple of this
        'min_valid_fraction': 0.5,  # below it, no update happens
        # Step n is collected with the policy after n - steps_ahead steps,
        # while the ones before it are learned from; 0 = with the newest.
        'steps_ahead': 0,
        # Largest difference of engine and trainer in the log-probability of a
        # token that is rounding: beyond it, a run ends at its first step. For
        # float32; bfloat16 needs a larger one; 0 = no limit.
        'mismatch_limit': 1e-4,
      },
      'updates': {
        'minibatch_size': 256,  # trajectories per optimiser step
        'num_epochs': 1,  # passes over one collected batch
        'microbatch_size': 0,  # trajectories per forward; 0 = minibatch
        # In place of it where one CPU is all the devices: trajectories that a
        # core computes at a time. Each takes other ones, and holds gradients of
        # its own. Not where a correction is of a microbatch; 0 = nowhere.
        'core_rows': 0,
        # Tokens of a device whose scores over the vocabulary are held at once,
        # at least one of each row: 4 bytes x words x tokens, a few times. They
        # are computed again in the backward; 0 = all.
        'head_chunk': 4096,
        # What of a layer is kept for the backward pass: all; all products;
        # those with weights, not attention's; its input.
        'remat': 'none',  # none | all_dots | dots | full
        # Whose log-probabilities the ratio divides by: those of the policy
        # that sampled (the ratio holds the staleness), or of the one about to
        # be updated (a mismatch correction's weight holds it).
        'old_policy': 'sampled',  # sampled | current
        # Whose experts the tokens visit in an update, so that routing adds
        # nothing to the ratio: those that its own router chooses; that the old
        # policy chose in the trainer (R2); in the local engine (R3).
        'routing_replay': 'nowhere',  # nowhere | trainer | sampler
      },
      'policy_optimizer': {
        'learning_rate': 1e-6,
        'warmup_updates': 0,  # linear from 0
        'b1': 0.9,
        'b2': 0.999,
        'eps': 1e-8,
        'weight_decay': 0.01,
        'max_grad_norm': 1.0,
      },
      'value_optimizer': {
        'learning_rate': 1e-5,
        'warmup_updates': 0,
        'b1': 0.9,
        'b2': 0.999,
        'eps': 1e-8,
        'weight_decay': 0.01,
        'max_grad_norm': 1.0,
      },
      'loss': {
        'entropy_coefficient': 0.001,
        'value_clip': 0.5,
        'value_coefficient': 0.5,  # of the value loss; value_backbone=shared
        'value_warmup_steps': 0,  # first steps update the critic only
        # Of the load-balance loss of the policy's experts, if it has any.
        'load_balance_coefficient': 0.001,
      },
      'sft': {  # the supervised start on noisy demonstrations
        'num_steps': 2000,
        # Let `train` begin with it when there is no model.path; the result
        # is kept in WORKDIR/start.
        'before_training': False,
        'batch_size': 64,  # dialogues
        'error_rate': 0.3,  # at each decision of the demonstrator
        'clean_one_hop_steps': 0,  # first steps: one hop, no errors
        'clean_steps': 0,  # steps after those: all hops, no errors
        'optimizer': {
          'learning_rate': 2e-3,  # linear to 0 in the second half
          'warmup_updates': 50,
          'b1': 0.9,
          'b2': 0.98,
          'eps': 1e-8,
          'weight_decay': 0.0,
          'max_grad_norm': 1.0,
        },
      },
      'preference': {  # `prefer`: offline, on pairs of trajectories
        'name': 'tdpo2',  # tdpo1 | tdpo2
        'beta': 0.1,  # how firmly the policy is held to the reference
        'alpha': 0.5,  # tdpo2: weight of the divergences
        'batch_size': 64,  # pairs per update; the rate: policy_optimizer
        'microbatch_size': 0,  # pairs per forward; 0 = batch_size
        'num_epochs': 1,  # passes over the pairs
      },
      'evaluate': {
        'every': 50,  # steps; 0 = never; the last step is always evaluated
        'num_questions': 512,  # of each data set, always the same ones
        'batch_size': 256,  # trajectories decoded together
      },
      'checkpoint': {
        'every': 50,  # steps; the last step is always saved
        'keep': 2,
      },
      'writer': {
        'tensorboard': True,
        'trajectories': 16,  # dialogues kept per step
        'samples': 2,  # dialogues printed at an evaluation
      },
    }
  )
  if algorithm in algorithms.ROLLOUTS:
    config.rollout.update(algorithms.ROLLOUTS[algorithm])
  return config
