"""Every shipped config resolves to what is kept in files."""

from tests.configs import resolved


def test_configs_resolve_to_what_is_kept():
  kept = {p.name: p.read_text('utf-8') for p in resolved.GOLDEN.glob('*.txt')}
  made = resolved.texts()
  differ = [n for n in {*kept, *made} if kept.get(n) != made.get(n)]
  assert not differ, (
    f'{sorted(differ)}: not what is kept. If that is meant, run '
    '`python -m tests.configs.resolved` and look at the difference'
  )
