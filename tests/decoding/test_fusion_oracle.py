"""Every rule of fusion and trust equals its oracle, token for token, over random ensembles; and what rules promise."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from support.cases import PROMPTS, Case, random_case
from support.reference_rules import decode_by_rule
from support.tiny import ARCHITECTURES, TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseConfig
from hf_adafuse.config import PRESETS
from hf_adafuse.decoding.scored_spans import ScoredSpan
from hf_adafuse.decoding.strategies.registry import make_strategy
from hf_adafuse.decoding.strategies.word_parts import distinct_log_probs, uncontested_share
from hf_adafuse.decoding.strategies.words import PARTS, WordTrie

RULES = {
    "word": {"method": "words"},
    "word, geometric": {"method": "words", "mean": "geometric"},
    "word, root": {"method": "words", "mean": "root"},
    "horizon": {"horizon": True},
    "length": {"length_exponent": 0.5},
    "horizon, length": {"horizon": True, "length_exponent": 0.0},
    "switch": {"switch_margin": 0.4},
    "word, switch": {"method": "words", "switch_margin": 0.7},
    "gate": {"certainty_gate": 0.8},
    "word, gate": {"method": "words", "certainty_gate": 0.5},
    "prompt": {"model_weights": "prompt", "prompt_sharpness": 4.0},
    "word, prompt": {"method": "words", "model_weights": "prompt", "prompt_sharpness": 10.0},
    "online": {"online_rate": 3.0},
    "word, online, gate, switch": {
        "method": "words", "online_rate": 3.0, "certainty_gate": 0.9, "switch_margin": 0.2,
    },
    "distinct": {"method": "words", "part": "distinct"},
    "distinct, root": {"method": "words", "part": "distinct", "mean": "root"},
    "weighted": {"method": "words", "part": "weighted", "model_weights": "prompt", "prompt_sharpness": 2.0},
    "weighted, root, online": {"method": "words", "part": "weighted", "mean": "root", "online_rate": 1.0},
    "distinct, switch, online": {
        "method": "words", "part": "distinct", "switch_margin": 0.3, "online_rate": 2.0, "mean": "geometric",
    },
}  # fmt: skip


def case_of(number, **rule):
    case = random_case(number)
    fields = {"nll_normalization": "token"} if rule.get("method") == "words" else {}
    case.config = AdaFuseConfig.from_dict(case.config.to_dict() | fields | rule)
    return case


def choose(spans, weights, main_index=None, **settings):
    """What a method, with its settings, says of spans."""
    return make_strategy(AdaFuseConfig.from_dict(settings)).choose(spans, weights, main_index)


def slow(case):
    members = case.ref_members()
    rows = case.main_ids()[0]
    return [decode_by_rule(members, case.member_prompts(row), case.config, case.max_new_tokens) for row in rows]


def assert_equals_the_oracle(case):
    output, width = case.fast(), case.main_ids()[1].shape[1]
    for row, (expected, texts) in enumerate(slow(case)):
        got = output.sequences[row, width : width + len(expected)].tolist()
        assert got == expected, f"row {row} of {case}"
        spans = [committed.text for committed in output.rounds[row]]
        assert spans[:-1] == texts[: len(spans)][:-1]


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_equals_the_oracle(rule, number, look_ahead):
    seed = 20000 + 100 * list(RULES).index(rule) + number
    look_ahead(number % 3, is_flat=number % 2 == 1)
    assert_equals_the_oracle(case_of(seed, **RULES[rule]))


@pytest.mark.parametrize("rule", [{"method": "adafuse"}, {"method": "words"}], ids=str)
def test_an_infinite_switch_margin_is_the_main_model_alone(rule):
    compared = 0
    for number in range(21000, 21008):
        case = case_of(number, switch_margin=math.inf, model_weights=None, exploration="diverse", **rule)
        case.max_new_tokens = 12
        output, width = case.fast(), case.main_ids()[1].shape[1]
        alone = dataclasses.replace(case.config, num_branches=1)
        for row, prompt in enumerate(case.main_ids()[0]):
            expected, texts = decode_by_rule(case.ref_members()[:1], [prompt], alone, 12)
            if "" in texts[:-1]:
                continue  # a special token that carries no text: it cannot be a candidate beside others
            assert output.sequences[row, width : width + len(expected)].tolist() == expected
            compared += 1
    assert compared >= 12


def test_a_gate_of_a_certain_main_model_saves_the_others_passes():
    passes = {}
    for gate in (None, 0.3):
        case = case_of(13, certainty_gate=gate)
        case.prompts, case.max_new_tokens = case.prompts[:1], 30
        passes[gate] = [member["forward_passes"] for member in case.fast().stats["members"]]
    assert sum(passes[0.3]) < sum(passes[None])


@pytest.mark.slow
def test_weights_far_apart_are_one_member():
    rng = random.Random(1)
    for number in range(22000, 22006):
        case = case_of(number, method="words", commitment="adaptive", exploration="diverse")
        count = len(case.models)
        heavy = rng.randrange(count)
        weights = [1e-12] * count
        weights[heavy] = 1.0
        case.config = dataclasses.replace(case.config, model_weights=weights, num_branches=1)
        assert_equals_the_oracle(case)


DISTINCT = {"method": "words", "part": "distinct"}


@pytest.mark.parametrize("number", [65001, 65002, 65003, 65005, 65006, 65007])
def test_words_judged_by_what_sets_them_apart_equal_the_oracle(number):
    case = case_of(number, **DISTINCT)
    assert_equals_the_oracle(case)
    whole = case_of(number, method="words")
    assert case.fast().sequences.tolist() != whole.fast().sequences.tolist(), "choose another case"


WEIGHTED = {
    "prompt": ({"model_weights": "prompt", "prompt_sharpness": 2.0}, [66042, 66059, 66079, 66115, 66129]),
    "root": ({"mean": "root", "online_rate": 1.0}, [66631, 66658, 66666]),
    "fixed": ({"model_weights": None, "online_rate": 1.0}, [66938, 67002]),
}


@pytest.mark.parametrize(("rule", "number"), [(rule, number) for rule in WEIGHTED for number in WEIGHTED[rule][1]])
def test_words_judged_as_the_weights_are_spread_equal_the_oracle(rule, number):
    texts = []
    for part in ("weighted", "whole", "distinct"):
        case = case_of(number, method="words", part=part, **WEIGHTED[rule][0])
        texts.append(case.fast().sequences.tolist())
        if part == "weighted":
            assert_equals_the_oracle(case)
    assert texts[0] not in texts[1:], "choose another case"


@pytest.mark.slow
def test_one_member_that_judges_words_by_what_sets_them_apart_is_greedy():
    """Also beside others that do not count, whatever they propose. Not where words are cut: what a round cuts is joined
    to what comes next, and judged as another word."""
    compared = [0, 0]
    rule = {"commitment": "adaptive", "exploration": "diverse", "max_word_tokens": 32}
    for number in [*range(40000, 40400, 8), *range(70000, 70030)]:
        count = len(case_of(number).models)
        weights = [1.0] + [1e-12] * (count - 1)
        alone = case_of(number, **rule, num_branches=1, model_weights=None, switch_margin=math.inf).fast()
        if "\ufffd" not in "".join(one.text for row in alone.rounds for one in row):
            fast = case_of(number, **DISTINCT, **rule, model_weights=weights).fast()
            assert fast.sequences.tolist() == alone.sequences.tolist(), number
            compared[count > 1] += 1
    assert min(compared) >= 10


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([[(1, 0.5), (2, 0.4)]], [0.5 * 0.4]),  # alone
        ([[(1, 0.5), (2, 0.4)], [(4, 0.2)]], [0.5, 0.2]),
        ([[(1, 0.5), (2, 0.4), (3, 0.1)], [(1, 0.5), (2, 0.4), (4, 0.3)]], [0.5 * 0.4 * 0.1, 0.5 * 0.4 * 0.3]),
        # A near copy of the best word costs it nothing.
        ([[(1, 0.5), (2, 0.5), (3, 0.6)], [(1, 0.5), (2, 0.5), (4, 0.1)], [(5, 0.3)]], [0.5, 0.5 / 6, 0.3]),
        # One goes on where another ends.
        ([[(5, 0.9)], [(5, 0.9), (6, 0.95)]], [0.9 * 0.05, 0.9 * 0.95]),
        ([[(5, 0.9)], [(5, 0.9), (6, 0.2)], [(5, 0.9), (7, 0.3)]], [0.9 * 0.5, 0.9 * 0.2, 0.9 * 0.3]),
        ([[(5, 0.9)], [(5, 0.9), (6, 0.2)], [(7, 0.1)]], [0.9, 0.9 / 4, 0.1]),
        ([[(5, 0.9)], [(5, 0.9), (6, 1.0)]], [0.9 * 1e-6, 0.9]),
        ([[(1, 0.5)], [(1, 0.5)], [], [(3, 0.2)]], [0.5, 0.5, 0.3, 0.2]),
        ([[(-1, 0.5)], [(1, 0.2)]], [0.5, 0.2]),
    ],
)
def test_a_word_is_judged_by_what_sets_it_apart(words, expected):
    tokens = [[token for token, _ in word] for word in words]
    found = distinct_log_probs(tokens, [[math.log(value) for _, value in word] for word in words])
    assert [math.exp(value) for value in found] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "share"),
    [([3.0], 0), ([1.0, 1.0], 1), ([5.0, 0.0], 0), ([3.0, 1.0], 0.6), ([1.0, 1.0, 0.0], 0.5), ([2.0, 2.0, 2.0], 1)],
)
def test_the_rest_of_a_word_counts_as_far_as_members_share_the_weight(weights, share):
    assert uncontested_share(weights) == pytest.approx(share)
    spans = [
        ScoredSpan((text,), log_probs, [1], tokens=tokens)
        for text, log_probs, tokens in [
            ("short", [[[-2.0]]] * len(weights), [[[1]]] * len(weights)),
            ("long", [[[-1.0, -1.6]]] * len(weights), [[[2, 3]]] * len(weights)),
        ]
    ]
    assert choose(spans, weights, method="words", part="weighted").winner == int(share * 1.6 < 1)


@pytest.mark.parametrize("number", range(10))
def test_copies_of_one_model_write_its_greedy_text_however_they_branch(number):
    """By whole words a branch may be likelier than the greedy word: nobody's own word is that."""
    rng = random.Random(number)
    name = rng.choice(list(TOKENIZERS))
    model, tokenizer, count = tiny_model(rng.choice(ARCHITECTURES), name, number), TOKENIZERS[name](), 1 + number % 4
    preset = PRESETS["robust"] | {"part": rng.choice(PARTS), "mean": rng.choice(["arithmetic", "root", "geometric"])}
    preset |= {"num_branches": rng.choice([2, 3, 5]), "max_words": rng.choice([1, 3]), "margin_threshold": 2.0}
    case = Case([model] * count, [tokenizer] * count, AdaFuseConfig.from_dict(preset), PROMPTS[:1], 20)
    ids, mask = case.main_ids()[1:]
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert case.fast().sequences.tolist() == greedy.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_a_member_that_counts_twenty_times_as_much_writes_its_greedy_text(number):
    """A word that ends would else be likelier than each single token by which others go on with it."""
    rng = random.Random(number)
    names = rng.sample(list(TOKENIZERS), 2)
    models = [tiny_model(rng.choice(ARCHITECTURES), name, number, peak=rng.choice([2.0, 4.0])) for name in names]
    preset = PRESETS["robust"] | {"part": rng.choice(PARTS), "model_weights": [1.0, 0.049], "online_rate": 0.0}
    preset |= {"num_branches": rng.choice([2, 3, 5]), "max_words": rng.choice([1, 3]), "margin_threshold": 2.0}
    del preset["prompt_sharpness"]
    case = Case(models, [TOKENIZERS[name]() for name in names], AdaFuseConfig.from_dict(preset), PROMPTS[:1], 20)
    ids, mask = case.main_ids()[1:]
    greedy = models[0].generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert case.fast().sequences.tolist() == greedy.tolist()


