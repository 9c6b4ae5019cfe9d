"""The paper's tables as values: their rows, what is compared, how it is laid out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from hf_adafuse import AdaFuseConfig, SpanStrategy
from hf_adafuse.decoding.strategies.registry import STRATEGIES
from hf_adafuse.demo.paired import Mean
from hf_adafuse.lab.evaluation.candidates import Contestant
from hf_adafuse.lab.paper.experiments import NAMES, THRESHOLDS, make_experiment
from hf_adafuse.lab.paper.report import Report, table
from hf_adafuse.lab.paper.rounds import read_round
from hf_adafuse.lab.paper.scores import Scores, average, read_scores
from hf_adafuse.lab.paper.values import TASKS, Experiment, adafuse, has_spans, slug, usable_peers
from hf_adafuse.outputs import AdaFuseCandidate, AdaFuseRound
from hf_adafuse.rounds.plain_json import with_nulls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_members", [2, 3])
def test_every_row_is_a_method_that_there_is(name, num_members):
    experiment = make_experiment(name, num_members)
    assert experiment.name == name and set(experiment.tasks) <= set(TASKS)
    everyone = tuple(range(num_members))
    for candidate in experiment.candidates:
        assert candidate.members == everyone[: len(candidate.members)] or candidate.is_alone
        assert candidate.is_alone or isinstance(candidate.config, AdaFuseConfig)
    assert experiment.headline in experiment.candidates
    for contrast in experiment.contrasts:
        assert {contrast.candidate, *contrast.others} <= set(experiment.candidates)
    names = [slug(candidate) for candidate in experiment.candidates]
    assert len(set(names)) == len(names)


def test_the_settings_of_the_figures():
    fixed = [one.config for one in make_experiment("fig2", 2).candidates[:3]]
    assert [(one.commitment, one.max_words) for one in fixed] == [("fixed", 1), ("fixed", 2), ("fixed", 3)]
    taus = [one.config for one in make_experiment("fig6", 2).candidates]
    assert [one.margin_threshold for one in taus] == list(THRESHOLDS) and {one.num_branches for one in taus} == {1}
    branches = [one.config for one in make_experiment("fig7", 2).candidates]
    assert [(one.exploration, one.num_branches) for one in branches] == [
        (kind, number) for kind in ("diverse", "beam") for number in (1, 2, 3, 4, 5)
    ]
    assert [len(one.members) for one in make_experiment("table2", 4).candidates] == [2, 3, 4]
    assert {one.config for one in make_experiment("table2", 4).candidates} == {AdaFuseConfig()}
    with pytest.raises(ValueError, match="The members must be 2 or more, but are 1"):
        make_experiment("fig2", 1)
    with pytest.raises(ValueError, match=r"`name` must be one of table1, .*, but is 'fig9'"):
        make_experiment("fig9", 2)


def test_an_experiment_without_some_candidates():
    experiment = make_experiment("fig7", 2)
    beams = [one for one in experiment.candidates if one.settings.get("exploration") == "beam"]
    left = experiment.without(beams)
    assert left.candidates == experiment.candidates[:5] and left.contrasts == [] and left.headline in left.candidates
    assert experiment.without([]) == experiment


def test_the_best_of_more_than_two_members_is_no_better_one():
    labels = [make_experiment("table1", number).contrasts[0].label for number in (2, 3)]
    assert labels == ["AdaFuse - better member", "AdaFuse - best member"]


def test_the_same_settings_are_the_same_folder():
    assert slug(Contestant((1,))) == "2_alone"
    assert slug(adafuse((0, 1), "x", num_branches=3, margin_threshold=0.7)) == "1+2_adafuse"
    assert slug(adafuse((0, 1), "y", num_branches=1)) == "1+2_adafuse_num_branches=1"
    assert slug(Contestant((0, 1), "z", {"method": "sweetspan"})) == "1+2_sweetspan"


@pytest.mark.parametrize("name", ["models/Pair RM", "models-Pair/RM", "models-Pair-RM", "b_num_fused=2", "a" * 300])
def test_other_settings_are_another_folder(name):
    def folder(**options):
        return slug(Contestant((0, 1), "z", {"method": "blender", "method_options": options}))

    own = folder(ranker=name, num_fused=2)
    assert own.startswith("1+2_blender_num_fused=2_ranker=") and re.fullmatch(r"[A-Za-z0-9.=+_-]{1,140}", own)
    assert own == folder(num_fused=2, ranker=name)
    others = ["models Pair/RM", "models-Pair-RM ", f"{name}b", f"{name[:200]}c", f"{name}_num_fused=2"]
    assert own not in [folder(ranker=other, num_fused=2) for other in others] + [folder(ranker=name)]
    assert folder(ranker="b", num_fused=2) != folder(num_fused="2_ranker=b")


def test_peers_that_cannot_be_used_are_left_out_with_the_reason(monkeypatch):
    class Missing(SpanStrategy):
        def __init__(self, ranker):
            raise ImportError("It needs a library.")

    monkeypatch.setitem(STRATEGIES, "blender", Missing)
    monkeypatch.delitem(STRATEGIES, "deepen", raising=False)
    options = {"blender": {"ranker": "PairRM"}, "sweetspan": {"num_words": 2}}
    found, left_out = usable_peers(("blender", "deepen", "sweetspan"), options)
    assert found == {"SweetSpan": {"method": "sweetspan", "method_options": {"num_words": 2}}}
    assert left_out == {"LLM-Blender": "It needs a library.", "DeePEn": "no method 'deepen' is registered"}


def test_a_blender_without_its_ranker_is_not_called_one():
    found, left_out = usable_peers(("blender",))
    assert (found, left_out) == ({"LLM-Blender, by NLL": {"method": "blender"}}, {})


def test_what_has_rounds_of_words():
    pair = (0, 1)
    assert has_spans(adafuse(pair, "x")) and has_spans(Contestant(pair, "x", {"method": "sweetspan"}))
    assert not has_spans(Contestant((0,))) and not has_spans(Contestant(pair, "x", {"method": "rerank"}))


def samples(scores, sizes=()):
    words = [{"words": [" w"] * (size - 1), "ends": True} for size in sizes]
    return [
        {"exact_match": score, "f1": 0.0, "rounds": words if number == 0 else []} for number, score in enumerate(scores)
    ]


def test_scores_and_words_of_samples():
    ours = read_scores("nq", samples([1.0, 0.0, 1.0, 1.0], [1, 1, 2, 4]), has_rounds=True)
    assert ours.metric == "exact_match" and (ours.mean.value, ours.mean.n) == (75.0, 4)
    assert ours.mean.error == pytest.approx(25.0)
    assert ours.words_per_round == 2.0 and ours.shares == {1: 0.5, 2: 0.25, 3: 0.0, 4: 0.25}
    alone = read_scores("nq", samples([0.0, 0.0, 1.0, 0.0], [1]), has_rounds=False)
    assert math.isnan(alone.words_per_round) and alone.shares == {}
    gained = ours.above(alone)
    assert gained.difference.value == 50.0 and gained.p_value == pytest.approx(0.5)  # two wins, two ties


def test_scores_of_whole_sets():
    sample = {"sentence_chrf": 3.0, "chrf": ((["a"], "b")), "bleu": (["a b c d"], "a b c d")}
    scores = read_scores("flores_en_de", [sample] * 3, has_rounds=True)
    assert scores.metric == "bleu" and scores.mean.value == pytest.approx(100) and scores.mean.error == 0
    worse = Scores("bleu", [(["a b c d"], "a b c x")] * 2 + [(["a b c d"], "y")])
    gained = scores.above(worse)
    assert gained.difference.value > 30 and 0 < gained.p_value < 0.05
    assert math.isnan(scores.above(scores).p_value)


def test_an_average_over_tasks():
    found = average([Mean(10.0, 3.0, 5), Mean(20.0, 4.0, 7)])
    assert (found.value, found.error, found.n) == (15.0, 2.5, 12)


def report(tasks=("nq", "squad")):
    alone, other, ours = Contestant((0,)), Contestant((1,)), adafuse((0, 1), "ours", num_branches=1)
    experiment = replace(make_experiment("table1", 2, {}), candidates=[alone, other, ours])
    contrast = replace(experiment.contrasts[0], candidate=ours)
    experiment = replace(experiment, headline=ours, contrasts=[contrast])
    values = {"nq": ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]), "squad": ([1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0])}
    scores = {
        (task, candidate): read_scores(task, samples(given, [1, 2]), has_spans(candidate))
        for task in tasks
        for candidate, given in zip((alone, other, ours), values[task], strict=True)
    }
    return Report(experiment, ["a", "b|c"], tasks, scores, {"gsm8k": "no file."}, {"limit": 4})


def test_the_better_member_is_that_of_each_task():
    made = report()
    found = {one["task"]: one for one in made.json()["differences"]}
    assert (found["nq"]["over"], found["nq"]["value"]) == ("2: b|c", 25.0)
    assert (found["squad"]["over"], found["squad"]["value"]) == ("1: a", -25.0)
    rows = made.score_rows()
    assert rows[0] == ["", "NQ", "SQuAD", "average"] and rows[1] == ["n", "4", "4", "8"]
    assert rows[-1] == ["AdaFuse - better member", "+25.0 ± 25.0", "-25.0 ± 25.0", "+0.0 ± 17.7"]
    (average,) = made.json()["average_differences"]
    assert (average["what"], average["value"], average["n"]) == ("AdaFuse - better member", 0.0, 8)
    assert average["standard_error"] == pytest.approx(math.hypot(25, 25) / 2)
    assert "The best of several rows is picked by its score on the same questions." in made.markdown()


def test_a_difference_to_one_row_is_to_no_best_one():
    made = report()
    contrast = replace(made.experiment.contrasts[0], others=made.experiment.candidates[:1])
    assert "The best of" not in replace(made, experiment=replace(made.experiment, contrasts=[contrast])).markdown()


def test_reasons_that_are_the_same_are_said_once():
    made = replace(report(), left_out={"nq": "no file.", "beam": "too much", "squad": "no file."})
    assert "Left out: NQ, SQuAD (no file); beam (too much)." in made.markdown()


def test_markdown_and_json():
    made = report()
    text = made.markdown("in between")
    assert "Left out: GSM8K (no file)." in text and "Members: 1 a, 2 b|c." in text
    assert "exact match (NQ, SQuAD)" in text and "| 2: b\\|c " in text
    assert text.index("in between") < text.index("1.50 (50.0 / 50.0 / 0.0)")
    values = json.loads(json.dumps(with_nulls(made.json()), allow_nan=False))
    assert values["averages"][2]["who"] == "ours" and values["averages"][2]["value"] == 62.5
    assert [cell["words_per_round"] for cell in values["cells"]] == [None, None, 1.5, None, None, 1.5]
    alone = report(["nq"])
    assert "average" not in alone.markdown()
    assert alone.json()["averages"] == alone.json()["average_differences"] == []


def test_cells_that_were_not_asked():
    few = Experiment(
        "x", "x", "x", ("nq", "squad"), [Contestant((0,)), Contestant((1,))], Contestant((0,)),
        few=[Contestant((1,))], few_tasks=("nq",),
    )  # fmt: skip
    assert few.cells(["nq", "squad"]) == [
        ("nq", Contestant((0,))), ("squad", Contestant((0,))), ("nq", Contestant((1,)))
    ]  # fmt: skip
    made = report()
    left = {pair: scores for pair, scores in made.scores.items() if pair != ("squad", Contestant((1,)))}
    rows = replace(made, scores=left).score_rows()
    assert rows[3][2:] == ["-", "-"] and rows[-1][2:] == ["-", "-"] and rows[3][1] != "-"
    assert replace(made, scores=left).json()["average_differences"] == []


def test_a_table_is_aligned():
    assert table([["", "nq"], ["a", "10.0 ± 1.0"]]) == [
        "|     |         nq |",
        "|-----|-----------:|",
        "| a   | 10.0 ± 1.0 |",
    ]
    assert {len(line) for line in table([["", "n|q"], ["a|b|c|d", "1"]])} == {21}


def test_a_round_read_back():
    candidates = [AdaFuseCandidate(" a", [" a"], False, [0], [0.5, None], math.inf, dropped="x")]
    committed = AdaFuseRound(" a", [" a"], False, 0, None, candidates, [[0.1], []], 1, True)
    assert read_round(json.loads(json.dumps(with_nulls(committed.to_dict())))) == committed
