"""What a word is."""

from __future__ import annotations

import pytest

from hf_adafuse.decoding.word_splitter import WordSplitter, is_mid_character, split_words, word_starts

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The treaty of  Versailles.", ["The", " treaty", " of", "  Versailles."]),
        ("\n\nThe\tend", ["\n\nThe", "\tend"]),
        (" 3.14, (a don't", [" 3.14,", " (a", " don't"]),
        ("there was a ", ["there", " was", " a "]),
        ("  \n", ["  \n"]),
        ("", []),
        ("今天 天气", ["今天", " 天气"]),
    ],
)
def test_split_words(text, words):
    assert split_words(text) == words
    assert "".join(split_words(text)) == text


@pytest.mark.parametrize("text", ["é", "今", "😀", "ab今"])
def test_is_mid_character(text):
    data = text.encode()
    starts = {len(text[:i].encode()) for i in range(len(text) + 1)}
    for end in range(len(data) + 1):
        assert is_mid_character(data[:end]) == (end not in starts)


@pytest.mark.parametrize("data", [b"\xff", b"\xc0", b"a\x80", b"\xe0\x80", b"\xf8\x88\x88"])
def test_bytes_that_nothing_can_complete_are_not_mid_character(data):
    assert not is_mid_character(data)


COMPLETE = [(b" Paris", b" is"), (b"x", b"\n"), (b"\n\nThe", None), (b" ", None), (b"a\xff", b" b")]
INCOMPLETE = [(b" Par", b"is"), (b" ", b" "), (b"\n", b"\n"), (b" x", b""), (b" \xe4\xbb", b" a"), (b" don", b"'t")]


@pytest.mark.parametrize(("data", "following"), COMPLETE)
def test_complete(data, following):
    assert WordSplitter().is_complete(data, following)


@pytest.mark.parametrize(("data", "following"), INCOMPLETE)
def test_not_complete(data, following):
    assert not WordSplitter().is_complete(data, following)


def test_closed_whatever_follows():
    splitter = WordSplitter(max_word_tokens=3)
    assert splitter.is_closed(b"was ", 1) and not splitter.is_closed(b"was", 1) and not splitter.is_closed(b"  ", 1)
    assert splitter.is_closed(b"abc", 3)
    assert not splitter.is_closed(b"ab\xe4", 3) and not splitter.is_closed(b"a\xe4\xbb", 4)
    assert splitter.is_closed("a今".encode(), 4) and splitter.is_closed(b"\xe4\xe4\xe4\xe4\xe4\xe4", 6)


@pytest.mark.parametrize(
    ("word", "following", "complete"),
    [
        ("今天", "天气", True),
        ("天", "气", False),
        (" don't", " go", True),
        ("don", "'t", False),
        ("3", ".", True),
        ("สวัสดี", "ครับ", True),
        ("hello", ",", True),
    ],
)
def test_unicode_boundaries(word, following, complete):
    splitter = WordSplitter(word_boundary="unicode")
    assert splitter.is_complete(word.encode(), following.encode()) == complete


def test_unicode_needs_its_library(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "icu4py.breakers", None)
    with pytest.raises(ImportError, match=r'pip install "hf_adafuse\[unicode\]"'):
        WordSplitter(word_boundary="unicode")
    WordSplitter()


def test_word_starts():
    tokens = [b" The", b" tre", b"aty", b" of", b" ", b"x"]
    assert word_starts(tokens, WordSplitter()) == [0, 1, 3, 4]
    assert word_starts([b"was ", b"a ", b"cat"], WordSplitter()) == [0, 1, 2]
    assert word_starts([b" a", None], WordSplitter()) == [0, 1, 2]
    assert word_starts([b"a", b"b", b"c"], WordSplitter(max_word_tokens=2)) == [0, 2]
