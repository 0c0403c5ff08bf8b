"""What `docs/algorithms.md` says of every row and of every choice.

`ROWS` follows the keys of `configs.algorithms.ALGORITHMS`, `PREFERENCES` the
names of `preference.name`, and `CHOICES[KEY][NAME]` every option of a row that
is a name, such as `CHOICES['bounds.name']['fixed']`. Defaults are not told
here: the document takes them from the table.
"""

from configs.descriptions import advantages
from configs.descriptions import corrections
from configs.descriptions import entry
from configs.descriptions import policy
from configs.descriptions import preamble
from configs.descriptions import rows

PREAMBLE = preamble
SURE = entry.SURE
ROWS = rows.ROWS
PREFERENCES = rows.PREFERENCES
CHOICES = policy.CHOICES | corrections.CHOICES | advantages.CHOICES
