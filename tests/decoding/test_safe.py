"""SAFE: the main model drafts, the others verify, tokens are fused where that is needed. The oracle, worked examples,
laws, what it costs, what `stats` counts.
"""

from __future__ import annotations

import copy
import math
import random
import warnings

import pytest
import torch
from support.cases import PROMPTS, Case, counts, random_case
from support.hosts import ensemble, new_ids
from support.reference_safe import decode_by_safe
from support.tiny import TOKENIZERS, eos_ids, tiny_model
from support.toys import run, toy, word_tokenizer
from test_full_contexts import tight_case
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import NoRepeatNGramLogitsProcessor, PreTrainedTokenizerFast

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.strategies.registry import make_strategy
from hf_adafuse.decoding.strategies.safe import DRAFTED
from hf_adafuse.trees.pass_policy import Policy


def safe(weights=None, max_word_tokens=32, **options):
    return AdaFuseConfig(method="safe", method_options=options, model_weights=weights, max_word_tokens=max_word_tokens)


def random_options(rng):
    """As of the method; a fusion of each kind, and thresholds at which much is fused."""
    gac = rng.random() < 0.3
    return {
        "num_tokens": rng.choice([1, 2, 3, 5, 8]),
        "acceptance_threshold": rng.choice([0.5, 0.5, 0.2, 0.9, 1.0]),
        "ensemble": "gac" if gac else "unite",
        "sharpening": rng.choice(["prefix", "prefix", "geometric", "none"]),
        "sharpening_threshold": rng.choice([0.1, 0.0, 0.02, 0.3]),
        **({"threshold": rng.choice([None, 0.4])} if gac else {"top_k": rng.choice([None, 1, 4, 30])}),
    }


def like(model, seed, noise=0.1):
    """A model that often agrees with another one, as random ones never do."""
    made = copy.deepcopy(model)
    weight = made.get_output_embeddings().weight
    numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    made.get_output_embeddings().weight = torch.nn.Parameter(weight.detach() + noise * weight.std() * numbers)
    return made


@pytest.mark.parametrize("number", range(160))
def test_random_ensembles_equal_the_oracle(number, look_ahead):
    """Token for token, alone and in batches; every fourth with logits processors on all members."""
    rng = random.Random(95000 + number)
    case = random_case(95000 + number)
    if number % 3 == 1:
        case.models[-1], case.tokenizers[-1] = like(case.models[0], number), case.tokenizers[0]
    case.config = safe(case.config.model_weights, case.config.max_word_tokens, **random_options(rng))
    look_ahead(number % 3, is_flat=number % 2 == 1)
    has_processors = number % 4 == 0
    output = case.fast(**({"no_repeat_ngram_size": 2} if has_processors else {}))
    got, totals = new_ids(case, output), [0, 0, 0]
    for row, prompt in enumerate(case.main_ids()[0]):
        members = case.ref_members()
        for member in members:
            member.process = NoRepeatNGramLogitsProcessor(2) if has_processors else None
        expected, found = decode_by_safe(members, case.member_prompts(prompt), case.config, case.max_new_tokens)
        assert got[row] == expected, f"row {row} of {case}"
        text = "".join(committed.text for committed in output.rounds[row])
        ids = expected[:-1] if expected[-1] in members[0].eos else expected
        assert "\ufffd" in text or text == members[0].text(ids)
        totals = [one + other for one, other in zip(totals, found, strict=True)]
    assert [output.stats[name] for name in ("fused", "sharpened", "replaced")] == totals


