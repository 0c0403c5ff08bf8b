"""Token in, token out: tokenizer, stops and the decoding engine."""
