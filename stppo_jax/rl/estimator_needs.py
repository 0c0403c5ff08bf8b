"""Lists the inputs that advantage estimators need beside rewards and masks.

The lists hold only the names of estimators. They serve to check configs, and
reading a config must not import jax.
"""

# These estimators read batch.values_BL, from a value model.
VALUES = frozenset({'gae', 'decoupled_gae'})
# These estimators compare the trajectories of a question. They read
# batch.group_ids_B, which is equal for the trajectories of one question.
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
# These estimators take the static argument num_turns.
TURNS = frozenset({'turn_leave_one_out', 'turn_index', 'turn_pooled', 'gigpo'})
# These estimators read batch.state_ids_BL.
STATES = frozenset({'gigpo'})
# These estimators treat every reward except the outcome as the reward of a
# turn. A KL penalty inside the rewards would count as a turn's reward, too.
TURN_REWARDS = frozenset({'turn_group', 'turn_index', 'turn_pooled'})
