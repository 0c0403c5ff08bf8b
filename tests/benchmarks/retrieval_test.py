"""A small version of each part of the benchmark of retrieval."""

import re

from benchmarks import retrieval


def test_every_part_prints_its_figure(capsys):
  flags = '--passages=300 --large=400 --queries=40 --workers=1 --repeats=7'
  retrieval.main([*flags.split(), '--only', 'search', 'index'])
  output = capsys.readouterr().out
  assert 'BM25 over 300 passages' in output and 'jax ' in output
  assert re.search('^(undist|NOT A RESULT)', output, re.M)
  assert re.search(r'bm25s / ours: \d', output)
  assert re.search(r'index: 400 passages in [\d.]+ s', output)
  assert 'http' not in output
