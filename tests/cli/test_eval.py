"""`hf-adafuse eval`: scores beside the harness's own, what it writes, going on after a stop, and what it refuses."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import warnings

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from support.jobs import lines_of, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_adafuse import AdaFuseConfig
from hf_adafuse.cli import main, members
from hf_adafuse.lab.cli import eval as eval_command
from hf_adafuse.lab.evaluation import harness
from hf_adafuse.lab.evaluation.candidates import RULES
from hf_adafuse.lab.evaluation.ensemble_scores import warn_of_span_rule
from hf_adafuse.lab.evaluation.language_model import AdaFuseLM

CHOICE = """\
task: trees
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} the"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


@pytest.fixture(autouse=True)
def no_survey(monkeypatch):
    """The harness surveys the machine, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    texts = ["a time", "a cat", "the tree", "a big cat", "to sit in a tree", "She said"]
    write_lines(folder / "nq.jsonl", [{"question": f"Once upon {text}", "answer": ["cat", "tree"]} for text in texts])
    return folder


@pytest.fixture
def evaluate(folders, data, tmp_path, capsys):
    """Runs the command on the task nq; gives the exit code and the two streams."""

    def run(*more, tasks="nq"):
        flags = ["--model", folders[0], "--assistant", folders[1], "--max-word-tokens", "6", "--num-fewshot", "1"]
        given = ["--tasks", tasks, "--data", str(data), "--output", str(tmp_path / "out"), "--max-new-tokens", "6"]
        code = main(["eval", *given, *flags, *more])
        return code, *capsys.readouterr()

    run.output = tmp_path / "out"
    return run


def test_the_ensemble_and_its_members(evaluate, folders, data):
    code, out, err = evaluate("--members-alone", "--limit", "3")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    above = ["above", "the", "best", "member", "+-", "s.e."]
    assert rows[0] == ["task", "metric", "who", "value", "+-", "s.e.", "n", *above]
    assert [row[:3] for row in rows[1:4]] == [["nq", "exact_match", who] for who in ("ensemble", "member", "member")]
    assert len(rows) == 7 and all("3" in (row[-1], row[-3]) for row in rows[1:])
    samples = lines_of(evaluate.output / "ensemble" / "samples_nq.jsonl")
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2]
    for sample in samples:
        text = "".join(committed["text"] for committed in sample["rounds"])
        assert text.startswith(sample["resps"][0][0]) and sample["metrics"] == ["exact_match", "f1"]
        assert isinstance(sample["f1"], float) and sample["arguments"]["gen_args_0"]["arg_0"].endswith("Answer:")
    results = json.loads((evaluate.output / "results.json").read_text(encoding="utf-8"))
    assert results["settings"]["limit"] == 3 and next(iter(results["methods"])) == "ensemble"
    assert results["methods"]["ensemble"]["results"]["nq"]["sample_len"] == 3
    for number, folder in enumerate(folders, start=1):
        alone = lines_of(evaluate.output / f"member-{number}" / "samples_nq.jsonl")
        assert [sample["resps"][0][0].strip() for sample in alone] == own_answers(folder, data)


def own_answers(folder, data):
    """What the harness's own model type writes with a member."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder), tokenizer=tokenizer, device="cpu")
    tasks = harness.load_tasks(["nq"], str(data), 1)
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=tasks.objects,
        num_fewshot=1,
        limit=3,
        gen_kwargs={"max_gen_toks": 6},
        task_manager=tasks.manager,
    )
    return [sample["resps"][0][0].strip() for sample in found["samples"]["nq"]]


@pytest.mark.parametrize("flag", ["--progress", "--no-progress"])
def test_the_bars_are_those_of_the_ensemble(flag, evaluate):
    """The harness has one per task of its own, for the prompts it makes."""
    code, _, err = evaluate("--limit", "2", flag)
    assert code == 0 and ("ensemble: generate_until: 100%" in err) == (flag == "--progress")
    assert err.count("%|") == err.count("generate_until:")


