"""What every method keeps to, whatever it decides: the laws of the contract as far as the method says so, and what a
user of `generate()` counts on.
"""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from support.cases import PROMPTS, Case
from support.tiny import ARCHITECTURES, TOKENIZERS, tiny_model
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.strategies.registry import STRATEGIES, make_strategy

NAMES = list(TOKENIZERS)
BUILT_IN = [name for name in STRATEGIES if STRATEGIES[name].__module__.startswith("hf_adafuse.")]
PEERS = [name for name in BUILT_IN if name != "adafuse"]
WHOLE_ANSWERS = ("majority", "rerank", "blender", "select", "peer-review")
OVER_TOKENS = ("unite", "gac", "deepen")
OPTIONS = {
    "sweetspan": {"num_words": 2},
    "spans": {"unit": "paragraph", "num_words": 4},
    "specfuse": {"num_tokens": 4},
    "peer-review": {"max_score": 3, "rubric": "Rate."},  # the tiny tokenizers have no 5, their contexts 512 tokens
}


def config_of(method, **fields):
    return AdaFuseConfig(method=method, method_options=OPTIONS.get(method, {}), **fields)


def case_of(method, number, count=2, **fields):
    rng = random.Random(number)
    names = [rng.choice(NAMES) for _ in range(count)]
    models = [tiny_model(rng.choice(ARCHITECTURES), name, seed) for seed, name in enumerate(names)]
    tokenizers = [TOKENIZERS[name]() for name in names]
    return Case(models, tokenizers, config_of(method, **fields), rng.sample(PROMPTS, 3), 14)


def new_ids(case, output, row=0):
    count = sum(committed.num_tokens for committed in output.rounds[row])
    start = case.main_ids()[1].shape[1]
    return output.sequences[row, start : start + count].tolist()


def greedy_ids(case):
    """Of the first prompt, what the main model's ordinary greedy `generate()` writes."""
    ids, mask = Case(case.models, case.tokenizers, case.config, case.prompts[:1], 0).main_ids()[1:]
    made = case.models[0].generate(ids, attention_mask=mask, max_new_tokens=case.max_new_tokens, do_sample=False)
    return made[0, ids.shape[1] :].tolist()


# Vocabularies with one end of the text, all of whose tokens have texts of their own: with two ends a fused text may end
# where the most likely token does not.
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["trailing_space", "sentencepiece", "characters"])
@pytest.mark.parametrize("method", PEERS)
def test_copies_of_one_model_give_its_greedy_text(method, name, count):
    model, tokenizer = tiny_model("llama", name, peak=4.0), TOKENIZERS[name]()
    case = Case([model] * count, [tokenizer] * count, config_of(method), PROMPTS[:1], 16)
    assert new_ids(case, case.fast()) == greedy_ids(case)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("method", PEERS)
def test_the_order_of_assistants_changes_nothing_but_ties(method, number):
    case = case_of(method, 600 + number, count=4)
    order = [0, *random.Random(number).sample([1, 2, 3], 3)]
    shuffled = Case([case.models[k] for k in order], [case.tokenizers[k] for k in order], case.config, case.prompts, 14)
    assert case.fast().sequences.tolist() == shuffled.fast().sequences.tolist()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("method", ["unite", "gac", "majority", "anchor"])
def test_with_all_weight_on_the_main_model_it_is_alone(method, number):
    case = case_of(method, 700 + number, model_weights=(1.0, 1e-9))
    alone = Case(case.models[:1], case.tokenizers[:1], config_of(method), case.prompts, 14)
    assert case.fast().sequences.tolist() == alone.fast().sequences.tolist()


@pytest.mark.parametrize("method", PEERS)
def test_a_batch_gives_each_prompt_what_it_gives_alone(method):
    case = case_of(method, 800)
    together = case.fast()
    for row, prompt in enumerate(case.prompts):
        alone = Case(case.models, case.tokenizers, case.config, [prompt], case.max_new_tokens)
        output = alone.fast()
        assert new_ids(case, together, row) == new_ids(alone, output)
        assert [one.text for one in together.rounds[row]] == [one.text for one in output.rounds[0]]


