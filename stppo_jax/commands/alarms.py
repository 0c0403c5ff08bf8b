"""Say which alarms rang in runs, and how long before a collapse.

python -m stppo_jax alarms RUNS... [--ALARM=THRESHOLD ...]

  RUNS  the folder of a run of train, also in a bucket, a folder of such folders
        (the workdir of a study or a sweep), or FILE.csv, the table of a study

The default thresholds are in configs/alarms.py. Give another threshold to see
when its alarm would have rung:

  --repetition          the largest share of repeated text
  --entropy             the least entropy of the policy, in nats
  --turn_ratio          the largest ratio of a turn
  --zero_variance       the largest share of groups without variance
  --explained_variance  the least explained variance of the values
  --empty_answers       the largest share of searches that find nothing
  --finish_ratio        the least share of trajectories with an answer
  --search_rate         the least number of searches per trajectory
  --kl                  the largest divergence from the reference, in nats
  --infrastructure      the largest share of trajectories that fail

Success is averaged over five steps. A run has collapsed if, from some step to
the end and for at least five steps, this mean stays below half of its best
value (docs/collapse.md). A finished run that has not collapsed is healthy. A
run that has neither finished nor collapsed is left out.

The alarms are computed from the metrics that the runs have written, so nothing
is trained. The table of a study has the metrics of the alarms entropy,
turn_ratio, explained_variance and kl. For all other alarms, the table only says
when they rang with the thresholds of the run. If something cannot be read, one
line names it, and the exit code is 2.
"""

from collections.abc import Sequence
import sys

from stppo_jax.commands.flags import command_line
from stppo_jax.configs import alarms as alarms_lib
from stppo_jax.tools.ablation import alarm_tables


def main(argv: Sequence[str]) -> int:
  """Prints which alarms rang in runs, and when; returns the exit code."""
  numbers = dict.fromkeys(
    alarms_lib.THRESHOLDS, command_line.number(lower_bound=0.0)
  )
  numbers['finish_ratio'] = command_line.number(lower_bound=0, upper_bound=1)
  numbers['explained_variance'] = command_line.number(upper_bound=1.0)
  flags = command_line.flags(**numbers)
  words, _, errors = command_line.parse(
    flags,
    argv,
    words=sys.maxsize,
    missing='RUNS: missing; give the folder of a run, or several',
  )
  thresholds = flags.flag_values_dict()
  thresholds = {k: x for k, x in thresholds.items() if x is not None}
  if any(map(alarm_tables.is_table, words)):
    errors += [
      f'--{name}: the table of a study has no such metric; give folders of runs'
      for name in thresholds
      if name not in alarm_tables.MEASURED
    ]
  command_line.refuse(errors)
  return command_line.lost(alarm_tables.show(words, thresholds))