@pytest.mark.parametrize(
    ("spans", "weights", "winner"),
    [
        # By the mean probability " Nile" wins.
        ({" The": (0, 1), " Nile": ()}, [1.0, 2.0], 0),
        ({" The": (0,), " Nile": (1,)}, [1.0, 2.0], 1),
        ({" The": (0,), " Nile": ()}, [1.0, 2.0], 0),  # the other member proposes nothing that is possible
        ({" The": (), " Nile": ()}, [1.0, 2.0], 1),
        ({" The": (0, 1), " Nile": (1,)}, [1.0, 2.0], 1),  # no single word
        ({" The": (0,), " Nile": (1,)}, [1.0, 0.05], 1),
        ({" The": (0,), " Nile": (1,)}, [1.0, 0.0499], 0),  # the other member hardly counts
        ({" The": (1,), " Nile": (0,)}, [0.0499, 1.0], 0),
        ({" The": (), " Nile": (1,)}, [1.0, 0.0499], 1),  # nothing possible of the member that counts
    ],
)
def test_a_word_that_all_members_write_greedily_is_taken(spans, weights, winner):
    values = {" The": 0.3, " Nile": 0.6}
    candidates = [
        ScoredSpan((text,), [[[math.log(values[text])]]] * 2, [1], first_choice_of=members)
        for text, members in spans.items()
    ]
    choice = choose(candidates, weights, method="words")
    assert choice.winner == winner
    is_agreed = winner == 0
    assert choice.notes == ({1: "every member that counts writes another word"} if is_agreed else {})
    assert [len(one) for one in choice.decided_by] == ([1, 0] if is_agreed else [1, 1])


