"""Additions to the algorithms and their functions that tests make."""

from tests import additions
from tests import pages


def _description(heading, equation):
  """Returns a section of a file of descriptions."""
  return f"""
    {heading}

        {equation}

    - **Source:** Nobody: made by a test.
    - **How sure:** Our choice.
    - **When:** A test uses it.
  """


ALGORITHM = additions.Addition(
  (
    additions.Insertion(
      'configs/algorithms.py',
      'ALGORITHMS = {',
      """
        'turn_cispo': _algorithm(
          ratio={'level': 'turn'},
          objective='detached',
          **_GROUP,
          **_NO_KL,
        ),
      """,
    ),
    additions.Insertion(
      'docs/texts/algorithms.md',
      '# Algorithms',
      _description('## turn_cispo', 'loss = mean of -A sg(r_k) l'),
    ),
    additions.Insertion(
      'README.md',
      '| PPO | token | yes | `token_ppo`, `s_ppo`, `bilevel_ppo` |',
      '| Turn CISPO | turn | no | `turn_cispo` |\n',
    ),
  ),
  """
  from stppo_jax.commands.flags import configuration
  from stppo_jax.rl import algorithm

  config = configuration.parse(['--config=configs/quickstart.py:turn_cispo'])
  built = algorithm.build_algorithm(config.algorithm.to_dict())
  assert not built.uses_values and built.objective.name == 'detached'
  assert config.rollout.group_size == 8
  """,
  documented=True,
)

CLIP_RULE = additions.Addition(
  tuple(pages.steps('adding_an_algorithm')),
  """
  from stppo_jax.commands.flags import configuration
  from stppo_jax.rl import algorithm

  config = configuration.parse(['--config=configs/quickstart.py:log_ppo'])
  built = algorithm.build_algorithm(config.algorithm.to_dict())
  assert built.bounds.name == 'logarithmic'
  assert config.algorithm.bounds.width == 0.2
  """,
  documented=True,
)


def _passes(files: list[str], chosen: str) -> str:
  """Returns a program that runs the chosen tests of some files."""
  return f"""
  import pytest

  options = ['-qp', 'no:cacheprovider', '-k', {chosen!r}]
  assert pytest.main([*options, *{files!r}]) == 0
  """


def _algorithm(name, entry):
  """Returns the insertions of an algorithm that uses what was added."""
  return (
    additions.Insertion(
      'configs/algorithms.py', 'ALGORITHMS = {', f'{name!r}: {entry},'
    ),
    additions.Insertion(
      'docs/texts/algorithms.md',
      '# Algorithms',
      _description(f'## {name}', 'loss = mean of -A sg(r) l'),
    ),
    additions.Insertion(
      'README.md',
      '| PPO | token | yes | `token_ppo`, `s_ppo`, `bilevel_ppo` |',
      f'| Made by a test | token | no | `{name}` |\n',
    ),
  )


def _described(axis, question, name, equation):
  """Returns the insertion of the description of a choice."""
  return additions.Insertion(
    f'docs/texts/{axis}.md',
    question,
    _description(f'### {name}', equation),
  )


OBJECTIVE = additions.Addition(
  (
    additions.Insertion(
      'stppo_jax/rl/objectives.py',
      'sg = jax.lax.stop_gradient',
      """
        def rising(context, low, high, statistics):
          del low, high, statistics
          good_BL = context.advantages_BL > 0
          weight_BL = jnp.where(good_BL, context.ratio_BL, 0)
          return _weighted(weight_BL, context), context.advantages_BL < 0
      """,
    ),
    additions.Insertion(
      'stppo_jax/rl/objectives.py',
      'OBJECTIVES = {',
      "'rising': options_lib.Choice(rising),",
    ),
    additions.Insertion(
      'configs/defaults.py', "'objective': {", "'rising': {},"
    ),
    _described(
      'objective',
      'What happens outside the trusted interval?',
      'rising',
      'term = -sg(r) A l, A > 0',
    ),
    additions.Insertion(
      'tests/rl/loss_twin.py',
      'weights = {',
      "'rising': w if a > 0 else 0.0,",
    ),
    additions.Insertion(
      'tests/rl/loss_twin.py',
      "cut[t] = name == 'masked' and harmful",
      "cut[t] |= name == 'rising' and a < 0",
    ),
    additions.Insertion(
      'tests/rl/objectives_test.py',
      'LOGPROBS = np.array([[-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]])',
      """
        def test_rising_by_hand():
          _, cut = _objective('rising', RATIO, ADVANTAGES)
          np.testing.assert_array_equal(cut, ADVANTAGES < 0)
      """,
    ),
    *_algorithm(
      'rising',
      "_algorithm(objective='rising', **_GROUP)",
    ),
  ),
  _passes(
    ['tests/rl/losses_test.py', 'tests/rl/objectives_test.py'],
    'rising and (value_is_the_loop or by_hand)',
  ),
  documented=True,
)

