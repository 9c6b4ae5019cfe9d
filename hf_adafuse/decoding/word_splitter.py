"""What a word is, for strings and bytes.

A word is optional leading whitespace and then a maximal run of non-whitespace. These are words:

    " Paris"    if " is" follows; if "." follows, the word is " Paris."; a token ".\\n" ends it, with the newline
    "\\n\\nThe"  " don't"  " 3.14,"  "x"  "(a"

and these are not: " " (no visible character), " Par" before "is" (the run goes on).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

_NEEDED_FOR = 'word_boundary="unicode"'
_WORD = re.compile(r"\s*\S+")


def split_words(text: str) -> list[str]:
    """The words of `text`. Joined, they give `text` back; whitespace at its end belongs to the last word."""
    words = _WORD.findall(text)
    rest = text[sum(map(len, words)) :]
    if words:
        words[-1] += rest
    elif rest:
        words = [rest]
    return words


def is_mid_character(data: bytes) -> bool:
    """Whether `data` ends with the beginning of a UTF-8 character that more bytes could complete."""
    for length in range(1, min(3, len(data)) + 1):
        tail = data[-length:]
        if tail[0] & 0xC0 == 0x80:
            continue  # a continuation byte: look further back for the byte that leads it
        try:
            tail.decode("utf-8")
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data"
        return False
    return False


@dataclass(frozen=True)
class WordSplitter:
    """
    Says where a word ends:

    - at `max_word_tokens` tokens;
    - before the end of the sequence;
    - if it has a visible character: where its text ends in whitespace, where the next greedy token begins with
      whitespace, or, with `word_boundary="unicode"`, at a boundary of UAX #29.

    Args:
        max_word_tokens (`int`): a word also ends at this many tokens.
        word_boundary (`str`): `"whitespace"` or `"unicode"` (UAX #29).

    Raises:
        ImportError: `word_boundary="unicode"` without the library that segments.
    """

    max_word_tokens: int = 32
    word_boundary: str = "whitespace"

    def __post_init__(self) -> None:
        if self.word_boundary == "unicode":
            icu_breaker("WordBreaker", _NEEDED_FOR)

    def split(self, text: str) -> list[str]:
        """The words of `text`. Joined, they give `text` back."""
        if self.word_boundary == "whitespace" or not text.strip():
            return split_words(text)
        words = list[str]()
        space = ""  # what comes before the next word
        for segment in segments(text):
            if segment.strip():
                words.append(space + segment)
                space = ""
            else:
                space += segment
        words[-1] += space
        return words

    def is_closed(self, data: bytes, num_tokens: int) -> bool:
        """Whether the word of these bytes and tokens is complete whatever follows: no look-ahead is needed."""
        # At most three more bytes complete a character; broken bytes must not make a word endless.
        if num_tokens >= self.max_word_tokens + (3 if is_mid_character(data) else 0):
            return True
        word = data.decode("utf-8", errors="replace")
        return bool(word.strip()) and word[-1].isspace()

    def is_complete(self, data: bytes, following: bytes | None) -> bool:
        """Whether the word ends before the token `following` (`None`: an end-of-sequence token)."""
        if following is None:
            return True  # whitespace before the end of the sequence, too: no more can come
        word = data.decode("utf-8", errors="replace")
        if not word.strip() or is_mid_character(data):
            return False
        after = following.decode("utf-8", errors="replace")
        if after[:1].isspace():
            return True
        return self.word_boundary == "unicode" and bool(after) and _is_boundary(word, after)


def word_starts(tokens: list[bytes | None], splitter: WordSplitter) -> list[int]:
    """
    Where words start in a run of greedy tokens, given as their bytes (`None`: end of sequence). The first token starts
    one; the end `len(tokens)` is included when the last word is complete without looking further.
    """
    starts = [0]
    word = b""  # the bytes of the word so far
    num_tokens = 0
    for index, token in enumerate(tokens):
        if num_tokens and splitter.is_complete(word, token):
            starts.append(index)
            word = b""
            num_tokens = 0
        word += token or b""
        num_tokens += 1
        if token is None or splitter.is_closed(word, num_tokens):
            starts.append(index + 1)
            word = b""
            num_tokens = 0
    return list(dict.fromkeys(starts))


def _is_boundary(word: str, after: str) -> bool:
    # Leading whitespace belongs to the word, so only the visible part is segmented.
    visible = word.lstrip()
    return len(visible) in itertools.accumulate(map(len, segments(visible + after)))


def segments(text: str, breaker: str = "WordBreaker", needed_for: str = "") -> list[str]:
    """The parts of `text` between the boundaries of UAX #29, of words or with `"SentenceBreaker"` of sentences."""
    data = text.encode("utf-16-le", "surrogatepass")  # ICU counts in UTF-16 units
    parts = icu_breaker(breaker, needed_for or _NEEDED_FOR)(text, "en").segments()
    return [data[2 * start : 2 * end].decode("utf-16-le", "surrogatepass") for start, end in parts]


def icu_breaker(name: str, needed_for: str) -> Any:
    """
    Raises:
        ImportError: the library that segments is not there.
    """
    try:
        import icu4py.breakers as breakers
    except ImportError as error:
        raise ImportError(
            f'`{needed_for}` needs the package icu4py. Install it with `pip install "hf_adafuse[unicode]"`.'
        ) from error
    return getattr(breakers, name)
