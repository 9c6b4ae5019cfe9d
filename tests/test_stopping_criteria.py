"""`WordBoundaryCriteria` and `MarginCriteria` on hand-built ids and scores; end to end: test_word_by_word."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_adafuse.stopping_criteria import MarginCriteria, WordBoundaryCriteria

# Byte-level tokens by name: "Ġ" is a space, "Ċ" a newline, "â" the first byte of a three-byte character.
TOKENS = ["</s>", "<pad>", "[UNK]", "a", "ĠPar", "is", "Ġis", "ĠParis", ".", "Ġ", "Ċ", "ThereĠwasĠaĠ", "Ġab", "ab", "â",
          "The", "<eot>", "ł", "ģ"]  # fmt: skip
EOS, PAD = 0, 1
PROMPT = [4, 5, 6]  # " Paris is": what comes before the new ids must not matter


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="[UNK]"))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", additional_special_tokens=["<eot>"]
    )


def _ids(*rows: list[str], prompt=PROMPT) -> torch.Tensor:
    """Rows of new tokens behind the prompt, padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*prompt, *map(TOKENS.index, row), *[PAD] * (width - len(row))] for row in rows])


# (tokens, the words they complete with `max_word_tokens=3`)
STOPS = [
    (["ĠPar", "is", "Ġis"], ["ĠPar", "is"]),
    (["Ċ", "The", "Ċ"], ["Ċ", "The"]),
    (["ĠParis", "</s>"], ["ĠParis"]),
    (["Ġ", "</s>"], ["Ġ"]),
    (["</s>"], ["</s>"]),
    (["ThereĠwasĠaĠ"], ["ThereĠwasĠaĠ"]),
    (["is", "ThereĠwasĠaĠ"], ["is", "ThereĠwasĠaĠ"]),
    (["Ġab", "ab", "ab"], ["Ġab", "ab", "ab"]),
    (["Ġab", "â", "ł", "ģ"], ["Ġab", "â", "ł", "ģ"]),
]
GOES_ON = [[], ["ĠPar", "is"], ["ĠParis", "."], ["Ġ"], ["Ċ", "Ċ"], ["Ġab", "ab", "â"], ["Ġab", "â", "ł"]]


