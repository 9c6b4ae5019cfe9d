"""Rounds that show themselves: as lists, as text, as HTML, as plots."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from html.parser import HTMLParser

import matplotlib
import pytest
from support.cases import Case
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseCandidate, AdaFuseConfig, AdaFuseRound, AdaFuseRounds, AdaFuseRoundsBatch, plots
from hf_adafuse.decoding.scored_spans import ScoredSpan
from hf_adafuse.decoding.strategies.registry import make_strategy
from hf_adafuse.rounds.trace_html import COLOURS, MAX_PROMPTS
from hf_adafuse.rounds.trace_text import count_wins, decision, format_round, short_name, winning_members

matplotlib.use("Agg")  # before the first figure: there is no screen

NAMES = ["the main model", "assistant 1 (models/<b>other)"]


def candidate(text, words, ends, proposers, nlls):
    score = sum(nlls) / len(nlls)
    return AdaFuseCandidate(text, words, ends, proposers, nlls, score, decided_by=[score])


def made_rounds():
    """Both commit " is <i>Lima", the second word uncertain; then the assistant ends the text, sure of it."""
    spans = [
        candidate(" is <i>Lima", [" is", " <i>Lima"], False, [0, 1], [0.3, 0.2]),
        candidate(' is "C&A"', [" is", ' "C&A"'], False, [0], [0.8, 1.9]),
    ]
    margins = [[0.9, 0.35], [0.8, 0.5]]
    end = candidate("\n", ["\n"], True, [1], [0.5, 0.1])
    lost = AdaFuseCandidate(" x", [" x"], False, [0], [None, 2.0], math.inf, dropped="it cannot be represented")
    return [
        AdaFuseRound(spans[0].text, spans[0].words, False, 0, 0, spans, margins, 4, True),
        AdaFuseRound("\n", ["\n"], True, 1, 1, [lost, end], [[0.1], [0.95, 0.71]], 2, True),
    ]


def forbidden_round():
    """Every candidate was ruled out: the main model's greedy word was taken."""
    lost = AdaFuseCandidate(" x", [" x"], False, [1], [None, 2.0], math.inf)
    return AdaFuseRound(" no", [" no"], False, 0, None, [lost], [[0.2], [0.9]], 1, True)


class Page(HTMLParser):
    """What a reader of the HTML sees: open tags must be closed in turn."""

    def __init__(self, html):
        super().__init__()
        self.open, self.titles, self.text, self.uncertain, self.tables = [], [], "", [], 0
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.open.append((tag, attrs.get("style") or ""))
        self.tables += tag == "table"
        if "title" in attrs:
            self.titles.append(attrs["title"])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        in_text = any(tag == "div" and "pre-wrap" in style for tag, style in self.open)
        if in_text and "sub" not in tags:
            self.text += data
            if "dotted" in self.open[-1][1]:
                self.uncertain.append(data)


def test_rounds_are_lists():
    rounds, batch = AdaFuseRounds(made_rounds(), NAMES, 0.7), AdaFuseRoundsBatch([made_rounds()], NAMES, 0.7)
    assert isinstance(rounds, list)
    assert rounds == made_rounds()
    assert batch == [made_rounds()]
    assert repr(rounds) == repr(made_rounds())
    assert batch[0].names == ["the main model", "assistant 1 (<b>other)"]
    for same in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        for value in (rounds, batch):
            other = same(value)
            assert type(other) is type(value)
            assert other == value
            assert str(other) == str(value)
            assert other._repr_html_() == value._repr_html_()


