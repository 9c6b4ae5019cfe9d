"""LLM-Blender: the ranker's winner equals the oracle's; what the fuser writes is committed like any answer, or not."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.blender_models import LAYOUTS, PlainPairRM, save_fuser, save_pair_rm
from support.calls import LEFT, arguments, assert_refused, own, state_of
from support.cases import Case, random_case
from support.reference_methods import Blender as PlainBlender
from support.releases import cache_of
from support.tiny import TOKENIZERS, tiny_model
from test_methods_oracle import assert_equals_the_oracle

from hf_adafuse import AdaFuseConfig, enable_adafuse, plots
from hf_adafuse.decoding.strategies import blender
from hf_adafuse.decoding.strategies.blender import pair_scores

PROMPTS = ["Once upon a time", "The capital of France", "She"]
KINDS = [("llama", "byte_level"), ("gpt2", "characters"), ("qwen3", "sentencepiece")]
WRITTEN = "there was a tree"


@pytest.fixture(scope="module", params=LAYOUTS)
def ranker(request, tmp_path_factory):
    return save_pair_rm(tmp_path_factory.mktemp("rankers") / request.param, request.param)


@pytest.fixture(scope="module")
def fuser(tmp_path_factory):
    return save_fuser(tmp_path_factory.mktemp("fuser"))


@pytest.fixture
def fusing(monkeypatch):
    """Says what the fuser writes; returns what it was given to read."""
    read = []

    def fix(text):
        def write(source, candidates):
            read.append((source, list(candidates)))
            return text

        monkeypatch.setattr(blender, "load_answer_fuser", lambda name, device: write)
        return read

    return fix


def blend(models=3, prompts=PROMPTS, max_new_tokens=12, **options):
    """A call of members of different tokenizers."""
    kinds = KINDS[:models]
    config = AdaFuseConfig.from_dict({"method": "blender", **options})
    members = [tiny_model(*kind) for kind in kinds]
    return Case(members, [TOKENIZERS[name]() for _, name in kinds], config, prompts, max_new_tokens)


@pytest.mark.parametrize("number", range(24))
def test_the_ranker_s_winner_equals_the_oracle_s(number, ranker, monkeypatch):
    monkeypatch.setitem(PlainBlender.rankers, ranker, PlainPairRM(ranker))
    case = random_case(93000 + number)
    case.config = AdaFuseConfig(
        method="blender",
        method_options={"ranker": ranker},
        max_word_tokens=case.config.max_word_tokens,
        word_boundary=case.config.word_boundary,
    )
    if number % 3 == 0:  # two members that always answer alike, and a third
        case.models, case.tokenizers = [m[:1] * 2 + m[1:3] for m in (case.models, case.tokenizers)]
    assert_equals_the_oracle(case)


@pytest.mark.parametrize("number", range(4))
def test_without_a_ranker_it_is_reranking(number):
    case = random_case(94000 + number)
    weights, outputs = case.config.model_weights, []
    for method in ("blender", "rerank"):
        case.config = AdaFuseConfig(method=method, model_weights=weights)
        outputs.append(case.fast())
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and outputs[0].rounds == outputs[1].rounds


def test_the_trace_has_the_ranker_s_scores(ranker):
    case, plain = blend(ranker=ranker), PlainPairRM(ranker)
    for prompt, rounds in zip(PROMPTS, case.fast().rounds):
        candidates = rounds[0].candidates
        answers = [c.text.strip() for c in candidates for _ in c.proposers]
        assert len(answers) == 3
        expected = dict(zip(answers, plain.scores(prompt, answers)))
        assert [-c.score for c in candidates] == pytest.approx([expected[c.text.strip()] for c in candidates], abs=1e-4)
        assert rounds[0].winner == min(range(len(candidates)), key=lambda k: candidates[k].score)
        assert all(nll is not None for c in candidates for nll in c.nlls)


def test_members_that_answer_alike_count_as_many(ranker):
    case, plain = blend(ranker=ranker, prompts=PROMPTS[:1]), PlainPairRM(ranker)
    case.models, case.tokenizers = case.models[:1] + case.models, case.tokenizers[:1] + case.tokenizers
    (committed,) = case.fast().rounds[0]
    assert [c.proposers for c in committed.candidates] == [[0, 1], [2], [3]]
    answers = [c.text.strip() for c in committed.candidates for _ in c.proposers]
    expected = dict(zip(answers, plain.scores(PROMPTS[0], answers)))
    assert [-c.score for c in committed.candidates] == pytest.approx(list(expected.values()), abs=1e-4)


def test_alone_and_in_a_batch_it_is_the_same(ranker):
    together = blend(ranker=ranker).fast()
    for row, prompt in enumerate(PROMPTS):
        (alone,) = blend(ranker=ranker, prompts=[prompt]).fast().rounds
        assert [c.text for c in alone] == [c.text for c in together.rounds[row]]
        for one, other in zip(alone[0].candidates, together.rounds[row][0].candidates):
            assert one.score == pytest.approx(other.score, abs=1e-4)


def test_what_others_say_of_an_answer_counts_as_often_as_it_was_given():
    logits = [[0.0, 2.0, -1.0], [1.0, 0.0, 4.0], [3.0, -2.0, 0.0]]
    once = [(2 - 1 + -1 - 3) / 2, (1 - 2 + 4 + 2) / 2, (3 + 1 - 2 - 4) / 2]
    assert pair_scores(logits, [1, 1, 1]) == pytest.approx(once)
    assert pair_scores(logits, [1, 3, 1])[0] == pytest.approx((3 * (2 - 1) + -1 - 3) / 4)
    assert pair_scores(logits, [1, 3, 1])[1] == pytest.approx((1 - 2 + 4 + 2) / 4)  # its equals say nothing
    assert pair_scores([[0.0]], [2]) == [0.0] and pair_scores([], []) == []


def test_a_fused_answer_is_committed(fuser):
    case = blend(fuser=fuser, max_new_tokens=40, prompts=PROMPTS[:2])
    case.models = [tiny_model(*kind, max_positions=4096) for kind in KINDS]  # tiny fusers write long answers
    output = case.fast()
    assert case.config.to_dict()["fuser"] == fuser
    reads = blender.load_answer_fuser(fuser, torch.device("cpu"))
    for row, prompt in enumerate(PROMPTS[:2]):
        (committed,) = output.rounds[row]
        *answers, fused = committed.candidates
        best = sorted(answers, key=lambda c: c.score)
        written = reads(prompt, [c.text.strip() for c in best[:3]]).strip()
        lead = best[0].text[: len(best[0].text) - len(best[0].text.lstrip())]
        assert fused.text == lead + written and "".join(fused.words) == fused.text
        assert (fused.proposers, fused.ends) == ([], True) and fused.score == -math.inf
        assert all(nll is not None and math.isfinite(nll) for nll in fused.nlls)
        assert (committed.winner, committed.proposer) == (len(answers), None)
        assert fused.text.startswith(committed.text)


def test_the_best_answers_are_fused_best_first(fusing, ranker):
    read = fusing(WRITTEN)
    for options in ({"ranker": ranker}, {"ranker": "nll"}):
        for num_fused in (1, 2, 3):
            read.clear()
            output = blend(fuser="any", num_fused=num_fused, prompts=PROMPTS[:1], **options).fast()
            answers = output.rounds[0][0].candidates[:-1]
            assert len(answers) == 3
            best = [c.text.strip() for c in sorted(answers, key=lambda c: c.score)]
            assert read == [(PROMPTS[0], best[:num_fused])]


def test_equal_answers_are_read_once(fusing):
    read = fusing(WRITTEN)
    case = blend(1, fuser="any", prompts=PROMPTS[:1])
    case.models, case.tokenizers = case.models * 3, case.tokenizers * 3
    (committed,) = case.fast().rounds[0]
    assert len(committed.candidates) == 2 and len(read[0][1]) == 1
    method = blender.Blender(fuser="any")
    method.prepare(torch.device("cpu"))
    assert method.fuse([" a cat", "a cat\n", "the tree", " a", "c"]) == " " + WRITTEN
    assert read[1][1] == ["a cat", "the tree", "a"]


def text_after(output, row, case):
    width = case.main_ids()[1].shape[1]
    return case.tokenizers[0].decode(output.sequences[row, width:], skip_special_tokens=True)


def test_a_fused_answer_ends_the_text(fusing):
    fusing(WRITTEN)
    case = blend(fuser="any", max_new_tokens=40)
    output = case.fast()
    for row in range(3):
        (committed,) = output.rounds[row]
        assert text_after(output, row, case) == committed.text and committed.text.strip() == WRITTEN
        assert committed.ends and committed.is_whole
        best = min(committed.candidates[:-1], key=lambda c: c.score)
        assert committed.text == best.text[: len(best.text) - len(best.text.lstrip())] + WRITTEN
    assert [member["wins"] for member in output.stats["members"]] == [0, 0, 0]
    assert [member["proposals"] for member in output.stats["members"]] == [3, 3, 3]


@pytest.mark.slow
def test_alone_and_in_a_batch_the_same_is_fused(fuser, ranker):
    together = blend(fuser=fuser, ranker=ranker, max_new_tokens=16, prompts=PROMPTS[:2])
    output = together.fast()
    for row, prompt in enumerate(PROMPTS[:2]):
        alone = blend(fuser=fuser, ranker=ranker, max_new_tokens=16, prompts=[prompt])
        assert text_after(alone.fast(), 0, alone) == text_after(output, row, together)


def test_a_fused_answer_stops_at_the_length_and_at_stop_strings(fusing):
    fusing(WRITTEN)
    case = blend(fuser="any", max_new_tokens=3)
    output = case.fast()
    assert output.sequences.shape[1] == case.main_ids()[1].shape[1] + 3
    assert all(len(rounds) == 1 and not rounds[0].is_whole and not rounds[0].ends for rounds in output.rounds)
    case = blend(fuser="any", max_new_tokens=40)
    output = case.fast(stop_strings=["re w"])
    for row in range(3):
        assert text_after(output, row, case).strip().startswith("there w")
        assert not text_after(output, row, case).endswith("tree")
        assert len(output.rounds[row]) == 1


def assert_the_best_is_committed_instead(case, reason, **kwargs):
    output = case.fast(**kwargs)
    case.config = AdaFuseConfig(method="rerank")
    expected = case.fast(**kwargs)
    assert torch.equal(output.sequences, expected.sequences)
    for rounds, others in zip(output.rounds, expected.rounds):
        *answers, fused = rounds[0].candidates
        assert reason in fused.dropped and fused.score == math.inf and fused.proposers == []
        assert rounds[0].winner == others[0].winner
        assert [c.text for c in answers] == [c.text for c in others[0].candidates]
        assert [c.score for c in answers] == pytest.approx([c.score for c in others[0].candidates], abs=1e-4)
    assert reason in str(output.rounds)


def test_what_the_main_tokenizer_cannot_write_is_not_committed(fusing):
    fusing("今天 天气")
    case = blend(fuser="any")
    case.models, case.tokenizers = case.models[::-1][1:], case.tokenizers[::-1][1:]  # characters first
    assert_the_best_is_committed_instead(case, "cannot represent it")


def test_what_an_assistant_cannot_write_is_committed(fusing):
    fusing("今天")
    output = blend(2, fuser="any", max_new_tokens=40).fast()
    assert all(rounds[0].text.strip() == "今天" for rounds in output.rounds)
    assert all(rounds[0].candidates[-1].lossy == [1] for rounds in output.rounds)


def test_what_a_processor_rules_out_is_not_committed(fusing):
    fusing(WRITTEN)
    case = blend(fuser="any")
    ids = case.tokenizers[0](" was a", add_special_tokens=False).input_ids
    assert_the_best_is_committed_instead(case, "logits processors", bad_words_ids=[[ids[-1]]])


def test_an_answer_too_long_for_a_context_is_not_committed(fusing):
    fusing(WRITTEN * 60)
    assert_the_best_is_committed_instead(blend(fuser="any"), "it outgrows")


def test_nothing_written_is_not_committed(fusing):
    fusing(" \n")
    assert_the_best_is_committed_instead(blend(fuser="any"), "nothing was written")


@pytest.mark.slow
def test_a_fused_answer_that_a_member_gave_is_that_member_s(fusing):
    ended = {}
    for prompt in PROMPTS:
        candidates = blend(max_new_tokens=60, prompts=[prompt]).fast().rounds[0][0].candidates
        lead = min(candidates, key=lambda c: c.score).text[:1].isspace()
        for one in candidates:
            if one.ends and one.text[:1].isspace() == lead and one.text == one.text.rstrip():
                ended[prompt] = one
    assert ended
    for prompt, answer in ended.items():
        fusing(answer.text)
        (committed,) = blend(max_new_tokens=60, prompts=[prompt], fuser="any").fast().rounds[0]
        assert committed.text == answer.text and committed.proposer == answer.proposers[0]
        winner = committed.candidates[committed.winner]
        assert winner.proposers == answer.proposers and winner.score == pytest.approx(answer.score, abs=1e-4)


def test_a_main_model_without_an_end_is_over_after_the_fused_answer(fusing):
    fusing(WRITTEN)
    case = blend(fuser="any", max_new_tokens=40, prompts=PROMPTS[:1])
    output = case.fast(eos_token_id=[])
    (committed,) = output.rounds[0]
    assert committed.text.strip() == WRITTEN and not committed.ends and committed.winner == 3


def test_scores_and_a_cache_go_with_a_fused_answer(fusing):
    fusing(WRITTEN)
    case = blend(fuser="any", max_new_tokens=40)
    output = case.fast(output_scores=True, output_logits=True)
    width = case.main_ids()[1].shape[1]
    assert len(output.scores) == len(output.logits) == output.sequences.shape[1] - width
    assert cache_of(output) is not None


def test_a_fused_answer_is_shown(fusing):
    fusing(WRITTEN)
    output = blend(fuser="any", max_new_tokens=40).fast()
    text, page = str(output.rounds[0]), output.rounds._repr_html_()
    row = next(line for line in text.splitlines() if WRITTEN in line and line.startswith("  >"))
    by, *nlls, decided = row.partition("<end>")[2].split()
    assert by == decided == "-" and len(nlls) == 3 and all(float(nll) > 0 for nll in nlls)
    assert WRITTEN in page
    plots.overview(output.rounds)
    json.dumps([committed.to_dict() for rounds in output.rounds for committed in rounds])


def test_the_members_stay_as_they_are(ranker, fuser):
    main, assistant = enable_adafuse(own()), own("gpt2", "characters")
    before = state_of(main), state_of(assistant)
    state = torch.get_rng_state()
    config = {"method": "blender", "ranker": ranker, "fuser": fuser}
    main.generate(**arguments(assistant_models=[assistant], adafuse_config=config))
    assert (state_of(main), state_of(assistant)) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranker": "no/such-ranker"}, "^`ranker` must be .+'no/such-ranker'"),
        ({"ranker": 3}, "^`ranker` must be .+ 3"),
        ({"ranker": None}, "^`ranker` must be .+ None"),
        ({"ranker": ""}, "^`ranker` must be"),
        ({"fuser": "no/such-fuser"}, "^`fuser` must be .+'no/such-fuser'"),
        ({"fuser": 3}, "^`fuser` must be .+ 3"),
        ({"num_fused": 0}, "^`num_fused` must be"),
        ({"num_fused": 2.0}, "^`num_fused` must be"),
        ({"num_fused": 101}, "^`num_fused` must be"),
        ({"top_k": 3}, "top_k"),
    ],
    ids=repr,
)
def test_what_cannot_be_used_is_refused_before_any_pass(options, match):
    assert_refused(arguments(adafuse_config={"method": "blender", **options}), match)


@pytest.mark.parametrize("weights", [[1.0, 2.0], "prompt"])
def test_weights_do_not_go_with_a_pair_ranker(weights, ranker):
    config = {"method": "blender", "ranker": ranker, "model_weights": weights}
    assert_refused(arguments(adafuse_config=config), "^`model_weights` must be left out where a PairRM ranks")


def test_a_ranker_that_does_not_load_is_refused_before_an_assistant_is_loaded():
    config = {"method": "blender", "ranker": "no/such-ranker"}
    given = arguments(adafuse_config=config, assistant_models=["no/such-assistant"], assistant_tokenizers=LEFT)
    assert_refused(given, "^`ranker` must be")


def test_the_prompt_s_text_has_no_special_tokens(fusing):
    read = fusing(WRITTEN)
    case = blend(fuser="any", prompts=["She", "Once upon a time"])
    case.models, case.tokenizers = case.models[::-1], case.tokenizers[::-1]  # one that begins with <s>
    case.fast()
    assert sorted(source for source, _ in read) == ["Once upon a time", "She"]