def write_task(tmp_path, rows, form):
    """A folder with the task `trees`, which asks these rows in this form."""
    write_lines(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / "tasks"
    folder.mkdir()
    beginning = CHOICE.partition("output_type")[0].format(data=tmp_path / "rows.jsonl", cache=tmp_path / "cache")
    (folder / "trees.yaml").write_text(beginning + form, encoding="utf-8")
    return folder


def test_perplexities_have_standard_errors(evaluate, tmp_path):
    rows = [{"question": text} for text in ("Once upon a time", "She is there.", "There was a big tree in the park")]
    folder = write_task(tmp_path, rows, ROLLING)
    code, out, _ = evaluate("--members-alone", "--include-path", str(folder), tasks="trees")
    lines = [line.split() for line in out.splitlines()[1:]]
    assert code == 0 and [line[1] for line in lines] == ["word_perplexity"] * 3 + ["bits_per_byte"] * 3
    rows = lines_of(evaluate.output / "ensemble" / "samples_trees.jsonl")
    values, sizes = zip(*(row["bits_per_byte"] for row in rows))
    without = [-(sum(values) - v) / (sum(sizes) - s) / math.log(2) for v, s in zip(values, sizes)]
    error = math.sqrt(2 / 3 * sum((one - sum(without) / 3) ** 2 for one in without))
    assert lines[3][-2:] == [f"{error:.4f}", "3"] and float(lines[0][-2]) > 0


LAST_WORDS = """\
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " tree"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_perplexities_of_last_words(evaluate, tmp_path):
    """A perplexity is no mean over questions: nothing is said of differences. What an ensemble writes, is not asked."""
    rows = [{"question": text} for text in ("Once upon a", "She is there in the", "There was a big")]
    folder = write_task(tmp_path, rows, LAST_WORDS)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, out, err = evaluate("--members-alone", "--include-path", str(folder), tasks="trees")
    assert code == 0 and err.count("`acc` of trees counts what every member would write by itself") == 1
    perplexities, accuracies = [
        [line for line in out.splitlines() if name in line.split()[1:2]] for name in ("perplexity", "acc")
    ]
    assert len(perplexities) == len(accuracies) == 3
    assert all(line.split()[-1] == "3" for line in perplexities)  # the number of questions, and no difference
    assert sum(line.split()[-1] != "3" for line in accuracies) == 2


def test_started_again_it_goes_on(evaluate, monkeypatch):
    assert evaluate("--limit", "2")[0] == 0
    first = lines_of(evaluate.output / "ensemble" / "samples_nq.jsonl")
    asked, generate = [], AdaFuseLM._generate
    monkeypatch.setattr(AdaFuseLM, "_generate", lambda self, *a: asked.extend(a[0]) or generate(self, *a))
    assert evaluate("--batch-size", "2")[0] == 0
    assert len(asked) == 3
    assert lines_of(evaluate.output / "ensemble" / "samples_nq.jsonl")[:2] == first
    code, _, err = evaluate("--method", "adafuse")
    assert code == 2 and "`--method` must be left out, as in the earlier run" in err and "--overwrite" in err
    kept = {path: path.read_bytes() for path in evaluate.output.rglob("*.*")}
    code, _, err = evaluate("--overwrite", "--model", "missing/model")
    assert code == 2 and "missing/model" in err
    assert {path: path.read_bytes() for path in evaluate.output.rglob("*.*")} == kept
    assert evaluate("--methods", "adafuse", "--overwrite", "--limit", "1")[0] == 0
    assert len(asked) == 6 and not (evaluate.output / "ensemble" / "samples_nq.jsonl").exists()


def test_a_multiple_choice_of_ones_own(evaluate, tmp_path):
    rows = [{"question": f"Once upon {text}", "choices": ["cat", "tree"], "gold": 0} for text in ("a", "the", "a big")]
    write_lines(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / "tasks"
    folder.mkdir()
    text = CHOICE.format(data=tmp_path / "rows.jsonl", cache=tmp_path / "cache")
    (folder / "trees.yaml").write_text(text, encoding="utf-8")
    code, out, _ = evaluate("--members-alone", "--include-path", str(folder), tasks="trees")
    assert code == 0 and [line.split()[:2] for line in out.splitlines()[1:]] == [["trees", "acc"]] * 3
    (sample, *_) = lines_of(evaluate.output / "ensemble" / "samples_trees.jsonl")
    assert len(sample["resps"]) == 2 and "rounds" not in sample
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warn_of_span_rule.cache_clear()
        methods = ["--methods", "unite,gac", "--overwrite"]
        code, out, err = evaluate(*methods, "--include-path", str(folder), tasks="trees")
    assert code == 0 and out.count("trees  acc  ") == 4
    assert err.count("hf-adafuse: warning: Log-likelihoods (multiple choice, perplexity) under methods other") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--include-path", "nowhere"], "`--include-path` must be a folder, but 'nowhere' is none"),
        (["--data", "nowhere"], "`--data` must be a folder, but 'nowhere' is none"),
        (["--tasks", "squad"], "`--data` must hold one file squad*.jsonl for the task squad"),
        (["--tasks", ","], "must be names with commas between"),
        (["--num-fewshot", "6"], "must have more lines than the 6 worked examples, but has 6"),
        (["--num-fewshot", "-1"], "must be a whole number of at least 0"),
        (["--threshold", "-1"], "`margin_threshold` must be a number of at least 0"),
        (["--limit", "0"], "must be a whole number of at least 1"),
    ],
)
def test_mistakes_are_named_before_models_are_loaded(flags, message, evaluate, monkeypatch):
    monkeypatch.setattr(members, "load_members", None)
    code, out, err = evaluate(*flags)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert not evaluate.output.exists()


def test_without_the_harness(evaluate, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = evaluate()
    assert code == 2 and 'Install it with `pip install "hf_adafuse[eval]"`' in err


def test_an_output_that_is_a_file(evaluate):
    evaluate.output.write_text("", encoding="utf-8")
    code, _, err = evaluate()
    assert code == 2 and "`--output` must be a folder or a new name" in err


def test_several_methods_in_one_table(evaluate):
    names = ["sweetspan", "robust", "gac"]
    code, out, err = evaluate("--methods", ",".join(names), "--limit", "2")
    assert code == 0, err
    scores, costs = (table.splitlines() for table in out.strip().split("\n\n"))
    for name in [*names, "member 1", "member 2"]:
        assert sum(f"  {name} " in line for line in scores) == 2  # exact match and F1
    results = json.loads((evaluate.output / "results.json").read_text())
    own = sum(cost["seconds"] for name, cost in results["costs"].items() if name.startswith("member"))
    assert [line.split()[0] for line in costs[1:4]] == names
    for line in costs[1:4]:
        name, seconds, ratio, passes = line.split()
        cost = results["costs"][name]
        assert (seconds, ratio) == (f"{cost['seconds']:.1f}", f"{cost['seconds'] / own:.2f}")
        assert passes == (f"{cost['passes'] / cost['words']:.2f}" if cost["words"] else "-")
    assert all(cost["passes"] > 0 for cost in results["costs"].values())
    assert evaluate("--methods", ",".join(names), "--limit", "2")[1] == out  # the seconds too: nothing is asked anew


def test_rules_by_name_and_how_far_each_is_above_the_best_member(evaluate):
    names = ["span", "word geometric 3:1", "word gate 0.5"]
    code, out, err = evaluate("--methods", ",".join(names), "--limit", "3")
    assert code == 0, err
    folders = ["member-1", "member-2", "method-span", "method-word-geometric-3-1", "method-word-gate-0.5"]
    assert sorted(path.name for path in evaluate.output.iterdir() if path.is_dir()) == sorted(folders)
    scores = out.partition("\n\n")[0].splitlines()
    assert scores[0].split()[-6:] == ["above", "the", "best", "member", "+-", "s.e."]
    of = {folder: lines_of(evaluate.output / folder / "samples_nq.jsonl") for folder in folders}
    for metric in ("exact_match", "f1"):
        values = {folder: [sample[metric] for sample in samples] for folder, samples in of.items()}
        best = max(folders[:2], key=lambda folder: sum(values[folder]))
        for folder, name in zip(folders[2:], names, strict=True):
            (line,) = (line for line in scores if f"{metric}  " in line and f"  {name}  " in line)
            steps = [one - other for one, other in zip(values[folder], values[best], strict=True)]
            error = statistics.stdev(steps) / math.sqrt(3)
            assert line.split()[-2:] == [f"{statistics.mean(steps):+.4f}", f"{error:.4f}"]


def test_the_settings_of_rules():
    parser = argparse.ArgumentParser()
    eval_command.add_arguments(parser)
    args = parser.parse_args(["--tasks", "nq", "--model", "a", "--assistant", "b", "--assistant", "c"])
    configs = eval_command._configs(["rules"], args)
    assert configs["word 3:1"] == AdaFuseConfig(method="words", model_weights=(3, 1, 1))
    assert configs["robust"] == AdaFuseConfig.robust() and configs["UniTE"] == AdaFuseConfig(method="unite")
    assert len(configs) == len(RULES)


def test_settings_for_all_leave_a_rule_what_it_sets():
    parser = argparse.ArgumentParser()
    eval_command.add_arguments(parser)
    assert "methods other than AdaFuse and words are scored by AdaFuse's span rule" in " ".join(
        parser.format_help().split()
    )
    flags = ["--model", "a", "--assistant", "b", "--weights", "1,2", "--max-word-tokens", "5"]
    args = parser.parse_args(["--tasks", "nq", *flags])
    configs = eval_command._configs(["robust", "word 3:1", "word", "unite"], args)
    assert configs == {
        "robust": AdaFuseConfig.robust().changed({"max_word_tokens": 5}),
        "word 3:1": AdaFuseConfig(method="words", model_weights=(3, 1), max_word_tokens=5),
        "word": AdaFuseConfig(method="words", model_weights=(1, 2), max_word_tokens=5),
        "unite": AdaFuseConfig(method="unite", model_weights=(1, 2), max_word_tokens=5),
    }
    assert "but for rules and presets with weights of their own" in " ".join(parser.format_help().split())


def test_methods_go_with_no_settings_of_one(evaluate):
    assert evaluate("--methods", "unit", "--limit", "2")[0] == 2
    code, _, err = evaluate("--methods", "unite", "--branches", "2", "--limit", "2")
    assert code == 2 and "branches" in err