def test_a_word_in_pieces_does_not_lose_for_them():
    """One member is for a compound of three tokens, to the other it is one token: as likely as the short word's."""
    compound = ([[[math.log(0.6), math.log(0.3), math.log(0.4)]], [[math.log(0.3)]]], [[[5, 6, 7]], [[8]]])
    short = ([[[math.log(0.2)]], [[math.log(0.3)]]], [[[9]], [[3]]])
    spans = [
        ScoredSpan((text,), log_probs, [9], tokens=tokens)
        for text, (log_probs, tokens) in {" in": short, " Kinderkrankenschule": compound}.items()
    ]
    assert choose(spans, [1.0, 1.0], **DISTINCT).winner == 1
    whole = choose(spans, [1.0, 1.0], method="words")
    assert whole.winner == 0
    assert choose(spans, [1.0, 1.0], **DISTINCT).scores == whole.scores


def proposal(words, proposers):
    """By these members; each word is as likely to all, the longer the span the likelier its words."""
    return ScoredSpan(tuple(words), [[[-1.0 / len(words)] for _ in words]] * 3, [1] * len(words), proposers)


@pytest.mark.parametrize(
    ("weights", "spans", "winner"),
    [
        # Who goes on counts less than who ends there: what comes next is not theirs alone to say.
        ([3.0, 1.0, 0.0], [((" The",), (0,)), ((" The", " boss"), (1,))], 0),
        ([1.0, 3.0, 0.0], [((" The",), (0,)), ((" The", " boss"), (1,))], 1),
        ([1.0, 1.0, 0.0], [((" The",), (0,)), ((" The", " boss"), (1,))], 1),  # as much
        ([1.0, 1.0, 1.0], [((" The",), (0, 2)), ((" The", " boss"), (1,))], 0),  # two against one
        ([1.0, 1.0, 1.0], [((" The",), (0,)), ((" The", " boss"), (1,)), ((" The", " man"), (2,))], 1),
        # A member of which one proposal ends there and one goes on has a say in both.
        ([3.0, 1.0, 0.0], [((" The",), (0,)), ((" The", " boss"), (0,)), ((" The", " man"), (1,))], 1),
        ([3.0, 1.0, 0.0], [((" A",), (0,)), ((" The", " boss"), (1,))], 1),  # none ends there
        ([3.0, 1.0, 0.0], [((" The",), (0,)), ((" The", ""), (1,))], 0),  # to end the text is to go on
    ],
)
def test_a_round_ends_where_more_members_end_their_spans_than_go_on(weights, spans, winner):
    spans = [proposal(*one) for one in spans]
    assert choose(spans, weights, method="words").winner == winner


