"""What a reviewer broke in the methods, kept from breaking again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.cases import PROMPTS, Case
from support.reference_methods import METHODS
from support.releases import cache_of
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, texts, toy, word_tokenizer
from test_method_laws import config_of, new_ids

from hf_adafuse import AdaFuseConfig, SpanStrategy, TokenStrategy, register_strategy
from hf_adafuse.decoding.scored_spans import Choice, ScoredSpan
from hf_adafuse.decoding.strategies.majority import Majority
from hf_adafuse.decoding.strategies.registry import STRATEGIES, make_strategy
from hf_adafuse.decoding.strategies.specfuse import SpecFuse
from hf_adafuse.decoding.strategies.token_strategy import NextToken
from hf_adafuse.members.vocabulary import vocabulary_of


def case_of(method, first="byte_level", second="byte_level", weights=None, **options):
    models = [tiny_model("llama", first, 1), tiny_model("gpt2", second, 2)]
    config = AdaFuseConfig(method=method, method_options=options, model_weights=weights)
    return Case(models, [TOKENIZERS[first](), TOKENIZERS[second]()], config, PROMPTS[:1], 14)


@pytest.mark.parametrize("method", ["gac", "unite", "deepen"])
@pytest.mark.parametrize("second", ["byte_level", "sentencepiece"])
def test_a_forbidden_token_is_not_said_for_the_others_sake(method, second):
    """The other member, which counts more, would say it."""
    case = case_of(method, second=second, weights=(0.5, 1.0))
    ids = new_ids(case, case.fast())
    for count in (1, 3, len(ids)):
        banned = [token for token in dict.fromkeys(ids) if token not in case.tokenizers[0].all_special_ids][:count]
        assert not set(banned) & set(new_ids(case, case.fast(suppress_tokens=banned)))


@pytest.mark.parametrize("second", ["byte_level", "sentencepiece", "characters"])
def test_the_text_does_not_end_where_that_is_forbidden(second):
    case = case_of("gac", second=second, weights=(0.3, 1.0))
    assert len(new_ids(case, case.fast(min_new_tokens=14))) == 14


@pytest.mark.parametrize("first", ["characters", "byte_level"])
def test_gac_reads_all_tokens_of_a_text(first):
    """Several tokens of the main model at a time: scores and keys of each."""
    case = case_of("gac", first, "wordpiece", weights=(0.1, 5.0))
    for length in range(2, 10):
        case.max_new_tokens = length
        output = case.fast(output_scores=True, output_logits=True)
        new = len(new_ids(case, output))
        assert len(output.scores) == len(output.logits) == new
        keys = cache_of(output).layers[0].keys
        assert keys.shape[2] == output.sequences.shape[1] - 1
        assert bool((keys.abs().sum((0, 1, 3)) > 0).all())


def test_vocabularies_without_a_common_token_are_refused_before_the_first_pass():
    tokenizers = [word_tokenizer(["So", "It"]), word_tokenizer(["Da", "Es"])]
    members = [(toy(tokenizer, {}), tokenizer) for tokenizer in tokenizers]
    with pytest.raises(ValueError, match='must have tokens in common with method "deepen", but have none'):
        run(members, AdaFuseConfig(method="deepen"))
    assert [model.forwards for model, _ in members] == [0, 0]
    never = AdaFuseConfig(method="deepen", method_options={"learning_rate": 0.0})  # the main model decides alone
    assert texts(run(members, never)) == texts(run(members[:1], AdaFuseConfig(method="deepen")))


def test_letters_are_not_written_as_bytes():
    """The vocabulary has each letter twice, first as the byte that is for what has no other token."""
    case = case_of("unite", "sentencepiece", "characters", weights=(0.1, 1.0))
    tokenizer = case.tokenizers[0]
    names = tokenizer.convert_ids_to_tokens(new_ids(case, case.fast()))
    assert "A" in tokenizer.get_vocab() and "<0x41>" in tokenizer.get_vocab()
    doubled = {f"<0x{ord(name):02X}>" for name in tokenizer.get_vocab() if len(name) == 1 and ord(name) < 128}
    assert names and not doubled.intersection(names)


def test_a_text_can_end_by_logits():
    tokenizer = word_tokenizer(["So", "It", "is"])
    ending = {"It": {"</s>": 0.9, "is": 0.05}, "is": {"</s>": 0.9}}
    going_on = {"It": {"</s>": 0.4, "is": 0.55}, "is": {"</s>": 0.9}}
    members = [(toy(tokenizer, table), tokenizer) for table in (ending, going_on)]
    for model, _ in members:
        model.table += 10.0  # the same probabilities; the mean raw logit of nothing would be 0
    for score in ("probability", "logit"):
        output = run(members, AdaFuseConfig(method="specfuse", method_options={"num_tokens": 1, "score": score}))
        assert texts(output) == [""], score


@pytest.mark.parametrize(
    ("method", "options", "field"),
    [
        ("specfuse", {"learning_rate": math.inf}, "learning_rate"),
        ("deepen", {"learning_rate": math.inf}, "learning_rate"),
        ("unite", {"zero_repeated": "no"}, "zero_repeated"),
    ],
)
def test_options_that_are_refused(method, options, field):
    with pytest.raises(ValueError, match=f"`{field}` must be "):
        make_strategy(AdaFuseConfig(method=method, method_options=options))


def test_what_is_no_class_has_no_name():
    with pytest.raises(ValueError, match="`cls` must be a subclass"):
        register_strategy("unite", 3)


def test_nothing_that_has_a_text_may_be_said():
    case = case_of("unite")
    case.models, case.tokenizers = case.models[:1], case.tokenizers[:1]
    pad = case.tokenizers[0].pad_token_id
    output = case.fast(prefix_allowed_tokens_fn=lambda row, ids: [pad])
    assert set(new_ids(case, output)) == {pad}


@pytest.mark.parametrize(
    ("text", "said"),
    [("(-5)", "-5"), ("5.", "5"), (" .5 ", ".5"), ("$5", "5"), ('"Lima."', "lima"), ("...", ""), ("+7", "+7")],
)
def test_what_an_answer_says(text, said):
    assert Majority()._says(text) == said


def test_the_space_of_deepen_follows_the_weights():
    model = copy.deepcopy(tiny_model("llama", "byte_level", 3))
    tokenizer = TOKENIZERS["byte_level"]()
    case = Case([model, tiny_model("gpt2", "byte_level", 2)], [tokenizer] * 2, config_of("deepen"), PROMPTS[:1], 10)
    case.fast()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(torch.linspace(-2, 2, model.config.hidden_size))
    fresh = copy.deepcopy(model)
    again = Case([fresh, case.models[1]], case.tokenizers, case.config, case.prompts, 10)
    assert case.fast().sequences.tolist() == again.fast().sequences.tolist()


def test_a_text_without_spaces_is_not_read_anew_from_its_beginning():
    case = case_of("unite", second="characters")
    case.prompts, case.max_new_tokens = ["今天天气很好。"], 60
    case.config = AdaFuseConfig(method="unite", max_word_tokens=4)
    other = case.fast().stats["members"][1]
    assert other["tokens_run"] < 60 * 4


def test_methods_of_ones_own_that_are_wrong_say_so(monkeypatch):
    class Silent(TokenStrategy):
        def choose(self, members, weights):
            return [NextToken(b"x", [], 0.0, [None] * len(members))]

    class Beyond(SpanStrategy):
        def choose(self, candidates, weights, main_index):
            return Choice(-1, self.nlls(candidates, len(weights)), [0.0] * len(candidates))

    class Taken(SpanStrategy):
        def __init__(self, fusion="word", preset=None):
            pass

    monkeypatch.setattr("hf_adafuse.decoding.strategies.registry.STRATEGIES", dict(STRATEGIES))
    register_strategy("silent", Silent)
    register_strategy("beyond", Beyond)
    silent = case_of("silent")
    assert len(new_ids(silent, silent.fast())) > 0  # the main model's own tokens
    with pytest.raises(IndexError, match=r"must be the index of one of .+ candidates, or None, but is -1"):
        case_of("beyond").fast()
    with pytest.raises(ValueError, match=r"`cls` must have options of new names, but has \['fusion', 'preset'\]"):
        register_strategy("taken", Taken)
    with pytest.raises(ValueError, match="`name` must be new"):
        register_strategy("unite", Silent)
    for name in ("", " ", "a,b", " mine", "mine\n", None, 3):
        with pytest.raises(ValueError, match=r"^`name` must be a text without commas, and without spaces at its ends"):
            register_strategy(name, Silent)


@pytest.mark.parametrize("given", [None, 0, (0, [], [])], ids=repr)
@pytest.mark.parametrize(
    ("base", "needed"), [(SpanStrategy, "a Choice"), (TokenStrategy, "a list of NextToken")], ids=["span", "token"]
)
def test_what_a_method_of_ones_own_gives_is_checked(base, needed, given, monkeypatch):
    class Wrong(base):
        def choose(self, *_):
            return given

    monkeypatch.setattr("hf_adafuse.decoding.strategies.registry.STRATEGIES", dict(STRATEGIES))
    register_strategy("wrong", Wrong)
    with pytest.raises(TypeError, match=rf"^What Wrong\.choose gives must be {needed}.*, but is .+\. Mend the method"):
        case_of("wrong").fast()


@pytest.mark.parametrize("method", ["unite", "gac", "deepen", "safe"])
def test_a_method_over_tokens_has_no_unit_of_the_nll(method):
    with pytest.raises(ValueError, match=f"`nll_normalization` must be 'token' with method '{method}', .+ is 'byte'"):
        make_strategy(AdaFuseConfig(method=method, nll_normalization="byte"))
    make_strategy(AdaFuseConfig(method="sweetspan", nll_normalization="byte"))


def votes(texts, weights, stop_texts=(), **options):
    """The share of votes of each text, one text per member."""
    strategy = make_strategy(AdaFuseConfig(method="majority", method_options=options))
    strategy.stop_texts = stop_texts
    log_probs = [[[-1.0]]] * len(texts)
    spans = [ScoredSpan((text,), log_probs, [len(text)], (k,)) for k, text in enumerate(texts)]
    return [shares[0] for shares in strategy.choose(spans, weights, None).decided_by]


@pytest.mark.parametrize(
    ("pattern", "texts", "shares"),
    [
        (r"answer is (\d+)|#### (\d+)", ["#### 7", "#### 9", "The answer is 5"], [0.25, 0.25, 0.5]),
        (r"answer is (\d+)|#### (\d+)", ["#### 5", "#### 9", "The answer is 5"], [0.75, 0.25, 0.75]),
        (r"\d*", ["is 7 now", "is 9 now", "is 7."], [0.75, 0.25, 0.75]),
        (r"(\d+)?$", ["is 7", "is 9", "is 7"], [0.75, 0.25, 0.75]),
        (r"\d+", ["none", "other", "None."], [0.75, 0.25, 0.75]),
    ],
)
def test_votes_are_for_the_text_that_a_pattern_finds(pattern, texts, shares):
    assert votes(texts, [1.0, 1.0, 2.0], pattern=pattern) == pytest.approx(shares)


def test_answers_are_compared_without_the_text_to_stop_at():
    texts, stop_texts = [" Paris\n\nQuestion:", " Paris", " Rome"], ["Question:"]
    assert votes(texts, [1.0] * 3, stop_texts) == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert votes(texts, [1.0] * 3) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("method", ["majority", "select", "peer-review", "blender"])
def test_methods_are_told_the_texts_to_stop_at(method, monkeypatch):
    asked = []
    choose = STRATEGIES[method].choose

    def listening(self, *args):
        asked.append(list(self.stop_texts))
        return choose(self, *args)

    monkeypatch.setattr(STRATEGIES[method], "choose", listening)
    case = case_of(method)
    case.fast(stop_strings=["qq", "Zz"])
    case.fast()
    assert asked == [["qq", "Zz"], []]


@pytest.mark.parametrize("second", ["byte_level", "sentencepiece", "characters"])
@pytest.mark.parametrize("method", ["rerank", "majority", "cool-fusion"])
def test_whole_answers_are_judged_as_far_as_the_caller_gets_them(method, second):
    """Each candidate ends with the token that completes the stop string, and its NLL counts no token after that."""
    case = case_of(method, second=second, **({"rerank": True} if method == "cool-fusion" else {}))
    tokenizer, num_cut = case.tokenizers[0], 0
    for stop in ("e", "a", "t", "n"):
        for candidate in case.fast(stop_strings=[stop]).rounds[0][0].candidates:
            if stop in candidate.text:
                ids = vocabulary_of(tokenizer).encode(candidate.text).ids
                if 0 in candidate.proposers or candidate.text == vocabulary_of(tokenizer).text(ids):
                    before = candidate.text.removesuffix(vocabulary_of(tokenizer).text(ids[-1:]))
                    assert stop not in before and not candidate.ends
                    num_cut += 1
    assert num_cut >= 2


class Narrow(SpanStrategy):
    """As somebody writes it who has not read the base class."""

    def choose(self, candidates):
        return Choice(0, [], [])


class Proposes(SpanStrategy):
    def make_proposer(self, member):
        return None


class Tokens(TokenStrategy):
    choose = None


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Narrow,
            r"`cls\.choose` must take \(self, candidates, weights, main_index\), but that of Narrow does not: too",
        ),
        (Proposes, r"`cls\.make_proposer` must take \(self, member_index, members, splitter\), but that of Proposes"),
        (Tokens, r"`cls\.choose` must be a method, but is None in Tokens"),
    ],
)
def test_a_method_of_ones_own_is_looked_at_when_it_is_registered(cls, message):
    with pytest.raises(ValueError, match=message):
        register_strategy("own", cls)
    assert "own" not in STRATEGIES


def spans_by_logits(*logits):
    """Candidates of one token each; per candidate, its logit under each member, `None` where it has no token of it."""
    return [
        ScoredSpan(
            (f" word{index}",),
            [[] if value is None else [[-1.0]] for value in of_members],
            [6],
            (index,),
            [[] if value is None else [value] for value in of_members],
        )
        for index, of_members in enumerate(logits)
    ]


@pytest.mark.parametrize(
    ("logits", "sums", "winner"),
    [
        ([(3.0,), (1.0,)], [0.75, 0.25], 0),  # as in SpecEM's code
        ([(-1.0,), (-9.0,)], [-0.1, -0.9], 0),  # a sum below 0
        ([(1.0,), (-1.0,)], [0.5, -0.5], 0),  # a sum of 0
        ([(3.0,), (-2.9,)], [3 / 5.9, -2.9 / 5.9], 0),  # a sum near 0 does not make a verifier count more
        ([(-1.0, 4.0), (-9.0, 4.0), (None, 2.0)], [0.15, -0.25, -0.35], 0),  # no score is no better than the worst one
        ([(0.0,), (0.0,)], [0.0, 0.0], 0),
    ],
    ids=str,
)
def test_the_largest_logit_wins_whatever_its_sign(logits, sums, winner):
    strategy = SpecFuse(score="logit")
    weights = [1.0] * len(logits[0])
    choice = strategy.choose(spans_by_logits(*logits), weights, None)
    assert choice.winner == winner
    assert [value for (value,) in choice.decided_by] == pytest.approx(sums)
    entries = [
        {"logits": [[] if value is None else [value] for value in of_members], "own": {}} for of_members in logits
    ]
    assert METHODS["specfuse"](score="logit").scores(entries, weights) == pytest.approx([-value for value in sums])


def test_rewards_follow_the_order_of_negative_logits():
    """Of the 4 pairs of others, the drafts are at least as good in 2, 4 and none; 1 is the least that counts."""
    strategy = SpecFuse(score="logit", learning_rate=1.0)
    choice = strategy.choose(spans_by_logits((-9.0,) * 3, (-1.0,) * 3, (-10.0,) * 3), [1.0] * 3, None)
    step = math.sqrt(1 / 3) / 4
    assert choice.winner == 1
    assert [math.log(weight) for weight in choice.weights] == pytest.approx([-2 * step, 0.0, -3 * step])
