"""Lists what advantage estimators need beside rewards and masks.

The lists hold names only: they serve to check configs, and reading a config
imports no jax.
"""

# These estimators read batch.values_BL, from a value model.
VALUES = frozenset({'gae', 'decoupled_gae'})
# These compare the trajectories of a question, which batch.group_ids_B marks.
GROUPS = frozenset(
  {
    'group_normalized',
    'group_centered',
    'leave_one_out',
    'turn_group',
    'turn_leave_one_out',
    'turn_index',
    'turn_pooled',
    'gigpo',
  }
)
# These take the static number num_turns.
TURNS = frozenset({'turn_leave_one_out', 'turn_index', 'turn_pooled', 'gigpo'})
# These read batch.state_ids_BL.
STATES = frozenset({'gigpo'})
# These count every reward but the outcome as that of a turn, so that a KL
# penalty inside the rewards would count as one.
TURN_REWARDS = frozenset({'turn_group', 'turn_index', 'turn_pooled'})
