"""The page and the Makefile name every benchmark and nothing else."""

import importlib
import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / 'docs' / 'benchmarks.md').read_text(encoding='utf-8')
_WITH_TORCH = ('benchmarks.torch_update', 'benchmarks.vocabulary')
# `make bench` leaves them out: they measure no times, or need an accelerator or
# files of the reader.
_NO_BENCHMARK = {
  f'benchmarks.{name}'
  for name in (
    'accelerator chaos exit_time jumping_clock same_numbers mismatch own_data '
    'reference_choices side_by_side slices weak_scaling'
  ).split()
}
_MAKEFILE = (_ROOT / 'Makefile').read_text(encoding='utf-8')
_MODULES = re.findall(r'^\| `python -m (benchmarks\.\w+)` \|', _PAGE, re.M)


def test_page_makefile_and_folder_agree():
  runnable = {
    f'benchmarks.{path.stem}'
    for path in (_ROOT / 'benchmarks').glob('*.py')
    if '__main__' in path.read_text(encoding='utf-8')
  }
  assert len(_MODULES) == len(set(_MODULES))
  assert set(_MODULES) == runnable - _NO_BENCHMARK
  for name in _NO_BENCHMARK:
    assert f'python -m {name} ' in _PAGE
  assert re.findall(r'-m (benchmarks\.\w+) \$\(ARGS\)', _MAKEFILE) == _MODULES


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=pytest.mark.torch if name in _WITH_TORCH else ())
    for name in _MODULES
  ],
)
def test_each_has_help_and_the_flag_of_the_page(name, capsys):
  if name in _WITH_TORCH:
    pytest.importorskip('torch', exc_type=ImportError)
  main = importlib.import_module(name).main
  with pytest.raises(SystemExit, match='^0$'):
    main(['--help'])
  output = capsys.readouterr().out
  assert output.startswith(f'usage: python -m {name}') and '--cores' in output
