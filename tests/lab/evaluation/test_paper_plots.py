"""What the pictures of the paper's tables and figures show, with one task and with several."""

from __future__ import annotations

import pytest

from hf_adafuse.lab.paper import plots
from hf_adafuse.lab.paper.experiments import make_experiment
from hf_adafuse.lab.paper.report import Report
from hf_adafuse.lab.paper.scores import Scores
from hf_adafuse.lab.paper.values import has_spans

TAUS = [f"tau = {tau}" for tau in ("0", "0.1", "0.3", "0.5", "0.7", "0.9", "1.1")]
BRANCHES = [f"B = {number}" for number in range(1, 6)]


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """The axes of the picture of a report; none where nothing is drawn."""

    def draw(name, tasks, num_members=2):
        experiment = make_experiment(name, num_members, {})
        scores = {
            (task, one): Scores("exact_match", [0.0, 100.0], [1, 2, 5] if has_spans(one) else [])
            for task, one in experiment.cells(tasks)
        }
        drawn = []
        save = plots._save
        monkeypatch.setattr(plots, "_save", lambda figure, *rest: drawn.append(figure) or save(figure, *rest))
        plots.save_scores(Report(experiment, ["a", "b", "c"], tasks, scores), tmp_path / "made.png")
        assert [path.name for path in tmp_path.iterdir()] == ["made.png"] * bool(drawn)
        return [ax for figure in drawn for ax in figure.axes]

    return draw


def rows_of(ax):
    """The labels of a panel of shares, top down. Each has a stack of bars."""
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(ax.patches) == 3 * len(labels)  # rounds of 1, of 2 and of more words
    return labels


@pytest.mark.parametrize("name", ["table1", "table2", "fig2", "fig3", "fig4", "fig6", "fig7"])
@pytest.mark.parametrize("tasks", [["nq"], ["nq", "triviaqa"], ["squad", "gsm8k", "triviaqa"]])
def test_every_row_has_a_name_of_its_own(name, tasks, panels):
    for num_members in (2, 3):
        *_, shares = panels(name, tasks, num_members)
        labels = rows_of(shares)
        assert len(set(labels)) == len(labels) >= len(tasks)


@pytest.mark.parametrize(
    ("name", "tasks", "expected", "title"),
    [
        ("fig6", ["triviaqa"], TAUS, "words per round"),
        ("fig6", ["triviaqa", "gsm8k"], [f"{task}, {tau}" for tau in TAUS for task in ("TriviaQA", "GSM8K")], None),
        ("fig6", ["nq", "triviaqa", "gsm8k"], ["NQ", "TriviaQA", "GSM8K"], "words per round of tau = 0.7"),
        ("fig7", ["nq", "squad", "gsm8k"], ["NQ", "SQuAD", "GSM8K"], "words per round of diverse, B = 3"),
        ("table1", ["nq", "squad"], ["NQ", "SQuAD"], "words per round of AdaFuse, B = 1"),
        ("table2", ["nq", "squad", "gsm8k"], ["NQ", "SQuAD", "GSM8K"], "words per round of 2 members"),
    ],
)
def test_shares_of_rounds(name, tasks, expected, title, panels):
    *_, shares = panels(name, tasks)
    assert rows_of(shares) == expected
    assert shares.get_title() == (title or "words per round")


def test_bars_stand_in_a_group_for_each_task(panels):
    bars, _ = panels("fig2", ["nq", "triviaqa", "gsm8k"])
    assert [label.get_text() for label in bars.get_xticklabels()] == ["NQ", "TriviaQA", "GSM8K"]
    assert len(bars.patches) == 4 * 3
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["1 word", "2 words", "3 words", "adaptive"]


def test_lines_stand_for_tasks_that_all_candidates_were_asked(panels):
    lines, bars, _ = panels("fig4", ["nq", "squad", "triviaqa"])
    assert [text.get_text() for text in lines.get_legend().get_texts()] == ["NQ", "TriviaQA"]
    assert [label.get_text() for label in lines.get_xticklabels()] == ["1", "2", "3", "4", "5"]
    assert len(bars.patches) == 2 * 3  # B = 1 and B = 3
    (bars, shares) = panels("fig4", ["squad"])  # outside `few_tasks`: no line
    assert len(bars.patches) == 2 and rows_of(shares) == ["B = 1", "B = 3"]


@pytest.mark.parametrize("name", ["table1", "fig2", "fig4", "fig6", "fig7"])
def test_nothing_is_drawn_without_tasks(name, panels):
    assert panels(name, []) == []
