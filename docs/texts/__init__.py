"""The descriptions of every algorithm and of every choice.

`ALGORITHMS` has the keys of `configs.algorithms.ALGORITHMS`, `PREFERENCES` has
the names that `preference.name` may have, and `CHOICES[KEY][NAME]` describes
each choice of an option whose value is a name, such as
`CHOICES['bounds.name']['fixed']`. The pages take the defaults from the table.
"""

from docs.texts import advantages
from docs.texts import algorithms
from docs.texts import corrections
from docs.texts import entry
from docs.texts import policy
from docs.texts import preamble

PREAMBLE = preamble
SURE = entry.SURE
ALGORITHMS = algorithms.ALGORITHMS
PREFERENCES = algorithms.PREFERENCES
CHOICES = policy.CHOICES | corrections.CHOICES | advantages.CHOICES