@pytest.mark.parametrize("method", PEERS)
def test_rounds_show_what_was_decided(method):
    case = case_of(method, 900)
    output = case.fast()
    main = case.tokenizers[0]
    for row, rounds in enumerate(output.rounds):
        text = "".join(committed.text for committed in rounds)
        assert "\ufffd" in text or main.decode(main(text, add_special_tokens=False).input_ids) is not None
        for committed in rounds:
            winner = committed.candidates[committed.winner]
            # A vote, and a word that every member writes greedily, win by no score.
            by_score = method != "majority" and not any(candidate.note for candidate in committed.candidates)
            assert not by_score or winner.score == min(candidate.score for candidate in committed.candidates)
            assert all(len(candidate.nlls) == 2 for candidate in committed.candidates)
        assert sum(committed.num_tokens for committed in rounds) == len(new_ids(case, output, row))
    assert str(output.rounds[0])
    assert output.rounds[0]._repr_html_()


@pytest.mark.parametrize("method", PEERS)
def test_a_stop_string_ends_the_text(method):
    case = case_of(method, 1000)
    case.tokenizers[0] = TOKENIZERS["sentencepiece"]()
    case.models[0] = tiny_model("gpt2", "sentencepiece", 2)
    case.prompts = case.prompts[:1]
    whole = case.tokenizers[0].decode(new_ids(case, case.fast()), skip_special_tokens=True)
    stop = whole[4:7]
    output = case.fast(stop_strings=[stop])
    stopped = case.tokenizers[0].decode(new_ids(case, output), skip_special_tokens=True)
    if method == "peer-review":  # which rates what is left of the answers, and takes one without the string here
        stopped = next(one.text for one in output.rounds[0][0].candidates if stop in one.text)
    assert stop in stopped
    assert len(stopped) < len(whole)
    if method not in WHOLE_ANSWERS:  # which may choose another answer then
        assert whole.startswith(stopped)


class Told(BaseStreamer):
    def __init__(self):
        self.ids, self.has_ended = [], False

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.has_ended = True


@pytest.mark.parametrize("method", PEERS)
def test_a_streamer_is_told_all_ids(method):
    case, told = case_of(method, 1100), Told()
    case.prompts = case.prompts[:1]
    output = case.fast(streamer=told)
    assert told.ids == output.sequences[0].tolist() and told.has_ended


@pytest.mark.parametrize("method", PEERS)
def test_what_a_processor_forbids_is_not_said(method):
    case = case_of(method, 1200)
    ids = new_ids(case, case.fast())
    forbidden = [token for token in dict.fromkeys(ids) if token not in case.tokenizers[0].all_special_ids][:3]
    output = case.fast(suppress_tokens=forbidden)
    for row in range(3):
        assert not set(forbidden) & set(new_ids(case, output, row))


@pytest.mark.parametrize("method", PEERS)
def test_max_time_and_least_new_tokens(method):
    case = case_of(method, 1300)
    start = time.perf_counter()
    case.max_new_tokens = 400
    output = case.fast(max_time=0.0)
    assert time.perf_counter() - start < 30
    assert all(0 < len(new_ids(case, output, row)) < 400 for row in range(3))
    case.max_new_tokens = 14
    output = case.fast(min_new_tokens=10)
    assert all(len(new_ids(case, output, row)) >= 10 for row in range(3))


@pytest.mark.parametrize("method", PEERS)
def test_nothing_of_the_callers_is_changed(method):
    case = case_of(method, 1400)
    weights = [{name: value.clone() for name, value in model.state_dict().items()} for model in case.models]
    configs = [copy.deepcopy(model.config.to_dict()) for model in case.models]
    case.fast()
    for model, before, config in zip(case.models, weights, configs, strict=True):
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert model.config.to_dict() == config
        assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("method", OVER_TOKENS)
