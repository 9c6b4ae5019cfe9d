"""Where a stopping criterion ends a whole answer."""

from __future__ import annotations

import pytest
from support.tiny import TOKENIZERS

from hf_adafuse.decoding.answer_stops import AnswerStops
from hf_adafuse.decoding.progress import Prompt
from hf_adafuse.members.vocabulary import Vocabulary

EURO = "\u20ac".encode()


@pytest.mark.parametrize(
    ("pieces", "limit", "kept"),
    [
        ([b"A", b"B", b"C"], 2, 2),
        ([b"A", b"B", b"C"], 4, None),  # it goes on
        ([b"A", EURO[:1], EURO[1:2], EURO[2:]], 2, None),  # inside a character, which the answer finishes
        ([b"A", EURO[:1], EURO[1:2], EURO[2:]], 4, 4),
        ([b"A", EURO[:1], EURO[1:2], b"B"], 2, 2),  # inside a broken one: one byte and both decode to the same text
        ([b"A", EURO[:1], b"B"], 2, 2),
    ],
)
def test_how_many_ids_of_an_answer_the_caller_gets(pieces, limit, kept):
    vocabulary = Vocabulary(TOKENIZERS["byte_level"]())
    all_pieces = vocabulary.all_pieces()
    ids = [all_pieces.index(piece) for piece in pieces]
    prompt = Prompt(0, [all_pieces.index(b"Q")])
    stops = AnswerStops(vocabulary, [prompt], lambda so_far: "length" if len(so_far.ids) > limit else None)
    assert stops.num_kept(0, ids) == kept
    assert stops.num_kept(0, ids) == kept  # asked again
