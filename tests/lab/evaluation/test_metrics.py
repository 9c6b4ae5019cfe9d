"""Metrics of one answer, on cases worked out by hand."""

import pytest

from hf_adafuse.cli.questions import answers_of
from hf_adafuse.lab.evaluation.metrics import METRICS


@pytest.mark.parametrize(
    ("metric", "text", "answers", "value"),
    [
        ("exact_match", " The Beatles. ", ["beatles"], 1),
        ("exact_match", "Beatles and Stones", ["beatles", "Stones"], 0),
        ("exact_match", "", ["A"], 0),  # where an answer is nothing but an article, that is the answer
        ("exact_match", "a.", ["A"], 1),
        ("exact_match", "the", ["A"], 0),
        ("exact_match", "", ["-"], 0),
        ("f1", "", ["A"], 0),
        ("f1", "answer A", ["A"], 2 / 3),
        ("f1", "the red big house", ["a red house"], 0.8),
        ("f1", "cat", ["dog", "cat"], 1),
        ("f1", "", ["dog"], 0),
        ("contains", "It was Paris, France", ["paris"], 1),
        ("contains", "Parisian", ["paris"], 0),
        ("contains", "anything", [""], 0),
        ("contains", "The answer is A.", ["A"], 1),  # an option, which is no article
        ("contains", "It is a dog.", ["A"], 0),
        ("contains", "It is (B).", ["b"], 1),
        ("last_number", "3 + 4 = 7.0 dollars", ["#### 7"], 1),
        ("last_number", "about 1,000 or 1,234.50.", ["1234.5"], 1),
        ("last_number", "-3", ["3"], 0),
        ("last_number", "none", ["3"], 0),
        ("last_number", "It fell by -$5", ["-5"], 1),
        ("last_number", "It is \u22125", ["-5"], 1),
        ("last_number", "costs $1,000", ["1000"], 1),
        ("last_number", "pages 5\u201310", ["10"], 1),
        ("chrf", "a", [], 0),
        ("bleu", "a", [], 0),
        ("marked_number", "5 apples #### 12\n13", ["#### 12"], 1),
        ("marked_number", "12", ["#### 12"], 0),
    ],
)
def test_metric(metric, text, answers, value):
    assert METRICS[metric](text, answers) == pytest.approx(value)


def test_sacrebleu_metrics():
    assert METRICS["chrf"]("the same words", ["the same words"]) == pytest.approx(100)
    assert METRICS["bleu"]("the same four words here", ["the same four words here"]) == pytest.approx(100)
    assert METRICS["chrf"]("xyz", ["the same words"]) < 10


def test_one_answer_or_many():
    assert answers_of("a") == ["a"]
    assert answers_of(["a", 1]) == ["a", "1"]
    assert answers_of([72.0, 0.5, 1e3]) == ["72", "0.5", "1000"]  # tables write whole numbers so


@pytest.mark.parametrize("value", [None, [None], {"text": "a"}, float("nan"), [["a"]]], ids=str)
def test_what_is_no_answer(value):
    with pytest.raises(ValueError, match="An answer must be a text or a number, but is"):
        answers_of(value)
