"""Pure maths: arrays in, arrays out. No models, no files, no logging."""
