"""Reads the tokenizer of this folder by the rules of its file."""

from transformers import PreTrainedTokenizerFast


class TokenizerAsWritten(PreTrainedTokenizerFast):
  """Reads tokenizer.json as it is."""
