"""`updates.kl_stop` ends the updates of a step that moved the policy far."""

import pytest

from tests.training import runs

# Of one step with 4 epochs of 2 minibatches; a rate that moves the policy far.
_CHANGES = {
  'num_steps': 1,
  'updates__num_epochs': 4,
  'policy_optimizer__learning_rate': 0.01,
  'policy_optimizer__warmup_updates': 0,
  'evaluate__every': 0,
}


@pytest.mark.parametrize(
  ('limit', 'fewest', 'most'),
  [pytest.param(0.0, 8, 8, marks=pytest.mark.slow), (1e-3, 2, 7)],
)
def test_a_step_ends_with_the_first_update_that_is_far(
  tmp_path, limit, fewest, most
):
  assert runs.train(tmp_path, updates__kl_stop=limit, **_CHANGES) == 0
  line = runs.metrics(tmp_path)[-1]
  # The first update starts from the policy that collected: it is never far.
  assert fewest <= line['update/count'] <= most
  tokens = line['perf/throughput'] * line['timing_s/step']
  updated = line['perf/update_tokens_per_second'] * line['timing_s/update']
  # The passes over the batch that were made, each of two updates.
  assert updated == pytest.approx(line['update/count'] / 2 * tokens)
