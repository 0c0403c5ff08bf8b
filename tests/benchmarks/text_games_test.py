"""A small version of the benchmark of text games."""

import re

import pytest

from benchmarks import text_games

pytest.importorskip('textworld')


def test_games_are_solved_and_counted():
  line = text_games.report(1, 2, 1, 3)
  assert line.startswith('1 rooms, 2 objects, quests of 1: ')
  assert re.search(r'\d+ steps per CPU second', line)
  assert line.endswith('3 of 3 solved')