def test_an_output_is_made_of_them():
    models = [tiny_model("llama", "byte_level"), tiny_model("gpt2", "sentencepiece")]
    tokenizers = [TOKENIZERS["byte_level"](), TOKENIZERS["sentencepiece"]()]
    case = Case(models, tokenizers, AdaFuseConfig(), ["Once upon a time", "She"], 12)
    output = case.fast()
    assert isinstance(output.rounds, AdaFuseRoundsBatch)
    names = [member["name"] for member in output.stats["members"]]
    assert output.rounds.names == ["the main model (LlamaForCausalLM)", *names[1:]] and names[0] == "the main model"
    assert output.rounds.threshold == 0.7
    assert count_wins([c for rounds in output.rounds for c in rounds], 2) == [
        m["wins"] for m in output.stats["members"]
    ]
    for rounds in output.rounds:
        page = Page(rounds._repr_html_())
        text = "".join(committed.text for committed in rounds)
        assert page.text.replace("<end>", "").strip() == text.strip()
        assert len(page.titles) == len(rounds)
        assert all(f"Round {number}  " in str(rounds) for number in range(1, len(rounds) + 1))
    again = pickle.loads(pickle.dumps(output.rounds))
    assert again == output.rounds
    fields = dataclasses.asdict(output.rounds[0][0])
    assert fields == output.rounds[0][0].to_dict()
    case.config = AdaFuseConfig(commitment="fixed")
    assert case.fast().rounds.threshold is None


def test_text_of_several_prompts():
    batch = AdaFuseRoundsBatch([made_rounds(), []])
    assert str(batch).startswith("Prompt 1\n\nMembers  0: member 0  1: member 1\n\nRound 1  [is <i>Lima]  2 words")
    assert "Winners proposed by  0: 1  1: 2\n\nPrompt 2\n\nMembers  0: member 0  1: member 1\n\n0 rounds" in str(batch)
    assert str(AdaFuseRoundsBatch([made_rounds()])) == str(AdaFuseRounds(made_rounds()))


def test_a_terminal_gets_the_text():
    class Printer:
        def text(self, text):
            self.shown = text

    printer, rounds = Printer(), AdaFuseRounds(made_rounds(), NAMES)
    rounds._repr_pretty_(printer, cycle=False)
    assert printer.shown == str(rounds)


def test_html_shows_text_and_marks_what_was_uncertain():
    html = AdaFuseRounds(made_rounds(), NAMES, 0.7)._repr_html_()
    page = Page(html)
    assert page.text == " is <i>Lima\n <end>"
    assert page.uncertain == ["<i>Lima"]
    assert page.tables == 1
    assert page.titles[0].split("\n") == [
        "fused NLL, the lowest wins (NLL under the main model, assistant 1 (<b>other))",
        '\N{BLACK RIGHT-POINTING SMALL TRIANGLE} 0.250 (0.300, 0.200) " is <i>Lima" by 0 1',
        '\N{FIGURE SPACE} 1.350 (0.800, 1.900) " is "C&A"" by 0',
        "margins  0: 0.90 0.35  1: 0.80 0.50",
    ]
    assert "<i>" not in html
    assert "<b>other" not in html
    assert "assistant 1 (&lt;b&gt;other)" in html
    assert all(colour in html for colour in COLOURS[:2])
    assert COLOURS[2] not in html


@pytest.mark.parametrize(
    ("threshold", "uncertain"),
    [(None, []), (0.0, []), (0.95, ["is", "<i>Lima", "<end>"]), (2.0, ["is", "<i>Lima", "<end>"])],
)
def test_html_marks_by_threshold(threshold, uncertain):
    page = Page(AdaFuseRounds(made_rounds(), NAMES, threshold)._repr_html_())
    assert [word for word in page.uncertain if word] == uncertain


def test_html_of_a_round_without_winner():
    rounds = AdaFuseRounds([forbidden_round()], NAMES, 0.7)
    assert winning_members(rounds[0]) == [0]
    page = Page(rounds._repr_html_())
    assert page.text == " no"
    assert "every candidate was ruled out" in rounds._repr_html_()


