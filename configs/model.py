"""The section `model`: the sources and the architecture of the models."""

from typing import Any


def section() -> dict[str, Any]:
  """Returns the section `model`."""
  return {
    # The model that is trained: a Hugging Face directory (config.json,
    # safetensors, tokenizer), or the name of a model of the Hub, such as
    # Qwen/Qwen2.5-0.5B or org/name@revision. '' = random weights with the
    # architecture below.
    'path': '',
    # The reference policy, a directory like `path`. '' = the weights that
    # this run starts from.
    'reference_path': '',
    # The model that the value model starts from, a directory like `path`.
    # It may have another architecture, but needs the same vocabulary. '' = the
    # weights that the policy starts from.
    'value_path': '',
    # Where the weights of the reference are kept between two uses:
    # device | host. It must be device if the reference is the base under
    # adapters, which is in use all the time.
    'reference_memory': 'device',
    # A directory with a tokenizer, or a name as for `path`; '' = the tokenizer
    # in `path`, or, if there is none, a tokenizer made from the data.
    'tokenizer_path': '',
    # The ids of the tokens that end a turn, such as (151645, 151643). () =
    # the tokenizer's end token and the eos_token_id that the directory
    # lists; instruct models list several.
    'eos_token_ids': (),
    # Whether env.max_length may exceed the max_position_embeddings of the
    # model in `path`, which has not seen such positions.
    'allow_beyond_max_position_embeddings': False,
    # The type of the computations: float32 | bfloat16. Weights are always
    # float32.
    'dtype': 'float32',
    # The architecture of a model without `path`, with Hugging Face's names.
    'hidden_size': 64,  # width of the residual stream
    'intermediate_size': 176,  # width of the MLP
    'num_layers': 3,  # layers of attention and MLP
    'num_heads': 2,  # query heads
    'num_kv_heads': 2,  # key and value heads; divides num_heads
    'head_dim': 32,  # width of a head
    'rope_theta': 10000.0,  # base of the rotary frequencies
    'rms_norm_eps': 1e-6,  # added to the mean square in RMSNorm
    'qkv_bias': True,  # whether query, key and value projections have biases
    # Whether the queries and keys of each head get an RMSNorm, as in Qwen3.
    # This needs qkv_bias=False.
    'qk_norm': False,
    'tie_embeddings': True,  # whether the output weights are the embeddings
    # The number of experts in place of the MLP, as in Qwen3-MoE; 0 = an MLP.
    'num_experts': 0,
    'num_experts_per_tok': 0,  # how many experts a token visits
    'moe_intermediate_size': 0,  # width of one expert
    # Whether the weights of the experts that a token visits sum to one.
    'norm_topk_prob': True,
    # Written to the config.json of an exported model, but not used in training.
    # The weight of our load-balance loss is loss.load_balance_coefficient.
    'router_aux_loss_coef': 0.001,
    # How experts are computed: auto | dense | grouped. dense: every expert
    # computes every token. grouped: tokens are sorted by expert. auto: dense on
    # CPU, grouped elsewhere.
    'moe': 'auto',
    # The implementation of attention in training: auto | xla | cudnn |
    # splash. auto: cudnn on GPU with bfloat16, splash on TPU, xla
    # elsewhere. Decoding always uses a program of its own.
    'attention': 'auto',
    # Low-rank adapters: `train` trains them and leaves the base weights as they
    # are. If reference_path is '', the base is then also the reference.
    # Adapters need about ten times the learning rate. See docs/models.md.
    'lora': {
      # Adapters of PEFT that training starts from: a directory with
      # adapter_config.json, or a name as for model.path. The keys below then
      # get the values of adapter_config.json. '' = new adapters.
      'path': '',
      'rank': 0,  # 0 = no adapters: all weights are trained
      'alpha': 32.0,  # the adapter's product is scaled by alpha / rank
      # The linear layers that get an adapter: a regular expression that is
      # searched in names such as layers/q_proj. An expression that matches
      # experts must also match the moe/ in their names.
      'targets': '(q|k|v|o|gate|up|down)_proj$',
      # Other ranks for some of these layers, such as ('down_proj$=8',). A layer
      # gets the number behind the first expression that is found in its name.
      'rank_pattern': (),
      'alpha_pattern': (),  # alphas of some layers, written like rank_pattern
      'rslora': False,  # whether the scale is alpha / sqrt(rank)
    },
    # own: the value model has its own layers and its own optimiser. shared: the
    # value model is a head on the policy's layers, and both losses share one
    # pass and the policy's optimiser.
    'value_backbone': 'own',
    # Layers per iteration of the scan over layers. With more layers, a program
    # takes longer to compile and runs a little faster.
    'scan_unroll': 1,
  }
