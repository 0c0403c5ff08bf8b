"""What `docs/algorithms.md` says of every row and of every choice.

`ROWS` follows the keys of `configs.algorithms.ALGORITHMS`, `PREFERENCES` the
names of `preference.name`, and `CHOICES[KEY][NAME]` every option of a row that
is a name, such as `CHOICES['bounds.name']['fixed']`. Defaults are not told
here: the document takes them from the table.
"""

from docs.texts import advantages
from docs.texts import corrections
from docs.texts import entry
from docs.texts import policy
from docs.texts import preamble
from docs.texts import rows

PREAMBLE = preamble
SURE = entry.SURE
ROWS = rows.ROWS
PREFERENCES = rows.PREFERENCES
CHOICES = policy.CHOICES | corrections.CHOICES | advantages.CHOICES
