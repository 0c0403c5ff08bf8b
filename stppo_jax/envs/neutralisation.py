"""Making text from outside harmless: no tags of ours, no special tokens.

Both functions end at a fixed point: applied again they change nothing, so a
forgery cannot be assembled from the remains of another.
"""

import functools
import re
import unicodedata

TAG_NAMES = ('think', 'search', 'information', 'answer')

# What a reader, or a tokenizer's normaliser, may take for an angle bracket.
# Full-width, small and upright forms come with NFKD.
_LESS = '<‹«〈⟨⟪《❮❰❬⧼˂ᐸ≺⋖'
_GREATER = '>›»〉⟩⟫》❯❱❭⧽˃ᐳ≻⋗'
# Letters of other alphabets that look like those of our tags.
_LETTERS = {
  'аɑα': 'a',
  'сϲ': 'c',
  'еҽε': 'e',
  'һнη': 'h',
  'іıι': 'i',
  'κк': 'k',
  'мμ': 'm',
  'ոпν': 'n',
  'оοօ': 'o',
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
# Nothing is left to do in a text without one of these; those behind _LESS are
# the characters that NFKD takes apart into one of them.
_ANY_LESS = re.compile(f'[{_LESS}＜﹤≮⊀︿︽\u2329]')
_TAG = re.compile(f'<[/\\\\]*(?:{"|".join(TAG_NAMES)})[/\\\\]*>')
# Put into a literal to break it; one is chosen that no literal contains.
_BREAKS = ' .-_·¦'


def neutralise_tags(text: str) -> str:
  """Turns the angle brackets of our own tags into round ones.

  Case, white space, zero-width characters, accents and look-alikes make no
  difference: `< / ＡＮＳＷＥＲ ＞` is a tag too. All else stays as it is.
  """
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
  """Text as a lenient reader sees it; for each character, whence it came."""
  folded, origins = [], []
  for index, character in enumerate(text):
    for plain in _fold_character(character):
      folded.append(plain)
      origins.append(index)
  return ''.join(folded), origins


@functools.lru_cache(maxsize=65536)
def _fold_character(character: str) -> str:
  """What one character looks like; '' for what is not seen."""
  plain = unicodedata.normalize('NFKD', character).casefold()
  plain = ''.join(_FOLDED.get(c, c) for c in plain)
  return ''.join(
    c
    for c in plain
    # Separators, controls, formats, and marks on the letter before.
    if not c.isspace() and unicodedata.category(c) not in _UNSEEN
  )


_UNSEEN = frozenset({'Zs', 'Zl', 'Zp', 'Cc', 'Cf', 'Mn', 'Me'})