class TestWordBoundary:
    @pytest.mark.parametrize(("tokens", "word"), STOPS)
    def test_stops_at_the_last_of_these(self, tokenizer, tokens, word):
        criterion = WordBoundaryCriteria(tokenizer, len(PROMPT), max_word_tokens=3)
        stops = [criterion(_ids(tokens[:length]), None).tolist() for length in range(len(tokens) + 1)]
        assert stops == [[False]] * len(tokens) + [[True]]
        assert criterion.word_ids(_ids(tokens)) == [[TOKENS.index(token) for token in word]]

    @pytest.mark.parametrize("tokens", GOES_ON)
    def test_goes_on_after_these(self, tokenizer, tokens):
        criterion = WordBoundaryCriteria(tokenizer, len(PROMPT), max_word_tokens=3)
        assert criterion(_ids(tokens), None).tolist() == [False]
        assert criterion.word_ids(_ids(tokens)) == [[]]

    def test_returns_one_bool_per_row(self, tokenizer):
        stops = WordBoundaryCriteria(tokenizer, 3)(_ids(["ĠPar", "is"], ["ĠPar", "Ġis"]), None)
        assert stops.dtype == torch.bool
        assert stops.tolist() == [False, True]

    def test_several_words(self, tokenizer):
        ids = _ids(["ĠPar", "is", "Ċ", "The", "Ġis", "Ġis"])
        stops = [WordBoundaryCriteria(tokenizer, 3, max_words=n)(ids, None).item() for n in (1, 2, 3, 4)]
        assert stops == [True, True, True, False]
        words = [WordBoundaryCriteria(tokenizer, 3, max_words=n).words(ids)[0] for n in (1, 2, 3, 4)]
        three = [" Paris", "\nThe", " is"]
        assert words == [three[:1], three[:2], three, three]

    def test_the_end_of_the_sequence_is_a_word_of_its_own(self, tokenizer):
        ids = _ids(["ĠParis", "</s>", "Ġis", "Ġis"])
        one, two, three = (WordBoundaryCriteria(tokenizer, 3, max_words=n) for n in (1, 2, 3))
        assert [c(ids, None).item() for c in (one, two, three)] == [True, True, True]
        assert [c.word_ids(ids) for c in (one, two, three)] == [[[7]], [[7, EOS]], [[7, EOS]]]
        assert two.words(ids) == [[" Paris"]]

    def test_eos_token_id(self, tokenizer):
        ids = _ids(["ĠParis", "<eot>"], ["ĠParis", "</s>"])
        for given, expected in [
            (None, [False, True]),
            (EOS, [False, True]),
            (16, [True, False]),
            ([EOS, 16], [True, True]),
            (torch.tensor([EOS, 16]), [True, True]),
            ([], [False, False]),
        ]:
            assert WordBoundaryCriteria(tokenizer, 3, eos_token_id=given)(ids, None).tolist() == expected, given

    def test_once_stopped_a_row_stays_stopped_and_padding_adds_no_word(self, tokenizer):
        rows = [["ĠPar", "is", "Ġis", *filler] for filler in (["<pad>"] * 5, ["</s>"] * 5, ["Ġis"] * 5)]
        criterion = WordBoundaryCriteria(tokenizer, 3, max_word_tokens=4)
        for width in range(6, 12):
            assert criterion(_ids(*rows)[:, :width], None).tolist() == [True] * 3
            assert criterion.word_ids(_ids(*rows)[:, :width]) == [[4, 5]] * 3
        ended = _ids(["ĠPar", "</s>"] + ["<pad>"] * 5)
        assert WordBoundaryCriteria(tokenizer, 3, max_words=2, max_word_tokens=2).word_ids(ended) == [[4, EOS]]

    def test_a_batch_gives_each_row_what_it_gives_alone(self, tokenizer):
        rows = [tokens for tokens, _ in STOPS] + GOES_ON
        ids = _ids(*rows)
        criterion = WordBoundaryCriteria(tokenizer, 3, max_words=2)
        assert criterion(ids, None).tolist() == [criterion(row[None], None).item() for row in ids]
        assert criterion.word_ids(ids) == [criterion.word_ids(row[None])[0] for row in ids]
        prompts = [[], [9], [EOS, PAD, 10]]  # nor does the prompt matter
        others = [WordBoundaryCriteria(tokenizer, len(p), max_words=2)(_ids(*rows, prompt=p), None) for p in prompts]
        assert all(torch.equal(criterion(ids, None), other) for other in others)

    def test_remembers_nothing(self, tokenizer):
        criterion = WordBoundaryCriteria(tokenizer, 3)
        ids, other = _ids(["ĠPar", "is"], ["ĠPar", "Ġis"]), _ids(["Ġis", "Ġis"], ["Ġ", "Ġ"])
        first = criterion(ids, None).tolist()
        assert criterion(other, None).tolist() == [True, False]
        assert criterion(ids, None).tolist() == first
        assert ids.tolist() == _ids(["ĠPar", "is"], ["ĠPar", "Ġis"]).tolist()
        assert copy.deepcopy(criterion)(ids, None).tolist() == first
        assert pickle.loads(pickle.dumps(criterion))(ids, None).tolist() == first

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompt_length": -1}, "`prompt_length` must be an integer of at least 0, but is -1"),
            ({"max_words": 0}, "`max_words` must be an integer of at least 1, but is 0"),
            ({"max_words": None}, "`max_words` must be an integer of at least 1, but is None"),
            ({"max_word_tokens": 0}, "`max_word_tokens` must be an integer of at least 1, but is 0"),
            ({"word_boundary": "line"}, r"`word_boundary` must be one of \[.*\], but is 'line'"),
        ],
    )
    def test_arguments_are_checked(self, tokenizer, arguments, message):
        with pytest.raises(ValueError, match=message):
            WordBoundaryCriteria(tokenizer, **({"prompt_length": 3} | arguments))

    def test_unicode_words(self, tokenizer):
        pytest.importorskip("icu4py")
        ids = _ids(["ĠParis", ".", "ĠPar"])
        assert WordBoundaryCriteria(tokenizer, 3, word_boundary="unicode").words(ids) == [[" Paris"]]
        assert WordBoundaryCriteria(tokenizer, 3).words(ids) == [[" Paris."]]


def _scores(*rows: list[float]) -> tuple[torch.Tensor, ...]:
    """Scores of the given margins, per row and new token, as `generate()` gives them: one tensor per new token."""
    return tuple(
        # p = (1 + margin) / 2 and (1 - margin) / 2 for tokens 3 and 8, 0 for the others; logits are off by a constant.
        torch.stack([_two(margin) + 5.0 for margin in step])
        for step in zip(*rows, strict=True)
    )


def _two(margin: float) -> torch.Tensor:
    scores = torch.full((len(TOKENS),), -math.inf)
    scores[3], scores[8] = math.log((1 + margin) / 2), math.log((1 - margin) / 2) if margin < 1 else -math.inf
    return scores


