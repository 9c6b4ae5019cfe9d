"""Where the answers of a prompt's examples are, and by what of a prompt a member is judged."""

import math
import random

import pytest
from support.reference_rules import answers

from hf_adafuse.members.prompt_nll import answer_spans, prompt_nll

FEW_SHOT = b"Question: a?\nAnswer: Paris\n\nQuestion: b?\nAnswer: No, Rome.\n\nQuestion: c?\nAnswer:"


def found(text):
    return [text[start:stop] for start, stop in answer_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FEW_SHOT, [b" Paris", b" No, Rome."]),
        (b"Answer: first\nAnswer:", [b" first"]),  # at the very beginning
        (b"Say Answer: no\nAnswer:", []),  # not where the line begins otherwise
        (b"Question: Who?\nAnswer:", []),
        (b"Who?", []),
        (b"The cat sat on the mat.\nThe", []),  # a sentence half written
        (b"- red\n- green\n- ", []),
        (FEW_SHOT.replace(b"\n", b"\r\n"), [b" Paris", b" No, Rome."]),  # the end of a line is no part of an answer
        (b"Q: a? A: Paris\r\nQ: b? A: Rome\r\n\r\nQ: c? A:", [b" Paris", b" Rome"]),
        (b"user\r\na\r\nassistant\r\nParis\r\nuser\r\nb\r\nassistant\r\n", [b"Paris"]),
        ("问：甲\n答：一\n问：乙\n答：".encode(), ["一".encode()]),
        (b"", []),
        (b"\n\n", []),
        (b"A:\nA:\nA:", []),  # nothing in them
        (b"user\na\nassistant\nParis\nuser\nb\nassistant\n", [b"Paris"]),  # a chat, its special tokens have no text
        (b"Q: a? A: Paris\nQ: b? A: No, Rome.\n\nQ: c? A:", [b" Paris", b" No, Rome."]),  # all in one line
        (b"Q: is it A: ? A: yes\nQ: b? A: ", [b"yes"]),
        (b"I told him: no\nYou asked him:", []),  # lines of other beginnings
        (b"sea otter => loutre\ncheese =>", [b" loutre"]),
        ("Größe → size\nNähe →".encode(), [b" size"]),
        (b"Q: a? A:\nQ: b? A:", []),
        (b"Q: a? A: b\nQ: c? A: d", []),  # its own answer is begun
        ("Frage: a\nAntwort: Größe\nFrage: b\nAntwort:".encode(), [" Größe".encode()]),
    ],
)
def test_answers(text, expected):
    assert found(text) == expected


class Letters:
    """A vocabulary of one byte a token; 0 is a special token, 1 the unknown one."""

    unknown_id = 1

    @staticmethod
    def piece(token):
        return bytes([token]) if token > 1 else b""


CHAT = b"\0\0user\nWho?\0\n\0assistant\n"


@pytest.mark.parametrize(
    ("text", "weighting", "counted"),
    [
        (FEW_SHOT, "examples", [b" Paris", b" No, Rome."]),
        (b"\0" + FEW_SHOT, "examples_or_content", [b" Paris", b" No, Rome."]),
        (b"Question: Who?\nAnswer:", "examples", []),
        (b"\0Question: Who?\nAnswer:", "prompt", [b"Question: Who?\nAnswer:"]),  # a sequence's beginning has no text
        (b"Who\1?\nA:", "prompt", [b"Who", b"?\nA:"]),  # nor has what a tokenizer does not know
        (CHAT, "examples", []),
        (CHAT.replace(b"Who?", b"a\0\nassistant\nParis\n\0user\nb"), "examples", []),  # nor count its earlier turns
    ],
)
def test_by_what_a_member_is_judged(text, weighting, counted):
    ids = list(text)
    log_probs = [-float(1 + at % 7) for at in range(len(ids))]
    kept = [text.index(part) + at for part in counted for at in range(len(part))]
    expected = -sum(log_probs[at] for at in kept) / len(kept) if kept else math.nan
    assert prompt_nll(Letters, ids, log_probs, weighting) == pytest.approx(expected, nan_ok=True)


def test_the_question_begins_behind_the_last_empty_line_whatever_ends_lines():
    for end in ("\n", "\r\n"):
        text = f"An example.{end}{end}Who?".encode()
        log_probs = [-1.0] * (len(text) - 4) + [-3.0] * 4
        assert prompt_nll(Letters, list(text), log_probs, "question") == 3.0


PARTS = (
    ["A:", "\n", "\n", " b", "A"],
    ["Q: a A: b\n", "Q: ", "R: ", "A: ", "a", " A:", " ->", " ", "\n"],
    ["Q: a A: b\r\n", "Q: ", "A: ", "a", " A:", "\r\n", "\n"],
)


@pytest.mark.parametrize(("parts", "most", "least_found"), list(zip(PARTS, (14, 9, 9), (100, 200, 200), strict=True)))
def test_of_random_lines_as_by_every_byte(parts, most, least_found):
    rng, num_found = random.Random(1), 0
    for _ in range(6000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(0, most))).encode()
        marks = [False] * len(text)
        for start, stop in answer_spans(text):
            marks[start:stop] = [True] * (stop - start)
            num_found += 1
        assert marks == answers(text), text
    assert num_found > least_found