def test_html_puts_no_space_into_a_word_whose_characters_are_of_several_tokens():
    first, _ = made_rounds()
    rest = dataclasses.replace(first, text="\N{OK HAND SIGN}s", words=["\N{OK HAND SIGN}s"])
    end = dataclasses.replace(unfinished_round(), ends=True)
    page = Page(AdaFuseRounds([first, unfinished_round(), rest, end], NAMES)._repr_html_())
    assert page.text == " is <i>Lima\N{OK HAND SIGN}s <end>"


def test_html_escapes_what_a_method_calls_its_criterion():
    first, _ = made_rounds()
    html = AdaFuseRounds([dataclasses.replace(first, criterion="a<b>")], NAMES)._repr_html_()
    assert "a<b>" not in html and "a&lt;b&gt; (lowest)" in html


def test_html_of_many_prompts_is_cut_and_says_so():
    batch = AdaFuseRoundsBatch([made_rounds()] * (MAX_PROMPTS + 3), NAMES)
    page = Page(batch._repr_html_())
    assert page.tables == MAX_PROMPTS
    assert "3 more prompts are not shown" in batch._repr_html_()


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("assistant 1 (org/models/qwen3)", "assistant 1 (qwen3)"),
        (r"assistant 2 (C:\models\qwen3)", "assistant 2 (qwen3)"),
        ("assistant 2 (GPT2LMHeadModel)", "assistant 2 (GPT2LMHeadModel)"),
        ("the main model", "the main model"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short


@pytest.fixture
def pyplot(monkeypatch):
    from matplotlib import pyplot

    def refuse(*_, **__):
        raise AssertionError("a plot must not show itself")

    monkeypatch.setattr(pyplot, "show", refuse)
    yield pyplot
    pyplot.close("all")


def test_plots_show_the_numbers(pyplot):
    rounds = AdaFuseRoundsBatch([made_rounds(), [forbidden_round()], []], NAMES, 0.7)
    words = plots.plot_words(rounds)
    assert [bar.get_height() for bar in words.patches] == [1, 2]  # the end is a word
    assert words.get_title() == "1.67 words per round"
    wins = plots.plot_wins(rounds)
    assert [bar.get_width() for bar in wins.patches] == [1, 1, 1, 1]
    margins = plots.plot_margins(rounds)
    assert sum(bar.get_height() for bar in margins.patches) == 9
    assert margins.get_title() == "44 % of words uncertain"
    scores = plots.plot_scores(rounds)
    assert scores.get_title() == "Fused score of prompt 1 (the lowest wins)"
    assert [label.get_text() for label in scores.get_xticklabels()] == ["is <i>Lima", "\\n <end>"]
    heights = [list(line.get_ydata()) for line in scores.lines if len(line.get_ydata())]
    assert heights == [[1.35], [0.25, 0.25], [0.25, 0.25], [0.3, 0.3]]  # the dropped candidate has no score


def test_a_plot_of_votes_shows_who_has_most(pyplot):
    (first, *_) = made_rounds()
    shares = zip(first.candidates, (0.25, 0.75), strict=False)
    candidates = [dataclasses.replace(one, score=-share, decided_by=[share]) for one, share in shares]
    votes = dataclasses.replace(first, candidates=candidates, winner=1, criterion="share of votes", highest_wins=True)
    scores = plots.plot_scores([votes])
    assert (scores.get_title(), scores.get_ylabel()) == ("Share of votes (the highest wins)", "share of votes")
    heights = [list(line.get_ydata()) for line in scores.lines if len(line.get_ydata())]
    assert heights[0] == [0.25] and all(height == [0.75, 0.75] for height in heights[1:])


def heights_of(axes):
    """What the plot of scores shows, without the line at 0."""
    lines = [line for line in axes.lines if len(line.get_ydata()) and line.get_transform() == axes.transData]
    return [float(height) for line in lines for height in line.get_ydata()]


def test_rounding_below_0_turns_no_plot_of_scores_over(pyplot):
    """As of the end of a text with several ids, whose probabilities add up to a little more than 1."""
    first, second = made_rounds()
    end = dataclasses.replace(second.candidates[1], score=-5.6e-9, decided_by=[math.exp(5.6e-9)])
    second = dataclasses.replace(second, candidates=[second.candidates[0], end], highest_wins=True)
    scores = plots.plot_scores([first, second])
    assert (scores.get_title(), scores.get_ylabel()) == ("Fused score (the lowest wins)", "NLL")
    assert heights_of(scores) == [1.35, 0.25, 0.25, 0.25, 0.25, 0.0, 0.0] and scores.get_ylim()[0] == 0


def test_a_plot_of_preferences_shows_those_below_0(pyplot):
    """LLM-Blender's are differences of logits: of two answers one is above 0, and one is below."""
    first, _ = made_rounds()
    values = zip(first.candidates, (1.5, -1.5), strict=True)
    candidates = [dataclasses.replace(one, score=-value, decided_by=[value]) for one, value in values]
    first = dataclasses.replace(
        first, candidates=candidates, winner=0, criterion="pairwise preference", highest_wins=True
    )
    scores = plots.plot_scores([first])
    assert scores.get_title() == "Pairwise preference (the highest wins)"
    assert heights_of(scores) == [-1.5, 1.5, 1.5, 1.5, 1.5]
    lowest, highest = scores.get_ylim()
    assert lowest < -1.5 and highest > 1.5 and scores.get_yscale() == "linear"


def unfinished_round():
    """A token that is a part of a character adds nothing to the text yet."""
    candidates = [AdaFuseCandidate("", [], False, [0], [0.1, 0.1], 0.1, decided_by=[0.9])]
    return AdaFuseRound("", [], False, 0, 0, candidates, [[0.9], [0.9]], 1, True)


def test_a_plot_of_words_counts_rounds_without_a_word(pyplot):
    words = plots.plot_words([unfinished_round(), *made_rounds(), unfinished_round()])
    assert [bar.get_height() for bar in words.patches] == [2, 0, 2]
    assert [text.get_text() for text in words.texts] == ["50 %", "0 %", "50 %"]
    assert words.get_title() == "1.00 words per round"
    (bar,) = plots.plot_words(made_rounds()[:1] * 2).patches
    assert bar.get_height() == 2


def test_a_plot_of_a_slice_keeps_names_and_threshold(pyplot):
    batch = AdaFuseRoundsBatch([[], made_rounds(), made_rounds()], NAMES, 0.7)
    for part in (batch, batch[:2], list(batch), batch[1]):
        margins = plots.plot_margins(part)
        assert [text.get_text() for text in margins.get_legend().get_texts()] == [
            f"{k}: {name}" for k, name in enumerate(batch.names)
        ]
        assert "% of words uncertain" in margins.get_title()


def test_plots_draw_where_they_are_told(pyplot):
    _, axes = pyplot.subplots(4)
    for plot, ax in zip((plots.plot_words, plots.plot_wins, plots.plot_margins, plots.plot_scores), axes, strict=True):
        assert plot(made_rounds(), ax=ax) is ax  # a plain list will do
        assert ax.has_data()
    assert len(pyplot.get_fignums()) == 1


def test_overview_draws(pyplot):
    figure = plots.overview(AdaFuseRounds([*made_rounds(), forbidden_round()] * 3, NAMES, 0.7))
    figure.draw_without_rendering()
    assert [bool(ax.get_title()) for ax in figure.axes] == [True] * 4


@pytest.mark.parametrize("rounds", [[], [[], []], AdaFuseRounds()])
def test_plots_need_a_round(rounds):
    with pytest.raises(ValueError, match="`rounds` must hold at least one round, but is empty"):
        plots.plot_words(rounds)


def test_plots_without_matplotlib_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    with pytest.raises(ImportError, match=r'pip install "hf_adafuse\[plots\]"'):
        plots.overview(made_rounds())


RULES = {
    "the paper's": {},
    "recommended": AdaFuseConfig.robust().to_dict(),
    "horizon": {"horizon": True},
    "words": {"method": "words", "part": "distinct", "model_weights": (0.3, 0.7)},
    "unite": {"method": "unite"},
    "gac": {"method": "gac"},
    "safe": {"method": "safe"},
    "sweetspan": {"method": "sweetspan"},
    "cool-fusion": {"method": "cool-fusion"},
    "specfuse": {"method": "specfuse", "learning_rate": 0.5},
    "majority": {"method": "majority", "model_weights": (0.3, 0.7)},
    "rerank": {"method": "rerank"},
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_what_a_trace_shows_is_what_decided(rule):
    """The winner has the best value by the criterion that the round names, at the word at which the others lost."""
    num_contested = 0
    for seed in range(4):
        models = [tiny_model("llama", "byte_level", seed), tiny_model("gpt2", "sentencepiece", seed + 1)]
        tokenizers = [TOKENIZERS["byte_level"](), TOKENIZERS["sentencepiece"]()]
        config = AdaFuseConfig.from_dict(RULES[rule])
        case = Case(models, tokenizers, config, ["Once upon a time", "She"], 12)
        for committed in (one for rounds in case.fast().rounds for one in rounds):
            assert math.isclose(sum(committed.weights), 1) and len(committed.weights) == 2
            assert format_round(1, committed).count("wins") == (len(committed.candidates) > 1)
            values = decision(committed)
            if values is not None and values[1] is not None:
                own, other = values
                assert own >= other - 1e-6 if committed.highest_wins else own <= other + 1e-6
                num_contested += own != other
    assert num_contested >= 2


@pytest.mark.parametrize(
    ("settings", "criterion"),
    [
        ({}, "fused NLL"),
        ({"method": "words"}, "mean probability"),
        ({"method": "words", "mean": "geometric"}, "geometric mean probability"),
        ({"preset": "robust"}, "root mean probability"),
    ],
)
def test_a_trace_names_the_mean_that_decided(settings, criterion):
    models = [tiny_model("llama", "byte_level", 0), tiny_model("gpt2", "sentencepiece", 1)]
    tokenizers = [TOKENIZERS["byte_level"](), TOKENIZERS["sentencepiece"]()]
    ((first, *_),) = Case(models, tokenizers, AdaFuseConfig.coerce(settings), ["Once upon a time"], 4).fast().rounds
    assert first.criterion == criterion
    assert criterion in format_round(1, first)


def test_a_word_that_lost_shows_where():
    """By hand: both begin with " a"; then " b" at 0.9 of one member and 0.5 of the other beats " c"."""

    def span(words, first, second, proposer):
        log_probs = [[[math.log(value)] for value in of_member] for of_member in (first, second)]
        return ScoredSpan(words, log_probs, [2] * len(words), (proposer,))

    spans = [
        span((" a", " b"), [0.5, 0.9], [0.5, 0.5], 0),
        span((" a", " c"), [0.5, 0.1], [0.5, 0.5], 1),
        span((" d",), [0.2], [0.4], 1),
    ]
    choice = make_strategy(AdaFuseConfig(method="words")).choose(spans, [1.0, 1.0], None)
    assert choice.winner == 0
    assert [[round(value, 6) for value in of_one] for of_one in choice.decided_by] == [[0.5, 0.7], [0.5, 0.3], [0.3]]


def test_a_page_of_rounds_stands_alone():
    page = AdaFuseRoundsBatch([made_rounds()] * 2, NAMES, 0.7).to_html("a <title>")
    assert page.startswith("<!doctype html>") and "<title>a &lt;title&gt;</title>" in page and "Prompt 2" in page
    assert AdaFuseRounds(made_rounds(), NAMES, 0.7).to_html().count("<table") == 1
