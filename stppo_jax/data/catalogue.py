"""The table of published data sets, which says where their files come from.

The table has the address of each file that a program can fetch. For every other
file the table has the name of the file, and the web page from which a person
has to fetch the file.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from stppo_jax.data import formats

SPLITS = ('train', 'validation', 'test')
# The `split` of a JSON file whose keys are the ids of the test questions. A
# data set has such a file if its other files mix test and training questions.
TEST_IDS = 'test_ids'


@dataclasses.dataclass(frozen=True)
class Original:
  """A file of a published data set.

  Attributes:
    split: the split of the questions in the file, one of SPLITS; TEST_IDS if
      the file holds ids of questions.
    pattern: the end of the path that the authors gave the file; see
      `tables.find`.
    url: the address of the file, or of the archive that holds the file; '' if
      no program can fetch it.
    download: the name of the file or archive at `url`.
  """

  split: str
  pattern: str
  url: str = ''
  download: str = ''


@dataclasses.dataclass(frozen=True)
class Published:
  """A published data set.

  Attributes:
    title: the full name of the data set.
    home: the web page on which a person finds the data set.
    licence: the licence under which the authors publish the data set.
    read: the function of `formats` that converts a row of the files to the
      fields of a question.
    originals: the files that the authors publish.
    columns: the names of the columns, if the files have no header line.
  """

  title: str
  home: str
  licence: str
  read: Callable[[Any], formats.Fields]
  originals: Sequence[Original]
  columns: Sequence[str] = ()


def _at(base: str, **names: str) -> tuple[Original, ...]:
  """Returns the file of each split; the URL of each file begins with `base`."""
  return tuple(
    Original(split, name, f'{base}/{name}', name)
    for split, name in names.items()
  )


def _inside(url: str, download: str, **names: str) -> tuple[Original, ...]:
  """Returns the file of each split; the archive at `url` holds all files."""
  return tuple(
    Original(split, name, url, download) for split, name in names.items()
  )


_GITHUB = 'https://raw.githubusercontent.com'
_HUB = 'https://huggingface.co/datasets'
_MMLU_SUBJECTS = (
  'anatomy',
  'clinical_knowledge',
  'college_biology',
  'college_medicine',
  'medical_genetics',
  'professional_medicine',
)

PUBLISHED: Mapping[str, Published] = {
  'nq': Published(
    'Natural Questions, open',
    'https://github.com/google-research-datasets/natural-questions',
    'CC BY-SA 3.0',
    formats.nq_open,
    _at(
      f'{_GITHUB}/google-research-datasets/natural-questions/master/nq_open',
      train='NQ-open.train.jsonl',
      validation='NQ-open.dev.jsonl',
    ),
  ),
  'qed': Published(
    'Natural Questions with their paragraphs, QED',
    'https://github.com/google-research-datasets/QED',
    'CC BY-SA 3.0',
    formats.qed,
    _at(
      f'{_GITHUB}/google-research-datasets/QED/master',
      train='qed-train.jsonlines',
      validation='qed-dev.jsonlines',
    ),
  ),
  'triviaqa': Published(
    'TriviaQA, unfiltered',
    'https://nlp.cs.washington.edu/triviaqa',
    'Apache-2.0',
    formats.triviaqa,
    _inside(
      'https://nlp.cs.washington.edu/triviaqa/data/triviaqa-unfiltered.tar.gz',
      'triviaqa-unfiltered.tar.gz',
      train='unfiltered-web-train.json',
      validation='unfiltered-web-dev.json',
    ),
  ),
  'popqa': Published(
    'PopQA',
    'https://github.com/AlexTMallen/adaptive-retrieval',
    'MIT',
    formats.popqa,
    _at(
      f'{_GITHUB}/AlexTMallen/adaptive-retrieval/main/data', test='popQA.tsv'
    ),
  ),
  'hotpotqa': Published(
    'HotpotQA',
    'https://hotpotqa.github.io',
    'CC BY-SA 4.0',
    formats.hotpotqa,
    _at(
      'http://curtis.ml.cmu.edu/datasets/hotpot',
      train='hotpot_train_v1.1.json',
      validation='hotpot_dev_distractor_v1.json',
    ),
  ),
  '2wikimultihopqa': Published(
    '2WikiMultihopQA',
    'https://github.com/Alab-NII/2wikimultihop',
    'Apache-2.0',
    formats.hotpotqa,
    _inside(
      # Without dl=1, Dropbox sends a web page about the file, not the file.
      'https://www.dropbox.com/s/ms2m13252h6xubs/data_ids_april7.zip?dl=1',
      'data_ids_april7.zip',
      train='train.json',
      validation='dev.json',
    ),
  ),
  'musique': Published(
    'MuSiQue, answerable',
    'https://github.com/StonyBrookNLP/musique (musique_v1.0.zip)',
    'CC BY 4.0',
    formats.musique,
    (
      # These files have no URL, because no program can fetch the archive of the
      # authors.
      Original('train', 'musique_ans_v1.0_train.jsonl'),
      Original('validation', 'musique_ans_v1.0_dev.jsonl'),
    ),
  ),
  'bamboogle': Published(
    'Bamboogle',
    'https://github.com/ofirpress/self-ask',
    'MIT',
    formats.bamboogle,
    (
      Original(
        'test',
        '*.csv',
        'https://docs.google.com/spreadsheets/d/'
        '1jwcsA5kE4TObr9YHn9Gc-wQHYjTbLhDGx6tmIzMhl_U/export?format=csv',
        'bamboogle.csv',
      ),
    ),
  ),
  'medqa': Published(
    'MedQA, US, four options',
    'https://github.com/jind11/MedQA (data_clean.zip)',
    'MIT',
    formats.medqa,
    _at(
      f'{_HUB}/GBaker/MedQA-USMLE-4-options/resolve/main',
      train='phrases_no_exclude_train.jsonl',
      test='phrases_no_exclude_test.jsonl',
    ),
  ),
  'medmcqa': Published(
    'MedMCQA',
    'https://github.com/medmcqa/medmcqa (data.zip)',
    'MIT',
    formats.medmcqa,
    (
      Original('train', 'train.json'),
      Original('validation', 'dev.json'),
    ),
  ),
  'pubmedqa': Published(
    'PubMedQA, labelled by experts',
    'https://github.com/pubmedqa/pubmedqa',
    'MIT',
    formats.pubmedqa,
    _at(
      f'{_GITHUB}/pubmedqa/pubmedqa/master/data',
      train='ori_pqal.json',
      test_ids='test_ground_truth.json',
    ),
  ),
  'mmlu-med': Published(
    'MMLU, six medical subjects',
    'https://github.com/hendrycks/test',
    'MIT',
    formats.mmlu,
    tuple(
      Original(
        split,
        f'{folder}/{subject}_{folder}.csv',
        'https://people.eecs.berkeley.edu/~hendrycks/data.tar',
        'data.tar',
      )
      for split, folder in (('validation', 'val'), ('test', 'test'))
      for subject in _MMLU_SUBJECTS
    ),
    # These files have no header line.
    columns=('question', 'A', 'B', 'C', 'D', 'answer'),
  ),
}