ROBUST = {
    "method": "words",
    "mean": "root",
    "part": "weighted",
    "model_weights": "examples",
    "online_rate": 1.0,
}
EVEN = {"method": "words", "model_weights": None}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "number"), [(ROBUST, 71449), (ROBUST, 71814), (EVEN, 71034), (EVEN, 71119)], ids=str)
def test_rounds_that_end_there_equal_the_oracle(rule, number, monkeypatch):
    case = case_of(number, **rule)
    assert_equals_the_oracle(case)
    expected = case.fast().sequences.tolist()
    monkeypatch.setattr(WordTrie, "_weight", lambda self, candidates: 0.0)
    assert case.fast().sequences.tolist() != expected, "choose another case"


def test_a_token_without_text_before_the_end_belongs_to_it():
    """A special token, proposed by one of four members."""
    case = case_of(910231, method="words")
    case.max_new_tokens = 24
    assert_equals_the_oracle(case)


# In which one member alone would have begun with nothing, by the rule.
SILENT = {
    60000: ({}, [7, 18, 42, 43, 59]),
    61000: ({"mean": "root"}, [22, 33, 43, 47, 51]),
    62000: ({"certainty_gate": 0.5}, [77]),
    63000: ({"switch_margin": 0.3}, [31, 43, 70, 71, 115]),
    64000: ({"online_rate": 2.0, "model_weights": None}, [11, 15, 18, 22, 23]),
    67000: ({"part": "distinct", "mean": "root"}, [19, 59, 103, 109]),
    68000: ({"part": "distinct", "switch_margin": 0.3}, [83, 87, 95]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "rule"),
    [(first + number, rule) for first, (rule, numbers) in SILENT.items() for number in numbers],
)
def test_a_text_that_would_be_empty_equals_the_oracle(number, rule, look_ahead):
    look_ahead(number % 3, is_flat=number % 2 == 1)
    case = case_of(number, method="words", allow_blank=False, **rule)
    assert_equals_the_oracle(case)
    as_any_word = case_of(number, method="words", allow_blank=True, **rule)
    assert case.fast().sequences.tolist() != as_any_word.fast().sequences.tolist(), "choose another case"


