"""Makes tests/golden/qwen2_*: tiny random Qwen2 models and their logits.

    pip install torch==2.13.0 transformers safetensors numpy
    python tests/golden/make_qwen2.py

The numbers are those of `transformers.Qwen2ForCausalLM` in float32.
"""

import pathlib

import numpy as np
import torch
import transformers

_HERE = pathlib.Path(__file__).parent
_CASES = {
  'tied': {'tie_word_embeddings': True, 'num_key_value_heads': 2},
  'untied': {'tie_word_embeddings': False, 'num_key_value_heads': 4},
}


def main():
  for name, options in _CASES.items():
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
      vocab_size=61,
      hidden_size=16,
      intermediate_size=24,
      num_hidden_layers=2,
      num_attention_heads=4,
      max_position_embeddings=64,
      rope_theta=10000.0,
      **options,
    )
    model = transformers.Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
      for parameter in model.parameters():  # biases and scales away from 0, 1
        parameter.add_(0.2 * torch.randn_like(parameter))
    tokens = torch.randint(0, 61, (3, 17))
    with torch.no_grad():
      logits = model(tokens).logits
    directory = _HERE / f'qwen2_{name}'
    model.save_pretrained(directory)
    np.savez(
      directory / 'logits.npz', tokens_BL=tokens.numpy(), logits_BLV=logits
    )


if __name__ == '__main__':
  main()
