"""Evaluation of a run in training, of sets of questions, of one question."""