FEW_SHOT = ["A: a big cat\nthe tree\n", "Q: cat\nA: it was\nQ: tree\n", "Once\nA: upon a time in\nA: there\nB: red\n"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(36))
def test_trust_by_examples_equals_the_oracle(number, look_ahead):
    """Prompts with and without examples in one batch; half of them by all that the robust settings have."""
    weights = "examples" if number < 24 else "examples_or_content"
    rule = {"model_weights": weights, "prompt_sharpness": 6.0}
    words = {"method": "words", "mean": "root", "part": "weighted", "online_rate": 1.0, "allow_blank": False}
    mean = words if number % 2 else {}
    case, rng = case_of(30000 + number, **rule, **mean), random.Random(number)
    ending = rng.choice(["A:", "A:", "Q: She\nA:", "A:\n", "the"])
    case.prompts = [rng.choice(FEW_SHOT) + ending for _ in case.prompts]
    look_ahead(number % 3, is_flat=number % 2 == 1)
    assert_equals_the_oracle(case)


def test_a_line_break_does_not_lose_for_the_words_that_may_follow_it():
    """A member ends the line at 0.6, and has no idea what comes next; a comma has 0.3."""
    units = make_strategy(AdaFuseConfig(method="words")).units
    assert units([" Lima", "\n\nThe", " \n", " on"]) == [" Lima", "\n\n", "The", " \n", " on"]
    assert make_strategy(AdaFuseConfig()).units(["\nThe"]) == ["\nThe"]
    ends_line = ScoredSpan(("\n", "The"), [[[math.log(0.6)], [math.log(0.1)]]], [1, 3])
    comma = ScoredSpan((",",), [[[math.log(0.3)]]], [1])
    assert choose([comma, ends_line], [1.0], method="words").winner == 1


