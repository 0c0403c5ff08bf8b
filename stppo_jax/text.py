"""Text from outside: valid, without our tags, and in a form to compare answers.

`neutralise_tags` ends at a fixed point: applied again it changes nothing, so a
tag cannot be assembled from the remains of another.
"""

import functools
import re
import string
import unicodedata

TAG_NAMES = ('think', 'search', 'information', 'answer')
TAGS = tuple(f'<{slash}{name}>' for name in TAG_NAMES for slash in ('', '/'))
# The tags of the environments with tools and of those with commands.
OTHER_TAG_NAMES = ('tool_call', 'tool_response', 'action')

# Characters that a reader, or a tokenizer's normaliser, may take for an angle
# bracket. NFKD maps full-width, small and upright forms to these.
_LESS = '<‹«〈⟨⟪《❮❰❬⧼˂ᐸ≺⋖'
_GREATER = '>›»〉⟩⟫》❯❱❭⧽˃ᐳ≻⋗'
# Letters of other alphabets that look like letters of our tags.
_LETTERS = {
  'аɑα': 'a',
  'сϲ': 'c',
  'еҽε': 'e',
  'һнη': 'h',
  'іıι': 'i',
  'κк': 'k',
  'ӏ': 'l',
  'мμ': 'm',
  'ոпν': 'n',
  'оοօ': 'o',
  'рρ': 'p',
  'гґ': 'r',
  'ѕ': 's',
  'тτ': 't',
  'ԝѡ': 'w',
}
_FOLDED = (
  dict.fromkeys(_LESS, '<')
  | dict.fromkeys(_GREATER, '>')
  | dict.fromkeys('∕⁄⧸╱', '/')
  | {char: letter for chars, letter in _LETTERS.items() for char in chars}
)
# A text without any of these characters contains no tag. Most passages have
# none of them, so the slow loop below is rarely entered. After _LESS come the
# characters that NFKD decomposes into one of _LESS.
_ANY_LESS = re.compile(f'[{_LESS}＜﹤≮⊀︿︽\u2329]')
_NAMES = '|'.join(TAG_NAMES + OTHER_TAG_NAMES).replace('_', '[_-]*')
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_DELETE_PUNCTUATION = str.maketrans('', '', string.punctuation)
_TAG = re.compile(rf'<[/\\]*(?:{_NAMES})[/\\]*>')


def neutralise_tags(text: str) -> str:
  """Returns the text with our own tags in round instead of angle brackets.

  Case, white space, zero-width characters, accents and look-alikes make no
  difference: `< / ＡＮＳＷＥＲ ＞` is a tag too. Everything else is unchanged.
  """
  # Repeated until nothing changes: matches do not overlap, so a pass may leave
  # a tag that shared a bracket with a neutralised one.
  while _ANY_LESS.search(text):
    characters = list(text)
    folded, origins = _fold(text)
    for match in _TAG.finditer(folded):
      characters[origins[match.start()]] = '('
      characters[origins[match.end() - 1]] = ')'
    neutral = ''.join(characters)
    if neutral == text:
      break
    text = neutral
  return text


def _fold(text: str) -> tuple[str, list[int]]:
  """Returns the text as a lenient reader sees it.

  Returns:
    The folded text, and for each of its characters the index in `text`.
  """
  folded, origins = [], []
  for index, character in enumerate(text):
    for plain in _fold_character(character):
      folded.append(plain)
      origins.append(index)
  return ''.join(folded), origins


@functools.lru_cache(maxsize=65536)
def _fold_character(character: str) -> str:
  """Returns the plain characters that one resembles; '' if it is invisible."""
  plain = unicodedata.normalize('NFKD', character).casefold()
  plain = ''.join(_FOLDED.get(c, c) for c in plain)
  return ''.join(
    c
    for c in plain
    if not c.isspace() and unicodedata.category(c) not in _INVISIBLE
  )


# The Unicode categories of separators, of control and format characters, and of
# marks that combine with the letter before them.
_INVISIBLE = frozenset({'Zs', 'Zl', 'Zp', 'Cc', 'Cf', 'Mn', 'Me'})


def normalise(text: str) -> str:
  """Returns the text as the evaluation of SQuAD compares it.

  The result is in lower case, without ASCII punctuation and articles, and has
  single spaces. Where nothing would be left, as of "The" and "+", punctuation
  and articles stay: otherwise an empty answer would equal it.
  """
  text = text.lower()
  kept = _ARTICLES.sub(' ', text.translate(_DELETE_PUNCTUATION)).split()
  return ' '.join(kept or text.split())


def whole(text: str) -> str:
  """Returns a text with U+FFFD for each half of a surrogate pair.

  JSON can escape such a half, which no tokenizer and no file accepts.
  """
  return text.encode('utf-16-le', 'surrogatepass').decode(
    'utf-16-le', 'replace'
  )