class TestMargin:
    @pytest.mark.parametrize(
        ("tokens", "margins", "expected"),
        [
            (["ĠParis"], [0.1], [True]),
            (["ĠParis"], [0.9], [False]),
            (["ĠPar", "is", "Ġis"], [0.9, 0.1, 0.6], [False, False, True]),
            (["ĠPar", "is", "Ġis"], [0.9, 0.1, 0.8], [False, False, False]),
            (["ĠParis", "</s>"], [0.9, 0.2], [False, True]),
            (["</s>"], [0.2], [True]),
            (["ThereĠwasĠaĠ", "is"], [0.9, 0.2], [False, True]),
            # once stopped it stays stopped; what comes after the end of the sequence does not count
            (["ĠParis", "Ġis", "<pad>"], [0.1, 0.9, 0.9], [True, True, True]),
            (["ĠParis", "</s>", "Ġis", "Ġis"], [0.9, 0.9, 0.1, 0.1], [False, False, False, False]),
        ],
    )
    def test_stops_where_an_uncertain_word_begins(self, tokenizer, tokens, margins, expected):
        criterion = MarginCriteria(tokenizer, 3)
        ids, scores = _ids(tokens), _scores(margins)
        assert [criterion(ids[:, : 3 + n], scores[:n]).item() for n in range(1, len(tokens) + 1)] == expected

    def test_the_threshold_itself_is_confident(self, tokenizer):
        ids, scores = _ids(["ĠParis"]), _scores([0.5])
        exact = 0.75 - 0.25  # float32 log and exp may miss it by an ulp: ask on both sides
        stops = [MarginCriteria(tokenizer, 3, tau)(ids, scores).item() for tau in (0, exact - 1e-6, exact + 1e-6, 1.1)]
        assert stops == [False, False, True, True]
        certain = _scores([1.0])
        assert [MarginCriteria(tokenizer, 3, tau)(ids, certain).item() for tau in (1.0, 1.1)] == [False, True]

    def test_words_after_max_words_are_not_judged(self, tokenizer):
        ids, scores = _ids(["ĠParis", "Ġis", "Ġis"]), _scores([0.9, 0.9, 0.1])
        stops = [MarginCriteria(tokenizer, 3, max_words=n)(ids, scores).item() for n in (1, 2, 3, None)]
        assert stops == [False, False, True, True]

    def test_confident_ids(self, tokenizer):
        tokens = ["ĠPar", "is", "Ġis", "ĠParis", "."]
        ids = _ids(tokens, tokens, tokens, ["ĠParis", "</s>"])
        scores = _scores([0.9] * 5, [0.9, 0.1, 0.1, 0.9, 0.9], [0.1] * 5, [0.9] * 5)
        criterion = MarginCriteria(tokenizer, 3)
        assert criterion(ids, scores).tolist() == [False, True, True, False]
        # the last word of the first row is not complete
        assert criterion.confident_ids(ids, scores) == [[4, 5, 6], [4, 5], [], [7, EOS]]
        one_word = MarginCriteria(tokenizer, 3, max_words=1)
        assert one_word.confident_ids(ids, scores) == [[4, 5], [4, 5], [], [7]]

    def test_the_word_rule_is_that_of_the_arguments(self, tokenizer):
        ids, scores = _ids(["ĠPar", "is", "is", "<eot>"]), _scores([0.9, 0.1, 0.1, 0.1])
        assert not MarginCriteria(tokenizer, 3)(ids, scores).item()
        assert MarginCriteria(tokenizer, 3, max_word_tokens=2).confident_ids(ids, scores) == [[4, 5]]
        assert MarginCriteria(tokenizer, 3, eos_token_id=16).confident_ids(ids, scores) == [[4, 5, 5]]

    def test_a_batch_gives_each_row_what_it_gives_alone(self, tokenizer):
        rows = [tokens for tokens, _ in STOPS] + GOES_ON
        ids = _ids(*rows)
        torch.manual_seed(0)
        scores = tuple(3 * torch.randn(len(rows), len(TOKENS)) for _ in range(ids.shape[1] - 3))
        before = [step.clone() for step in scores]
        criterion = MarginCriteria(tokenizer, 3)
        together = criterion(ids, scores)
        assert together.dtype == torch.bool
        assert 0 < together.sum() < len(rows)
        alone = [(ids[row : row + 1], tuple(step[row : row + 1] for step in scores)) for row in range(len(rows))]
        assert together.tolist() == [criterion(*row).item() for row in alone]
        assert criterion.confident_ids(ids, scores) == [criterion.confident_ids(*row)[0] for row in alone]
        assert all(torch.equal(step, kept) for step, kept in zip(scores, before, strict=True))

    def test_needs_scores(self, tokenizer):
        with pytest.raises(ValueError, match=r"`scores` must be .*, but is None\. Pass `return_dict_in_generate=True"):
            MarginCriteria(tokenizer, 3)(_ids(["Ġis"]), None)
        with pytest.raises(ValueError, match=r"`prompt_length` must be 3 for 4 ids and 1 `scores`, but is 2\."):
            MarginCriteria(tokenizer, 2)(_ids(["Ġis"]), _scores([0.9]))

    def test_arguments_are_checked(self, tokenizer):
        with pytest.raises(ValueError, match="`margin_threshold` must be a number of at least 0, but is -1"):
            MarginCriteria(tokenizer, 3, -1)
        with pytest.raises(ValueError, match="`max_words` must be an integer of at least 1, but is 0"):
            MarginCriteria(tokenizer, 3, max_words=0)
