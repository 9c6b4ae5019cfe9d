"""The rule by which another member's word replaces the main model's: worked examples, its laws, what it costs, what
`stats` counts.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from support.cases import PROMPTS, Case, random_case
from support.hosts import ensemble, new_ids
from support.reference_methods import decode_by_method
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, toy, word_tokenizer
from transformers import NoRepeatNGramLogitsProcessor

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.strategies.registry import make_strategy
from hf_adafuse.decoding.strategies.strategy import ALONE

WORDS = word_tokenizer(["So", "It", "is", "was", "cold", "warm"])


def anchor(weights=None, **options):
    return AdaFuseConfig(method="anchor", method_options=options, model_weights=weights)


def anchored(case, **options):
    """A case that decodes by this method, with the same way to compare words and the same weights."""
    kept = case.config
    weights, rule = kept.model_weights, {"word_boundary": kept.word_boundary, "max_word_tokens": kept.max_word_tokens}
    case.config = AdaFuseConfig(method="anchor", method_options=options, model_weights=weights, **rule)
    return case


def greedy(case, row):
    """What the main model's own `generate()` writes of a prompt."""
    alone = Case(case.models, case.tokenizers, case.config, [case.prompts[row]], 0)
    _, ids, mask = alone.main_ids()
    made = case.models[0].generate(ids, attention_mask=mask, max_new_tokens=case.max_new_tokens, do_sample=False)
    return made[0, ids.shape[1] :].tolist()


def text_of(output):
    return "".join(committed.text for committed in output.rounds[0]).strip()


def members_of(after_it, *others):
    """Members that say after "It" what is given, and "cold" after any verb, and then end."""
    verbs = {"is": {"cold": 0.9}, "was": {"cold": 0.9}, "cold": {"</s>": 0.9}, "warm": {"</s>": 0.9}}
    return [(toy(WORDS, {"It": row, **verbs}), WORDS) for row in (after_it, *others)]


@pytest.mark.parametrize(
    ("alpha", "beta", "main", "other", "expected"),
    [
        (0.5, 0.5, 0.4, 0.3, "was cold"),  # unsure, and 0.3 > 0.5 x 0.4
        (0.5, 0.5, 0.55, 0.9, "is cold"),  # sure
        (0.5, 0.8, 0.4, 0.3, "is cold"),  # 0.3 < 0.8 x 0.4
        (0.5, 2.0, 0.4, 0.9, "was cold"),  # 0.9 > 2 x 0.4
        (0.5, 2.0, 0.4, 0.7, "is cold"),
        (0.3, 0.5, 0.4, 0.9, "is cold"),  # sure enough
        (1.0, 0.0, 0.8, 0.3, "was cold"),  # of nothing is it sure, and anything else will do
        (0.0, 0.0, 0.3, 0.9, "is cold"),  # it is always sure
    ],
)
def test_a_word_is_replaced_by_the_rule(alpha, beta, main, other, expected):
    members = members_of({"is": main}, {"was": other})
    output = run(members, anchor(alpha=alpha, beta=beta))
    assert text_of(output) == expected
    assert output.stats["overruled"] == int("was" in expected)


def test_of_several_other_words_that_of_the_surest_member_is_taken():
    members = members_of({"is": 0.3}, {"was": 0.4}, {"warm": 0.6}, {"warm": 0.5})
    for weights, expected in [(None, "warm"), ((1.0, 4.0, 1.0, 1.0), "was cold"), ((1.0, 1e-3, 1e-3, 1e-3), "is cold")]:
        assert text_of(run(members, anchor(weights))) == expected
    assert text_of(run([members[0], members[2], members[1]], anchor())) == "warm"


def test_a_word_that_others_would_write_too_stays():
    members = members_of({"is": 0.3}, {"is": 0.9}, {"was": 0.2})
    output = run(members, anchor(beta=0.9))
    assert text_of(output) == "is cold"
    assert (output.stats["words"], output.stats["asked"], output.stats["overruled"]) == (3, 1, 0)


