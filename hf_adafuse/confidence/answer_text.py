"""What the text of an answer says: its words without case and punctuation, its last number, and how many words two
answers share. The features of answers, votes and the metrics of the lab read answers by these functions."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

# The minus sign and the dash that stand for a hyphen before a number.
_SIGNS = str.maketrans("\u2212\u2013", "--")
# A number with its sign and its point, as a word may begin with it.
_SIGNED = re.compile(r"[-+]?\.?\d")
_ALSO_PUNCTUATION = "`|~="  # which Unicode counts among symbols
# A sign of a currency before a number, also behind its sign: "-$5" is -5.
_CURRENCY = re.compile(r"(?<!\w)[$€£¥](?=\.?\d)")
# A hyphen behind a letter or a digit is no sign: "pages 5-10" ends with 10. Commas part groups of three digits, in
# India also groups of two before these, and points may part several groups of three. Digits between other commas, or
# between several points, are numbers of their own: "3,4" has two and "12.05.2020" three.
_NUMBER = re.compile(
    r"(?:(?<!\w)-)?(?:"
    r"\d{1,3}(?:,\d\d){0,20}(?:,\d{3}){1,20}(?!\d)(?:\.\d+)?"
    r"|\d{1,3}(?:\.\d{3}){2,20}(?!\d|\.\d)"
    r"|(?<!\d\.)\d+\.\d+(?!\.?\d)"
    r"|\d+"
    r"|(?<!\d)\.\d+)"
)


def cut_at(text: str, stops: Sequence[str] | None) -> str:
    """The text up to the first stop text in it. A stop text ends an answer and is no part of it."""
    return text[: min((at for stop in stops or () if (at := text.find(stop)) >= 0), default=len(text))]


def normalized_answer(text: str) -> str:
    """The words of a text with one space between them, without case and without punctuation around words."""
    folded = _with_plain_numbers(unicodedata.normalize("NFKC", text).casefold()).split()
    return " ".join(filter(None, map(_bare, folded)))


def numbers_in(text: str) -> list[Decimal]:
    """The numbers that a text names, in order: `1,000` is 1000, `.5` is 0.5, `-$2` is -2 and `3.0` equals 3."""
    found = (number.replace(",", "") for number in _NUMBER.findall(_with_plain_numbers(text)))
    return [Decimal(number.replace(".", "") if number.count(".") > 1 else number) for number in found]


def last_number_in(text: str) -> Decimal | None:
    """The last number that a text names; `None` where it names none."""
    return next(reversed(numbers_in(text)), None)


def word_f1(words: Sequence[str], other_words: Sequence[str]) -> float:
    """The F1 of two lists of words, from 0 to 1: twice the number of common words over the number of all words."""
    if not words or not other_words:
        return float(list(words) == list(other_words))
    common = (Counter(words) & Counter(other_words)).total()
    return 2 * common / (len(words) + len(other_words))


def _bare(word: str) -> str:
    """A word without the punctuation around it. Marks, like vowel signs, and symbols, as in C++, are no punctuation."""
    start, end = 0, len(word)
    while start < end and _is_punctuation(word[start]) and not _SIGNED.match(word, start):
        start += 1
    while end > start and _is_punctuation(word[end - 1]):
        end -= 1
    return word[start:end]


def _is_punctuation(character: str) -> bool:
    category = unicodedata.category(character)  # Cf: what is not seen, like marks of direction
    return category.startswith("P") or category == "Cf" or character in _ALSO_PUNCTUATION


def _with_plain_numbers(text: str) -> str:
    """A text with hyphens as the signs of its numbers, and without signs of currencies before them."""
    return _CURRENCY.sub("", text.translate(_SIGNS))