def test_a_token_costs_each_member_one_pass_and_nothing_is_read_twice(method):
    """With the same tokenizer, where no word is read anew."""
    tokenizer = TOKENIZERS["byte_level"]()
    models = [tiny_model("llama", "byte_level", seed) for seed in (0, 1)]
    case = Case(models, [tokenizer] * 2, config_of(method), PROMPTS[1:2], 12)
    output = case.fast()
    new, prompt = len(new_ids(case, output)), len(case.main_ids()[0][0])
    for member in output.stats["members"]:
        assert member["forward_passes"] <= new
        assert member["tokens_run"] <= prompt + new


class Counts(StoppingCriteria):
    """Stops after three calls: what it says follows from earlier calls."""

    calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 3)


@pytest.mark.parametrize("method", WHOLE_ANSWERS)
def test_whole_answers_refuse_criteria_that_remember(method):
    with pytest.raises(ValueError, match=r"`stopping_criteria` must be functions of the ids .+, but \['Counts'\]"):
        case_of(method, 1500).fast(stopping_criteria=StoppingCriteriaList([Counts()]))


@pytest.mark.parametrize("method", [name for name in PEERS if name not in WHOLE_ANSWERS])
def test_criteria_that_remember_are_asked_token_by_token(method):
    case = case_of(method, 1600)
    case.prompts = case.prompts[:1]
    output = case.fast(stopping_criteria=StoppingCriteriaList([Counts()]))
    assert len(new_ids(case, output)) == 3


def test_sampling_is_refused():
    case = case_of("unite", 1700)
    case.config = AdaFuseConfig(method="unite", do_sample=True)
    with pytest.raises(ValueError, match="`do_sample` must be False with method 'unite'"):
        case.fast()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": "unit"}, ", but is 'unit'. Did you mean unite?"),
        ({"method": "sweetspan", "num_wrds": 2}, "num_wrds"),
        ({"method": "sweetspan", "num_words": 0}, "`num_words`"),
        ({"method": "sweetspan", "filter_ratio": 0.5}, "`filter_ratio`"),
        ({"method": "spans", "unit": "chapter"}, "`unit`"),
        ({"method": "spans", "merge": "mean"}, "`merge`"),
        ({"method": "specfuse", "num_tokens": 1.5}, "`num_tokens`"),
        ({"method": "specfuse", "learning_rate": -1}, "`learning_rate`"),
        ({"method": "unite", "top_k": True}, "`top_k`"),
        ({"method": "deepen", "num_anchors": 0}, "`num_anchors`"),
        ({"method": "majority", "pattern": 3}, "`pattern`"),
        ({"method": "select", "calibration": 3}, "`calibration`"),
        ({"method": "select", "calibration": {"version": 1}}, "`calibration`"),
        ({"method": "select", "calibration": "no-such-file.json"}, "`calibration`"),
        ({"method": "select", "with_features": 1}, "`with_features`"),
        ({"method": "select", "num_samples": 2}, "num_samples"),
        ({"method": "select", "with_ratings": 1}, "`with_ratings`"),
        ({"method": "select", "max_score": 3}, "`with_ratings`"),
        ({"method": "peer-review", "max_score": 10}, "`max_score`"),
        ({"method": "peer-review", "max_score": 1}, "`max_score`"),
        ({"method": "peer-review", "max_score": 4.0}, "`max_score`"),
        ({"method": "peer-review", "rubric": " "}, "`rubric`"),
        ({"method": "peer-review", "rubric": 3}, "`rubric`"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_first_pass(values, named, monkeypatch):
    config = AdaFuseConfig.from_dict(values)
    with pytest.raises(ValueError, match=r"must be .+, but .+\. .+") as error:
        make_strategy(config)
    assert named in str(error.value)
    case = case_of("sweetspan", 1800)
    case.config = config
    monkeypatch.setattr("hf_adafuse.members.member.Member.start", None)
    with pytest.raises(ValueError, match=r"must be .+, but .+\. .+"):
        case.fast()