def test_the_end_of_the_text_is_a_word():
    ending, going_on = {"</s>": 0.4}, {"was": 0.9}
    assert text_of(run(members_of(ending, going_on), anchor())) == "was cold"
    assert text_of(run(members_of({"is": 0.4}, {"</s>": 0.9}), anchor())) == ""
    assert text_of(run(members_of(ending, going_on), anchor(alpha=0.3))) == ""


@pytest.mark.parametrize("number", range(100))
def test_more_random_ensembles_equal_the_oracle(number, look_ahead):
    """Beside those of `test_methods_oracle`: others' words win often, and processors of every member act."""
    rng = random.Random(90000 + number)
    case = anchored(
        random_case(90000 + number),
        alpha=rng.choice([0.3, 0.7, 0.95]),
        beta=rng.choice([0.0, 0.3, 1.0, 3.0]),
        num_words=rng.choice([1, 2, 4]),
    )
    look_ahead(number % 3, is_flat=number % 2 == 1)
    has_processors = number % 4 == 0
    output = case.fast(**({"no_repeat_ngram_size": 2} if has_processors else {}))
    got = new_ids(case, output)
    for row, prompt in enumerate(case.main_ids()[0]):
        members = case.ref_members()
        for member in members:
            member.max_length = member.model.config.max_position_embeddings
            member.process = NoRepeatNGramLogitsProcessor(2) if has_processors else None
        expected, spans = decode_by_method(members, case.member_prompts(prompt), case.config, case.max_new_tokens)
        assert got[row] == expected, f"row {row} of {case}"
        assert [one.text for one in output.rounds[row]][:-1] == spans[: len(output.rounds[row])][:-1]


# Vocabularies all of whose tokens have texts of their own.
@pytest.mark.parametrize("other", ["byte_level", "sentencepiece", "characters"])
@pytest.mark.parametrize("main", ["trailing_space", "sentencepiece", "characters"])
@pytest.mark.parametrize(
    "options", [{"alpha": 0.0}, {"alpha": 0.0, "beta": 0.0}, {"alpha": 0.9, "beta": 1e300}], ids=str
)
def test_without_alpha_it_is_the_main_model_exactly(main, other, options):
    models = [tiny_model("llama", main, 1, 4.0), tiny_model("gpt2", other, 2), tiny_model("qwen3", "wordpiece", 0)]
    tokenizers = [TOKENIZERS[name]() for name in (main, other, "wordpiece")]
    case = Case(models, tokenizers, anchor(**options), PROMPTS[:4], 20)
    output = case.fast()
    assert new_ids(case, output) == [greedy(case, row)[: len(got)] for row, got in enumerate(new_ids(case, output))]
    ended = [len(got) < 20 for got in new_ids(case, output)]
    assert all(len(greedy(case, row)) == 20 for row, has_ended in enumerate(ended) if not has_ended)
    assert output.stats["overruled"] == 0 and (output.stats["asked"] == 0) == (options["alpha"] == 0)


def test_without_alpha_the_others_read_nothing_but_the_prompt():
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=16, prompts=PROMPTS[:1])
    case.config = anchor(alpha=0.0)
    main, other = case.fast().stats["members"]
    assert main["forward_passes"] > 1 and other["forward_passes"] == 1
    assert other["tokens_run"] == len(case.main_ids()[0][0])


def test_a_large_beta_asks_and_keeps():
    case = anchored(ensemble("llama/byte_level/0", "gpt2/sentencepiece/1", n=16), alpha=1.0, beta=1e30)
    alone = anchored(ensemble("llama/byte_level/0", n=16))
    output = case.fast()
    assert new_ids(case, output) == new_ids(alone, alone.fast())
    assert output.stats["overruled"] == 0
    assert output.stats["asked"] == output.stats["words"] > 0


def test_words_of_which_the_main_model_is_sure_cost_the_others_nothing():
    """They read them all in one pass, when they are asked again."""
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=40, prompts=PROMPTS[:1])
    case.config = AdaFuseConfig(method="anchor", method_options={"alpha": 0.6}, max_word_tokens=4)
    output = case.fast()
    asked, words = output.stats["asked"], output.stats["words"]
    assert 0 < asked < words
    always = case.config.changed({"alpha": 1.0})
    case.config = always
    assert output.stats["members"][1]["forward_passes"] < case.fast().stats["members"][1]["forward_passes"]


