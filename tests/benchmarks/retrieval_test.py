"""A small version of each part of the benchmark of retrieval."""

import re

from benchmarks import retrieval


def test_every_part_prints_its_figure(capsys):
  flags = '--passages=300 --large=400 --queries=40 --workers=1 --repeats=7'
  retrieval.main([*flags.split(), '--only', 'search', 'index'])
  output = capsys.readouterr().out
  assert 'BM25 over 300 passages' in output and 'jax ' in output
  # The last line is that of the index; the verdict of the search precedes it.
  verdict = output.rstrip().splitlines()[-2]
  assert verdict.startswith(('undist', 'NOT A RESULT'))
  assert re.search(r'bm25s / ours: \d', output)
  assert re.search(r'index: 400 passages in [\d.]+ s', output)
  assert 'http' not in output
