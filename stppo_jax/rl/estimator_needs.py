"""Lists what advantage estimators need beside rewards and masks.

Names only: configs are checked by them, and reading a config imports no jax.
"""

VALUES = frozenset({'gae'})  # batch.values_BL, from a value model
# The trajectories of a question, to compare them: batch.group_ids_B.
GROUPS = frozenset(
  {
    'group_normalized',
    'group_centered',
    'leave_one_out',
    'turn_group',
    'gigpo',
  }
)
TURNS = frozenset({'gigpo'})  # the static num_turns
STATES = frozenset({'gigpo'})  # batch.state_ids_BL