CORRECTION = additions.Addition(
  (
    additions.Insertion(
      'stppo_jax/rl/corrections.py',
      "LEVELS = ('token', 'turn', 'sequence')",
      """
        @options.dataclass
        class Scaled(options.Options):
          factor: float = options.number()

        def scaled(context, low, high, statistics, *, factor):
          del low, high, statistics
          return loss_context_lib.policy_weights(_one(context) * factor)
      """,
    ),
    additions.Insertion(
      'stppo_jax/rl/corrections.py',
      'CORRECTIONS = {',
      "'scaled': options.Choice(scaled, Scaled),",
    ),
    additions.Insertion(
      'configs/algorithms.py', "'correction': {", "'scaled': {'factor': 0.5},"
    ),
    _described(
      'correction',
      'Which factors correct the terms of the loss?',
      'scaled',
      'term * factor',
    ),
    additions.Insertion(
      'tests/rl/loss_twin.py',
      '_CORRECTIONS = {',
      """
        'scaled': lambda row, ratio_at, batch, low, high: np.full(
          batch.loss_mask_BL.shape, row['correction']['scaled']['factor']
        ),
      """,
    ),
    additions.Insertion(
      'tests/rl/corrections_test.py',
      'from tests.rl import batches',
      """
        def test_scaled_by_hand():
          assert all(_weights('scaled', factor=0.5) == 0.5)
      """,
    ),
    *_algorithm('scaled_ppo', "_algorithm(correction={'names': ('scaled',)})"),
  ),
  _passes(
    ['tests/rl/losses_test.py', 'tests/rl/corrections_test.py'],
    'scaled and (value_is_the_loop or by_hand)',
  ),
  documented=True,
)

ESTIMATOR = additions.Addition(
  (
    additions.Insertion(
      'stppo_jax/rl/group_advantages.py',
      'Array = jax.Array',
      """
        def group_signs(rewards_BL, batch):
          total_B, _ = masking.differences(*rows(rewards_BL, batch))
          return to_tokens(jnp.sign(total_B), batch)
      """,
    ),
    additions.Insertion(
      'stppo_jax/rl/group_advantages.py',
      'ESTIMATORS = {',
      "'group_signs': options_lib.Choice(group_signs, Group),",
    ),
    additions.Insertion(
      'stppo_jax/rl/estimator_needs.py', "'group_centered',", "'group_signs',"
    ),
    additions.Insertion(
      'configs/defaults.py',
      "'advantage': {",
      "'group_signs': {'whiten': 'none'},",
    ),
    _described(
      'advantage',
      'How good was the text that the policy wrote?',
      'group_signs',
      'A = sign(R - mean)',
    ),
    additions.Insertion(
      'tests/rl/group_advantages_test.py', 'OPTIONS = {', "'group_signs': {},"
    ),
    additions.Insertion(
      'tests/rl/group_advantages_test.py',
      'TWINS = {',
      """
        'group_signs': lambda batch: np.sign(
          advantage_twins.over_rows(batch, None)
        ),
      """,
    ),
    *_algorithm(
      'sign_grpo',
      "_algorithm(advantage='group_signs')",
    ),
  ),
  """
  import pytest
  from stppo_jax import exits
  from stppo_jax.commands.flags import configuration

  files = ['tests/rl/group_advantages_test.py']
  chosen = 'twin and group_signs'
  assert pytest.main(['-qp', 'no:cacheprovider', '-k', chosen, *files]) == 0
  flags = ['--config=configs/quickstart.py:sign_grpo']
  flags.append('--config.rollout.group_size=1')
  try:
    configuration.parse(flags)
  except exits.Misconfigured as error:
    assert 'group_signs, which compares trajectories' in str(error)
  else:
    raise AssertionError('the group was not needed')
  """,
  documented=True,
)
