"""Train the arms of a study with paired seeds, and compare them.

python -m stppo_jax ablate --config=FILE.py[:STUDY] --workdir=DIR
    [--seeds=N | --seeds=N,N,...] [--groups=GROUP,...] [--jobs=N]
    [--table=FILE.csv] [--reuse=FILE.csv,...] [--config.KEY=VALUE ...]
    [--dry_run]

  --config=FILE.py[:STUDY]  a config file with a function studies(), such as
                            studies/collapse.py, and the name of a study in it;
                            by default its first
  --workdir=DIR             the folder of the study; each run has a folder in it
  --seeds=N                 how many seeds, from 0; or, with commas, which ones.
                            By default as many as the study is planned with
  --groups=GROUP,...        some groups of the study, by default all
  --jobs=N                  how many runs there are at once; by default one for
                            each core
  --table=FILE.csv          the table of all runs, by default DIR/STUDY.csv.
                            Runs that it has are not made again; new ones are
                            added. Other commands may add to it meanwhile
  --reuse=FILE.csv,...      tables of other studies. Runs of theirs that had the
                            settings and the seed of a run of this study are
                            copied, and not made again
  --config.KEY=VALUE        sets a key of all configs
  --dry_run                 prints the commands that would be run, in order. A
                            shell runs them as they stand; the same command
                            without --dry_run then compares the runs

The runs of one seed ask the same questions and start from the same weights. All
arms of a seed come before the next seed. At the end, tables compare the
finished runs. DIR then holds the tables in STUDY.md, the pictures in the folder
figures, and report.html, a page with the tables, the figures and the dialogues
of the runs.

The same command continues a study. It does not repeat finished runs, and it
resumes interrupted runs. It waits for runs that go on although their `ablate`
was killed, and counts them as jobs. Ctrl-C and SIGTERM are passed on to the
runs, which save their progress. The exit code is 0 once all runs are finished.
It is 2 if the metrics of a run cannot be read; the tables then lack that run.
"""

from collections.abc import Sequence

from stppo_jax.commands.flags import ablation_flags


def main(argv: Sequence[str]) -> int:
  """Makes the missing runs and compares all runs; returns the exit code."""
  plan, is_dry = ablation_flags.parse(argv)
  # Imported late, so that a wrong flag is reported before numpy is loaded.
  from stppo_jax.tools.ablation import study_runs

  return study_runs.make(plan, is_dry=is_dry)