@pytest.mark.parametrize("number", range(20))
def test_a_full_context_ends_the_text_as_in_the_oracle(number):
    """Drafts are shortened where a verifier's context holds no more."""
    case, members = tight_case(number)
    case.config = safe(case.config.model_weights, case.config.max_word_tokens, num_tokens=1 + number % 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = new_ids(case, case.fast())
    for row, prompt in enumerate(case.main_ids()[0]):
        expected = decode_by_safe(members, case.member_prompts(prompt), case.config, case.max_new_tokens)[0]
        assert got[row] == expected, f"row {row} of {case}"


WORDS = word_tokenizer(["So", "It", "is", "was", "cold", "warm"])


def text_of(output):
    return "".join(committed.text for committed in output.rounds[0]).strip()


def counted(output):
    return tuple(output.stats[name] for name in ("tokens", "fused", "sharpened", "replaced"))


def members_of(after_it, *others):
    """Members that say after "It" what is given, and "cold" after any verb, and then end."""
    verbs = {"is": {"cold": 0.9}, "was": {"cold": 0.9}, "cold": {"</s>": 0.9}, "warm": {"</s>": 0.9}}
    return [(toy(WORDS, {"It": row, **verbs}), WORDS) for row in (after_it, *others)]


@pytest.mark.parametrize(
    ("main", "other", "options", "expected", "fused", "sharpened"),
    [
        ({"is": 0.6, "was": 0.2}, {"is": 0.3, "was": 0.6}, {}, "is cold", 1, 1),  # 0.45 against 0.4
        ({"is": 0.5, "was": 0.2}, {"is": 0.2, "was": 0.7}, {}, "was cold", 1, 1),  # 0.35 against 0.45
        ({"is": 0.5, "was": 0.3}, {"is": 0.1, "was": 0.8}, {}, "was cold", 1, 0),  # 0.3 against 0.55
        ({"is": 0.4, "was": 0.3}, {"is": 0.45, "was": 0.3}, {}, "is cold", 0, 0),  # the verifier would say it too
        ({"is": 0.8, "was": 0.1}, {"is": 0.3, "was": 0.6}, {}, "is cold", 0, 0),  # a mean of 0.55
        ({"is": 0.8, "was": 0.1}, {"is": 0.3, "was": 0.6}, {"acceptance_threshold": 0.6}, "is cold", 1, 0),
        ({"is": 0.5, "was": 0.2}, {"is": 0.2, "was": 0.7}, {"acceptance_threshold": 0.3}, "is cold", 0, 0),
        ({"is": 0.5, "was": 0.2}, {"is": 0.2, "was": 0.7}, {"sharpening": "none"}, "was cold", 1, 0),
        # The geometric mean takes what no member finds unlikely: 0.25 against 0.24 and 0.2.
        ({"is": 0.6, "was": 0.1, "warm": 0.25}, {"is": 0.07, "was": 0.6, "warm": 0.25}, {}, "was cold", 1, 1),
        (
            {"is": 0.6, "was": 0.1, "warm": 0.25},
            {"is": 0.07, "was": 0.6, "warm": 0.25},
            {"sharpening": "geometric"},
            "warm",
            1,
            1,
        ),
        ({"is": 0.45, "was": 0.3}, {"was": 0.7}, {"ensemble": "gac", "threshold": 0.4}, "is cold", 0, 0),
        ({"is": 0.35, "was": 0.3}, {"was": 0.7}, {"ensemble": "gac", "threshold": 0.4}, "was cold", 1, 0),
        ({"</s>": 0.5, "was": 0.3}, {"</s>": 0.1, "was": 0.8}, {}, "was cold", 1, 0),
        ({"is": 0.5, "</s>": 0.3}, {"is": 0.1, "</s>": 0.8}, {}, "", 1, 0),
    ],
)
def test_a_token_is_fused_by_the_rule(main, other, options, expected, fused, sharpened):
    output = run(members_of(main, other), safe(**options))
    assert text_of(output) == expected
    own = max(main, key=main.get)
    replaced = int(fused and not expected.startswith(own if own != "</s>" else "nothing") and expected != own)
    assert counted(output) == (len(expected.split()) + 1, fused, sharpened, replaced)


def test_all_verifiers_must_agree_and_members_count_by_weight():
    members = members_of({"is": 0.4, "was": 0.3}, {"is": 0.45}, {"was": 0.9})
    assert counted(run(members, safe()))[1] == 1
    assert text_of(run(members, safe())) == "was cold"
    assert counted(run(members[:2], safe()))[1] == 0
    assert text_of(run(members, safe((3.0, 3.0, 1.0)))) == "is cold"


def piece_tokenizer(pieces):
    """A tokenizer of these pieces (`"▁"` for a space), the fewest for a text; letters for what they do not write."""
    letters = sorted({letter for piece in pieces for letter in piece} - set(pieces))
    vocab = [("<unk>", -99.0), ("</s>", -99.0), *((piece, -1.0) for piece in pieces), *((one, -9.0) for one in letters)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


def piece_toy(tokenizer, probabilities):
    """As `toy`, by the names of the tokens."""
    made, token = toy(tokenizer, {}), tokenizer.convert_tokens_to_ids
    table = torch.full((len(tokenizer),) * 2, 1 / len(tokenizer))
    for last, row in probabilities.items():
        table[token(last)] = (1 - sum(row.values())) / (len(tokenizer) - len(row))
        for piece, probability in row.items():
            table[token(last), token(piece)] = probability
    made.table.data = table.log()
    return made


def test_no_token_is_fused_where_a_verifier_has_no_boundary():
    """The paper's example: "Incorrect" is two tokens of the drafter and one of the verifier."""
    halves, whole = (
        piece_tokenizer(["▁So", "▁It", "▁In", "correct", "▁Correct"]),
        piece_tokenizer(["▁So", "▁It", "▁Incorrect", "▁Correct"]),
    )
    end = {"correct": {"</s>": 0.9}, "▁Correct": {"</s>": 0.9}, "▁Incorrect": {"</s>": 0.9}}
    main = piece_toy(halves, {"▁It": {"▁In": 0.4, "▁Correct": 0.3}, "▁In": {"correct": 0.3, "</s>": 0.2}} | end)
    # The verifier would write the same word: inside it nobody asks for more, however unsure the drafter is there.
    agreeing = piece_toy(whole, {"▁It": {"▁Incorrect": 0.5}} | end)
    output = run([(main, halves), (agreeing, whole)], safe(num_tokens=3))
    assert text_of(output) == "Incorrect" and counted(output) == (3, 0, 0, 0)
    # It would write another one: fused before the word, where both have a boundary.
    other = piece_toy(whole, {"▁It": {"▁Correct": 0.85, "▁Incorrect": 0.1}} | end)
    output = run([(main, halves), (other, whole)], safe(num_tokens=3))
    assert text_of(output) == "Correct" and counted(output) == (2, 1, 0, 1)
    # Too short a draft looks to the verifier like another word.
    assert counted(run([(main, halves), (agreeing, whole)], safe(num_tokens=1)))[1] == 1


def test_a_smooth_distribution_is_sharpened_by_what_begins_alike():
    """0.3 for "Rome", but 0.25 + 0.2 for the main model's "Par" and the verifier's "Paris"."""
    main_pieces, other_pieces = ["▁So", "▁It", "▁Par", "is", "▁Rome"], ["▁So", "▁It", "▁Par", "▁Paris", "▁Rome"]
    mains, others = piece_tokenizer(main_pieces), piece_tokenizer(other_pieces)
    end = {"is": {"</s>": 0.9}, "▁Rome": {"</s>": 0.9}, "▁Paris": {"</s>": 0.9}, "▁Par": {"is": 0.9}}
    main = piece_toy(mains, {"▁It": {"▁Rome": 0.5, "▁Par": 0.45}} | end)
    other = piece_toy(others, {"▁It": {"▁Rome": 0.2, "▁Par": 0.1, "▁Paris": 0.65}} | {**end, "▁Par": {"</s>": 0.5}})
    members = [(main, mains), (other, others)]
    for options, expected in [
        ({}, "Paris"),
        ({"sharpening": "none"}, "Rome"),
        ({"sharpening_threshold": 0.9}, "Rome"),  # of no token more than that
    ]:
        output = run(members, safe(ensemble="gac", **options))
        assert text_of(output) == expected
    first = run(members, safe(ensemble="gac")).rounds[0][0]
    assert (first.criterion, first.highest_wins) == ("sharpened fused probability", True)
    best = first.candidates[first.winner]
    assert best.text == " Par" and best.decided_by == [pytest.approx((0.45 + 0.1 + 0.65) / 2, abs=0.02)]


# Vocabularies with one end of the text, all of whose tokens have texts of their own.
DISTINCT = ("trailing_space", "sentencepiece", "characters")


def greedy(case, row):
    """What the main model's own `generate()` writes of a prompt."""
    alone = Case(case.models, case.tokenizers, case.config, [case.prompts[row]], 0)
    _, ids, mask = alone.main_ids()
    made = case.models[0].generate(ids, attention_mask=mask, max_new_tokens=case.max_new_tokens, do_sample=False)
    return made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("other", ["byte_level", "sentencepiece", "wordpiece"])
@pytest.mark.parametrize("main", DISTINCT)
def test_a_draft_that_is_always_kept_is_the_main_model_alone(main, other):
    """`acceptance_threshold=0`: the verifiers read nothing but the prompts."""
    models = [tiny_model("llama", main, 1, 4.0), tiny_model("gpt2", other, 2)]
    case = Case(models, [TOKENIZERS[main](), TOKENIZERS[other]()], safe(acceptance_threshold=0), PROMPTS[:3], 20)
    output = case.fast()
    for row, got in enumerate(new_ids(case, output)):
        own = greedy(case, row)
        assert got == own[: len(got)] and (len(got) == 20 or got[-1] == case.tokenizers[0].eos_token_id)
    assert output.stats["fused"] == 0 and output.stats["members"][1]["forward_passes"] == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_member_and_copies_of_it_fuse_nothing(count):
    case = ensemble(*["llama/sentencepiece/1"] * count, n=24, prompts=PROMPTS[:3])
    for options in ({}, {"acceptance_threshold": 1.0, "num_tokens": 3}):
        case.config = safe(**options)
        output = case.fast()
        for row, got in enumerate(new_ids(case, output)):
            assert got == greedy(case, row)[: len(got)] and len(got) > 4
        assert output.stats["fused"] == 0
        assert all(one.criterion == DRAFTED for rounds in output.rounds for one in rounds)


@pytest.mark.slow
@pytest.mark.parametrize("number_of_tokens", [1, 2, 5])
@pytest.mark.parametrize("method", ["unite", "gac"])
@pytest.mark.parametrize("name", DISTINCT)
def test_with_one_tokenizer_it_is_the_other_method(name, method, number_of_tokens):
    """The paper's theorem 1: what is not fused is what fusion would give."""
    model, tokenizer = tiny_model("llama", name, 0, 3.0), TOKENIZERS[name]()
    members = [model, like(model, 1, 0.2), like(model, 2, 0.2)]
    case = Case(members, [tokenizer] * 3, AdaFuseConfig(method=method), PROMPTS[:4], 20)
    # Fusion passes over tokens without a text; drafts do not.
    unsaid = sorted({*tokenizer.all_special_ids} - {*eos_ids(tokenizer)})
    expected = new_ids(case, case.fast(suppress_tokens=unsaid))
    fused = []
    for least in (0.5, 0.9, 1.0):
        case.config = safe(ensemble=method, sharpening="none", num_tokens=number_of_tokens, acceptance_threshold=least)
        output = case.fast(suppress_tokens=unsaid)
        assert new_ids(case, output) == expected
        fused.append(output.stats["fused"])
        assert 0 < output.stats["replaced"] <= output.stats["fused"]
    assert fused == sorted(fused) and fused[0] < output.stats["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("sharpening", ["prefix", "geometric"])
def test_with_one_tokenizer_the_length_of_drafts_changes_nothing(sharpening):
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=24, prompts=PROMPTS[:3])
    texts = []
    for number in (1, 2, 3, 8, 100):
        case.config = safe(num_tokens=number, sharpening=sharpening)
        texts.append(new_ids(case, case.fast()))
    assert all(one == texts[0] for one in texts)


@pytest.mark.parametrize("number", range(4))
def test_with_all_weight_on_the_main_model_it_is_alone_unless_sharpened(number):
    case = random_case(97001 + 4 * number)  # of two members
    case.config = safe((1.0, 1e-9), sharpening="none")
    alone = Case(case.models[:1], case.tokenizers[:1], safe(), case.prompts, case.max_new_tokens)
    assert new_ids(case, case.fast()) == new_ids(alone, alone.fast())


def test_a_cycle_by_hand():
    """One line per pass, with the tokens it reads; the prompt is two tokens, and drafts are of two."""
    members = members_of({"is": 0.6, "was": 0.3}, {"is": 0.1, "was": 0.8})
    output = run(members, safe(num_tokens=2))
    assert text_of(output) == "was cold" and counted(output) == (3, 1, 0, 1)
    # cycle  main model                                   verifier
    #        So It                                        So It
    # 1      is       drafts " is cold"                   is      it would say " was": fused off It, no pass
    # 2      was      drafts " cold"
    #        cold     drafts the end                      was cold
    assert counts(output) == [(1 + 1 + 2, 2 + 3), (1 + 1 + 1, 2 + 3)]
    assert [one.text for one in output.rounds[0]] == [" was", " cold"]
    output = run(members_of({"is": 0.6}, {"is": 0.7}), safe(num_tokens=2))
    # 1      is       drafts " is cold"                   is
    # 2      cold     drafts the end                      cold
    assert counts(output) == [(1 + 2, 2 + 2), (1 + 2, 2 + 2)] and text_of(output) == "is cold"
    output = run(members_of({"is": 0.6}, {"is": 0.7}), safe(num_tokens=5))
    # 1      is, cold drafts " is cold" and the end       is cold
    assert counts(output) == [(1 + 2, 2 + 2), (1 + 1, 2 + 2)] and text_of(output) == "is cold"


@pytest.mark.parametrize("number_of_tokens", [2, 3, 5])
def test_verifiers_that_agree_read_a_draft_in_one_pass(number_of_tokens, monkeypatch):
    monkeypatch.setattr(Policy, "longest_draft", 0)
    case = ensemble(*["llama/characters/1"] * 3, n=15, prompts=PROMPTS[:1])
    case.config = safe(num_tokens=number_of_tokens)
    output, prompt = case.fast(), len(case.main_ids()[0][0])
    assert output.stats["tokens"] == 15
    main, *verifiers = counts(output)
    assert main == (15, prompt + 14)
    assert verifiers == [(1 - (-15 // number_of_tokens), prompt + 14)] * 2


def test_where_the_main_model_decides_alone_the_verifiers_are_not_asked():
    """By its weight, or by GaC's threshold; they read all of it later, in one pass."""
    members = members_of({"is": 0.6}, {"was": 0.7})
    for config in (safe((9.0, 1.0)), safe(ensemble="gac", threshold=0.5)):
        output = run(members, config)
        assert text_of(output) == "is cold" and counts(output)[1] == (1, 2)


def test_stats_count_what_the_rounds_show():
    case = ensemble("llama/byte_level/0", "gpt2/sentencepiece/1", "qwen3/byte_level/2", n=30, prompts=PROMPTS)
    case.config = safe(num_tokens=4)
    output = case.fast()
    rounds = [one for of_prompt in output.rounds for one in of_prompt]
    assert output.stats["tokens"] == sum(map(len, new_ids(case, output))) == sum(one.num_tokens for one in rounds)
    fused = [one for one in rounds if one.criterion != DRAFTED]
    assert output.stats["fused"] == len(fused) and all(one.num_tokens == 1 for one in fused)
    assert output.stats["replaced"] == sum(0 not in one.candidates[one.winner].proposers for one in fused)
    assert 0 < output.stats["replaced"] <= len(fused) < output.stats["tokens"]
    for one in rounds:
        assert "".join(one.words) == one.text and len(one.confidences) == len(one.words)
        if one.criterion == DRAFTED:
            assert 1 <= one.num_tokens <= 4 and one.proposer == 0 and one.candidates[0].nlls[1:] == [None, None]
    assert DRAFTED in str(output.rounds[0])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 2.0}, "num_tokens"),
        ({"num_tokens": True}, "num_tokens"),
        ({"acceptance_threshold": -0.1}, "acceptance_threshold"),
        ({"acceptance_threshold": 1.1}, "acceptance_threshold"),
        ({"acceptance_threshold": math.nan}, "acceptance_threshold"),
        ({"ensemble": "deepen"}, "ensemble"),
        ({"sharpening": None}, "sharpening"),
        ({"sharpening": "softmax"}, "sharpening"),
        ({"sharpening_threshold": 2}, "sharpening_threshold"),
        ({"sharpening_threshold": "0.1"}, "sharpening_threshold"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 5, "ensemble": "gac"}, "top_k"),
        ({"threshold": 0.5}, "threshold"),
        ({"threshold": 1.5, "ensemble": "gac"}, "threshold"),
        ({"gamma": 1}, "method_options"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, field):
    with pytest.raises(ValueError, match=rf"`{field}` must be .+, but .+\. .+"):
        make_strategy(AdaFuseConfig(method="safe", method_options=options))


def test_sampling_is_refused():
    case = ensemble("llama/byte_level/0", "gpt2/byte_level/1", n=4)
    case.config = AdaFuseConfig(method="safe", do_sample=True)
    with pytest.raises(ValueError, match="`do_sample` must be False with method 'safe'"):
        case.fast()
