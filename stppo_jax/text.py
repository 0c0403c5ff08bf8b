"""Cleans text from outside: neutralises forged tags, and normalises answers.

The result of `neutralise_tags` is a fixed point: a second call changes nothing.
So no tag can be assembled from the remains of another tag.
"""

import functools
import re
import string
import unicodedata

TAG_NAMES = ('think', 'search', 'information', 'answer')
TAGS = tuple(f'<{slash}{name}>' for name in TAG_NAMES for slash in ('', '/'))
# The tags of the environments with tools and of the environments with commands.
OTHER_TAG_NAMES = ('tool_call', 'tool_response', 'action')

# Characters that a reader, or a tokenizer's normaliser, may take for an angle
# bracket. The full-width, small and upright forms of a bracket need not be
# listed, because the Unicode normalisation NFKD maps them to these characters.
_LESS = '<‹«〈⟨⟪《❮❰❬⧼˂ᐸ≺⋖'
_GREATER = '>›»〉⟩⟫》❯❱❭⧽˃ᐳ≻⋗'
# Letters of other alphabets that look like letters of the tags above.
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
# none of them, so the slow loop of `neutralise_tags` is rarely entered. The
# characters that follow _LESS here are listed because the NFKD form of each of
# them contains a character of _LESS.
_ANY_LESS = re.compile(f'[{_LESS}＜﹤≮⊀︿︽\u2329]')
_NAMES = '|'.join(TAG_NAMES + OTHER_TAG_NAMES).replace('_', '[_-]*')
_ARTICLES = re.compile(r'\b(a|an|the)\b')
_DELETE_PUNCTUATION = str.maketrans('', '', string.punctuation)
_TAG = re.compile(rf'<[/\\]*(?:{_NAMES})[/\\]*>')


def neutralise_tags(text: str) -> str:
  """Returns the text with `(` and `)` in place of the `<` and `>` of tags.

  Only tags with a name in `TAG_NAMES` or `OTHER_TAG_NAMES` are changed. A tag
  is found whatever its case, white space, zero-width characters, accents and
  look-alike letters: `< / ＡＮＳＷＥＲ ＞` is a tag too. The rest of the text
  is unchanged.
  """
  # The loop ends when a pass changes nothing. One pass may leave a tag, because
  # matches do not overlap, and two tags may share a bracket.
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
  """Replaces characters by the plain characters that they resemble.

  Returns:
    The folded text, and for each of its characters the index in `text` of the
    character that it comes from.
  """
  folded, origins = [], []
  for index, character in enumerate(text):
    for plain in _fold_character(character):
      folded.append(plain)
      origins.append(index)
  return ''.join(folded), origins


@functools.lru_cache(maxsize=65536)
def _fold_character(character: str) -> str:
  """Returns the plain characters that a character resembles.

  The result is '' for an invisible character.
  """
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
  """Returns the text in the form in which SQuAD's evaluation compares answers.

  The result is in lower case, without ASCII punctuation and articles, and has
  single spaces. If this leaves nothing, as with "The" or "+", punctuation and
  articles are kept. Otherwise such a text would equal an empty answer.
  """
  text = text.lower()
  kept = _ARTICLES.sub(' ', text.translate(_DELETE_PUNCTUATION)).split()
  return ' '.join(kept or text.split())


def whole(text: str) -> str:
  """Returns a text in which U+FFFD replaces each unpaired surrogate.

  A JSON escape can produce an unpaired surrogate, and tokenizers and files do
  not accept it.
  """
  return text.encode('utf-16-le', 'surrogatepass').decode(
    'utf-16-le', 'replace'
  )
