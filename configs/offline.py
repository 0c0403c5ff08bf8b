"""The sections of training without a collector: `sft` and `preference`."""

from typing import Any

from stppo_jax.configs import optimizer


def sft() -> dict[str, Any]:
  """Returns the section `sft`."""
  return {
    'num_steps': 2000,  # steps with one update each
    # Whether `train` begins with `sft` if model.path is ''. The result is
    # kept in WORKDIR/start.
    'before_training': False,
    'batch_size': 64,  # dialogues per step
    # A file of demonstrations, as `data demonstrate` prints them; '' = every
    # step makes demonstrations from the questions of the run.
    'demonstrations': '',
    'error_rate': 0.3,  # probability of an error at each decision
    # For questions from files. If this number is above 0, the answer of a
    # demonstration quotes the beginning of a gold passage, with at most this
    # many words. In steps without errors, words of a gold passage then replace
    # about half of the questions, too. 0 = the answer is the golden answer. See
    # docs/your_own_data.md.
    'quote_words': 0,
    # The number of steps at the start that have questions of one hop and no
    # errors.
    'clean_one_hop_steps': 0,
    # The number of the steps that follow these first steps, and have questions
    # of all hops and no errors.
    'clean_steps': 0,
    # The learning rate falls linearly to 0 in the second half of the steps.
    'optimizer': optimizer.adam(
      learning_rate=2e-3, warmup_updates=50, b2=0.98, weight_decay=0.0
    ),
  }


def preference() -> dict[str, Any]:
  """Returns the section `preference`."""
  return {
    'name': 'tdpo2',  # tdpo1 | tdpo2
    'beta': 0.1,  # how strongly the policy is kept near the reference
    'alpha': 0.5,  # tdpo2: weight of the divergences
    'batch_size': 64,  # pairs per update
    # Rows per forward pass, with at least one pair in each row; 0 = all rows.
    'microbatch_size': 0,
    'num_epochs': 1,  # passes over the pairs
  }