@pytest.mark.parametrize("alpha", [0.3, 0.7])
def test_stats_count_what_the_rounds_show(alpha):
    case = ensemble("llama/byte_level/0", "gpt2/sentencepiece/1", "llama/byte_level/0", n=30, prompts=PROMPTS)
    case.config = AdaFuseConfig(method="anchor", method_options={"alpha": alpha, "beta": 0.3}, max_word_tokens=4)
    output = case.fast()
    words = asked = overruled = 0
    for rounds in output.rounds:
        for committed in rounds:
            number = len(committed.words) + committed.ends
            words += number
            winner = committed.candidates[committed.winner]
            if committed.criterion == ALONE:
                assert winner.nlls[1:] == [None, None] and committed.proposer == 0
                continue
            assert number == 1 and committed.weights == [1 / 3] * 3
            asked += number
            overruled += 0 not in winner.proposers
            assert winner.decided_by == max(candidate.decided_by for candidate in committed.candidates)
    stats = output.stats
    assert (stats["words"], stats["asked"], stats["overruled"]) == (words, asked, overruled)
    assert 0 < overruled <= asked < words


def test_the_trace_says_what_was_compared():
    rounds = run(members_of({"is": 0.4}, {"was": 0.3}), anchor()).rounds[0]
    first = rounds[0]
    assert (first.criterion, first.highest_wins) == ("proposer's probability", True)
    assert [candidate.decided_by for candidate in first.candidates] == [pytest.approx([0.2]), pytest.approx([0.3])]
    assert first.candidates[0].note == "the main model's own word: beta = 0.5 times its probability"
    assert "the highest proposer's probability wins" in str(rounds)


def test_the_members_count_by_their_weights_of_each_prompt():
    """`model_weights="prompt"`: who knows the prompt better overrules more."""
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=20, prompts=PROMPTS[:3])
    shares = {}
    for sharpness in (0.0, 50.0):
        fields = {"model_weights": "prompt", "prompt_sharpness": sharpness, "max_word_tokens": 4}
        case.config = AdaFuseConfig(method="anchor", method_options={"alpha": 1.0, "beta": 1.0}, **fields)
        for row, rounds in enumerate(case.fast().rounds):
            asked = [one for one in rounds if one.criterion != ALONE and len(one.candidates) > 1]
            shares[sharpness, row] = sum(one.proposer != 0 for one in asked) / max(len(asked), 1)
            weights = asked[0].weights
            if sharpness and weights[0] > 0.999:
                assert shares[sharpness, row] == 0
            elif sharpness and weights[0] < 0.001:
                assert shares[sharpness, row] == 1


def test_what_the_main_tokenizer_cannot_write_never_replaces_its_word():
    case = ensemble("llama/wordpiece/0", "gpt2/byte_level/1", n=20, prompts=PROMPTS)
    case.config = AdaFuseConfig(method="anchor", method_options={"alpha": 1.0, "beta": 0.0}, max_word_tokens=4)
    output = case.fast()
    dropped = [one for rounds in output.rounds for committed in rounds for one in committed.candidates if one.dropped]
    assert dropped and all(0 not in one.proposers and one.score == math.inf for one in dropped)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": 1.1}, "alpha"),
        ({"alpha": True}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
        ({"beta": -1}, "beta"),
        ({"beta": math.inf}, "beta"),
        ({"beta": "0.5"}, "beta"),
        ({"num_words": 0}, "num_words"),
        ({"gamma": 1}, "adafuse_config"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, field):
    with pytest.raises(ValueError, match=rf"`{field}` must be .+, but .+\. .+"):
        make_strategy(AdaFuseConfig(method="anchor", method_options=options))


def test_sampling_is_refused():
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=4)
    case.config = AdaFuseConfig(method="anchor", do_sample=True)
    with pytest.raises(ValueError, match="`do_sample` must be False with method 'anchor'"), torch.no_grad():
        case.fast()