def first_words(**log_probs):
    """Candidates of one word each with which a text begins: probabilities under each member."""
    words = {"end": "", "break_": "\n", "lima": " Lima"}
    return [
        ScoredSpan((words[name],), [[[math.log(value)]] for value in values], [1], is_first=True)
        for name, values in log_probs.items()
    ]


def test_who_objects_to_saying_nothing_judges_words_as_the_rule_does():
    """The second member likes the first token of a word better than the end, and the whole word less."""
    word = [[[math.log(0.1), math.log(0.1)]], [[math.log(0.4), math.log(0.4)]]]
    spans = [
        ScoredSpan((text,), log_probs, [1], tokens=tokens, is_first=True)
        for text, log_probs, tokens in [
            ("", [[[math.log(0.9)]], [[math.log(0.3)]]], [[[-1]], [[-1]]]),
            (" Lima", word, [[[5, 6]], [[7, 8]]]),
        ]
    ]
    settings = {"method": "words", "allow_blank": False}
    assert choose(spans, [1.0, 1.0], **settings).winner == 0
    assert choose(spans, [1.0, 1.0], **settings, part="distinct").winner == 1


@pytest.mark.parametrize(
    ("weights", "spans", "settings", "winner"),
    [
        ([1.0, 1.0], {"end": (0.9, 0.1), "lima": (0.01, 0.2)}, {}, 1),  # one member's habit
        ([1.0, 1.0], {"end": (0.9, 0.3), "lima": (0.01, 0.2)}, {}, 0),  # both would end
        ([1.0, 1.0], {"lima": (0.01, 0.2), "end": (0.9, 0.1), "break_": (0.02, 0.3)}, {}, 1),  # nothing, either way
        ([1.0, 0.4], {"end": (0.9, 0.1), "lima": (0.01, 0.2)}, {}, 0),  # who does not count does not object
        ([1.0, 0.5], {"break_": (0.9, 0.1), "lima": (0.01, 0.2)}, {}, 1),
        ([1.0, 1.0], {"end": (0.9, 0.1), "lima": (0.01, 0.2)}, {"switch_margin": 0.1}, 0),  # the main model's own
    ],
)
def test_one_member_alone_does_not_begin_with_nothing(weights, spans, settings, winner):
    rule = {"method": "words", "allow_blank": False, **settings}
    assert choose(first_words(**spans), weights, 0, **rule).winner == winner
    later = [dataclasses.replace(span, is_first=False) for span in first_words(**spans)]
    shares = [sum(w * p for w, p in zip(weights, values, strict=True)) for values in spans.values()]
    assert choose(later, weights, **rule).winner == shares.index(max(shares))
    assert choose(first_words(**spans), weights, **rule | {"allow_blank": True}).winner == shares.index(max(shares))


@pytest.mark.parametrize(("margin", "winner"), [(0.0, 1), (0.05, 1), (0.5, 0)])
def test_a_trace_says_why_the_lowest_score_does_not_win(margin, winner):
    """Mean NLLs of 0.75 and 0.5: a difference of 0.25."""
    spans = [
        ScoredSpan((" Lima",), [[[-0.5]], [[-1.0]]], [5], (0,)),
        ScoredSpan((" Oslo",), [[[-0.5]], [[-0.5]]], [5], (1,)),
    ]
    choice = choose(spans, [0.5, 0.5], 0, method="adafuse", switch_margin=margin)
    assert choice.winner == winner and choice.scores == pytest.approx([0.75, 0.5])
    assert list(choice.notes) == ([] if winner else [1])
