"""`hf-adafuse fit` and `headroom`: what they ask, write and say, over kills; with the demo's pair."""

from __future__ import annotations

import copy
import random
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.jobs import PAIR, killed_after, lines_of, questions, read_json, write_lines

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble, demo, enable_adafuse
from hf_adafuse.cli import main, members
from hf_adafuse.confidence import Calibration
from hf_adafuse.confidence.features import feature_names, filled
from hf_adafuse.demo.data import PROMPT
from hf_adafuse.ensemble import AdaFuseEnsemble as EnsembleSpec
from hf_adafuse.lab.cli.fit_report import Figures, FitReport
from hf_adafuse.lab.evaluation import fitting
from hf_adafuse.lab.evaluation.confidence_figures import auroc
from hf_adafuse.lab.evaluation.fitting import Answered, judge
from hf_adafuse.lab.evaluation.headroom import Headroom, same_by
from hf_adafuse.lab.evaluation.metrics import exact_match

NEW = ["--max-new-tokens", "8"]
ASKED = [{"question": text, "answer": [q.answer, "?"]} for text, q in zip(questions(), demo.test_questions(14))][:8]
PROMPTS = [PROMPT.format(**one) for one in ASKED]
PATHS = [model.name_or_path for model, _ in PAIR()]
KINDS = ("members", "fusion", "samples-1")


def pair():
    return [(copy.copy(model), tokenizer) for model, tokenizer in PAIR()]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A folder in which all questions have been asked."""
    folder = tmp_path_factory.mktemp("asked")
    write_lines(folder / "dev.jsonl", ASKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "default_pair", pair)
        patch.setattr(fitting, "_PARTITIONS", 1)
        patch.chdir(folder)
        assert main(["fit", "--data", "dev.jsonl", "--batch-size", "3", *NEW]) == 0
    return folder


@pytest.fixture
def fit(tmp_path, monkeypatch, loaded_once, capsys):
    """Runs a command in a folder of its own: the exit code, and what it printed on both streams."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "_PARTITIONS", 1)
    write_lines(tmp_path / "dev.jsonl", ASKED)

    def run(*flags, command="fit"):
        code = main([command, "--data", "dev.jsonl", *NEW, *flags])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    run.folder, run.file = tmp_path, tmp_path / "adafuse.json"
    return run


@pytest.fixture
def again(fit, asked, monkeypatch):
    """The same where all has been asked: nobody is loaded for it."""
    shutil.copytree(asked / "adafuse.json.answers", fit.folder / "adafuse.json.answers")
    monkeypatch.setattr(EnsembleSpec, "rounds", lambda *args, **options: pytest.fail("asked again"))
    return fit


def texts_of(record):
    return record.get("text"), [(one["text"], one["members"]) for one in record.get("answers", [])]


def choosing(choice, monkeypatch):
    monkeypatch.setattr(fitting, "choice_of", lambda *scores: choice)


def test_each_is_asked_what_it_would_answer_alone(asked):
    records = {kind: lines_of(asked / f"adafuse.json.answers/{kind}.jsonl") for kind in KINDS}
    assert [record["line"] for record in records["members"]] == list(range(1, 9))
    for k, (model, tokenizer) in enumerate(pair()):
        for record, prompt in zip(records["members"][:4], PROMPTS, strict=False):
            ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
            made = model.generate(**ids, max_new_tokens=8, do_sample=False)
            text = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            (own,) = (answer for answer in record["answers"] if k in answer["members"])
            assert own["text"] == text.partition("\n")[0]
    fused = AdaFuseEnsemble(pair(), "robust").texts(PROMPTS, max_new_tokens=8, stop_strings=["\n"], do_sample=False)
    assert [record["text"] for record in records["fusion"]] == [text.partition("\n")[0] for text in fused]
    shares = [sum(answer["share"] for answer in record["answers"]) for record in records["samples-1"]]
    assert shares == pytest.approx([1.0] * 8)


def test_what_is_said_and_written(again):
    done = again()
    assert done.code == 0, done.err
    file, evidence = read_json(again.file), read_json(again.file)["evidence"]
    answers = {kind: lines_of(again.folder / f"adafuse.json.answers/{kind}.jsonl") for kind in KINDS}
    accepted = [one["answer"] for one in ASKED]
    fused = [exact_match(one["text"], right) for one, right in zip(answers["fusion"], accepted, strict=True)]
    own = [
        [
            max(exact_match(answer["text"], right) for answer in record["answers"] if k in answer["members"])
            for record, right in zip(answers["members"], accepted, strict=True)
        ]
        for k in range(2)
    ]
    assert evidence["scores"]["recommended fusion"]["right"] == pytest.approx(sum(fused) / 8)
    assert [evidence["scores"][f"{name} alone"]["right"] for name in ("llama", "gpt_neox")] == pytest.approx(
        [sum(scores) / 8 for scores in own]
    )
    oracle = [max(scores) for scores in zip(*own, strict=True)]
    assert evidence["scores"]["any member right (the most for select)"]["right"] == pytest.approx(sum(oracle) / 8)
    for line in ("majority of the members", "2 drawn answers of llama", "Headroom: the members differ on "):
        assert line in done.out
    # Eight questions are few, and it says what they cannot say.
    assert "With 8 questions differences below 75 points cannot be told from luck" in done.out
    assert "8 questions do not say what selection is worth, either" in done.out
    *_, written, command = done.out.splitlines()
    assert written == "Written: adafuse.json. Ask as you asked here:"
    asks = ["hf-adafuse", "run", "QUESTIONS", "--output", "ANSWERS", "--adafuse", "adafuse.json"]
    asks += [r"--template=Question: {question}\nAnswer:", r"--stop=\n", "--max-new-tokens", "8"]
    assert shlex.split(command) == asks
    assert file["verdict"].startswith("Use ") and file["hf_adafuse"]
    assert "price: 8 questions x (2 members' answers, 1 fused by all, 2 drawn by the best) of at most 8" in done.err


@pytest.mark.parametrize("choice", ["select", "fusion", 1])
def test_the_file_is_read_by_generate_and_by_the_commands(choice, again, monkeypatch, capsys):
    choosing(choice, monkeypatch)
    assert again().code == 0
    monkeypatch.undo()
    monkeypatch.chdir(again.folder)
    file = read_json(again.file)
    assert file["members"] == ([PATHS[1]] if choice == 1 else PATHS)
    config, names = AdaFuseConfig.from_file("adafuse.json")
    assert names == file["members"] and AdaFuseConfig.from_dict(config.to_dict()) == config
    chosen = [loaded for loaded, path in zip(pair(), PATHS, strict=True) if path in names]
    (model, tokenizer), *others = chosen
    ids = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": 8, "do_sample": False, "tokenizer": tokenizer, "return_dict_in_generate": True}
    if others:
        options |= {"assistant_models": [others[0][0]], "assistant_tokenizers": [others[0][1]]}
    with torch.no_grad():
        if choice == 1:
            with pytest.warns(UserWarning, match=f"'adafuse.json' is for '{PATHS[1]}' alone"):
                output = enable_adafuse(model).generate(**ids, adafuse_config="adafuse.json", **options)
            alone = pair()[1][0].generate(**ids, max_new_tokens=8, do_sample=False)
            assert output.sequences.tolist() == alone.tolist()
        else:
            output = enable_adafuse(model).generate(**ids, adafuse_config="adafuse.json", **options)
    if choice == "select":
        assert output.rounds[0].is_calibrated
        candidates = output.rounds[0][0].candidates
        record = lines_of(again.folder / "adafuse.json.answers/members.jsonl")[0]
        assert {one.text for one in candidates} == {one["text"] for one in record["answers"]}
        values = config.method_options["calibration"]
        assert values["members"] == ["llama", "gpt_neox"]
        # It decides as it was judged: by the same features.
        rows = [next(one["features"] for one in record["answers"] if k in one["members"]) for k in (0, 1)]
        (likely,) = Calibration.from_dict(values).probabilities(filled([rows], values["centres"]))
        assert output.confidence[0] == pytest.approx(max(likely), abs=1e-4)
        best = next(one for one in record["answers"] if int(likely.argmax()) in one["members"])
        assert output.rounds[0].text == best["text"]
    elif choice == "fusion":
        assert config == AdaFuseConfig.robust()
    assert main(["generate", PROMPTS[0], "--adafuse", "adafuse.json", *NEW]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == output.rounds[0].text


def test_nothing_is_dropped_before_the_members_are_loaded(again):
    folder = again.folder / "adafuse.json.answers"
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    for command in ("fit", "headroom", "confidence"):
        failed = again("--overwrite", "--model", "missing/a", "--assistant", "missing/b", command=command)
        assert failed.code == 2 and "missing/a" in failed.err
        left = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert {name: left[name] for name in kept} == kept


def test_members_in_another_order_are_refused(again, monkeypatch):
    choosing("select", monkeypatch)
    assert again().code == 0
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"must come in the order \['llama', 'gpt_neox'\] in which the calibration"):
        AdaFuseEnsemble(pair()[::-1], again.file)


def test_equal_questions_count_once(again):
    """The figures are those of the questions, and not of their copies."""
    once = again(command="headroom").out
    write_lines(again.folder / "dev.jsonl", [*ASKED, *ASKED, ASKED[0]])
    done = again(command="headroom")
    assert done.code == 0 and done.out == once
    assert "9 questions have the prompt of an earlier one, which counts once: not asked" in done.err


@pytest.mark.parametrize("answer", [[None, "Lima"], [None], {"text": ["Lima"]}, [["Lima"]]], ids=str)
def test_answers_that_are_none_are_refused(answer, again):
    write_lines(again.folder / "dev.jsonl", [*ASKED, {"question": "Who?", "answer": answer}])
    err = again().err
    assert "line 9 of dev.jsonl: An answer must be a text or a number, but is" in err


def test_the_calibration_is_kept_also_where_it_is_not_used(again, monkeypatch):
    choosing(0, monkeypatch)
    assert again().code == 0
    file = read_json(again.file)
    assert Calibration.from_dict(file["calibration"]).num_candidates == 2 and file["asked"] == PATHS
    assert AdaFuseConfig.from_dict({"method": "select", "calibration": str(again.file)}).method_options


def test_killed_and_started_again(fit, asked, monkeypatch):
    """The price is said before most is asked."""
    with killed_after(8):  # three of each for the price, then two
        first = fit("--batch-size", "3", "--no-progress")
    assert first.code == 130 and not fit.file.exists()
    lines = [line for line in first.err.splitlines() if "hf-adafuse: " in line]
    assert "up to about 144 passes of a member, 3 prompts each" in lines[0]
    assert "3 of 3 first members' answers" in lines[1] and "3 of 3 first fused answers" in lines[2]
    assert "price: about " in lines[3] and "interrupted; the same command goes on" in lines[4] and len(lines) == 6
    rounds, prompts = EnsembleSpec.rounds, []
    monkeypatch.setattr(
        EnsembleSpec, "rounds", lambda self, some, **how: prompts.extend(some) or rounds(self, some, **how)
    )
    assert fit("--batch-size", "3").code == 0
    assert len(prompts) == 3 + 5 + 8  # left of the members' answers, of the fusion's, and all that are drawn
    for kind in KINDS:
        name = f"adafuse.json.answers/{kind}.jsonl"
        records, whole = lines_of(fit.folder / name), lines_of(asked / name)
        assert [record["line"] for record in records] == list(range(1, 9))
        assert [texts_of(record) for record in records] == [texts_of(record) for record in whole]
    found, whole = read_json(fit.file), read_json(asked / "adafuse.json")
    assert (found["evidence"], found["adafuse_config"]) == (whole["evidence"], whole["adafuse_config"])
    assert "`--max-new-tokens` must be 8" in fit("--max-new-tokens", "9").err
    assert fit("--metric", "contains").code == 0  # other judgements of the same answers


def test_headroom_needs_no_answers_and_fit_goes_on_from_it(fit):
    write_lines(fit.folder / "dev.jsonl", [{"question": one["question"]} for one in ASKED])
    done = fit(command="headroom")
    assert done.code == 0 and not fit.file.exists()
    assert "Headroom: the members differ on " in done.out and "95 % interval" in done.out
    assert "To ask one alone, ask " in done.out and "That is a guess." in done.out
    assert "must have the field 'answer', but has none. Mend it; `hf-adafuse headroom` needs none." in fit().err
    write_lines(fit.folder / "dev.jsonl", ASKED)
    assert "It is wrong and another member right on " in fit(command="headroom").out
    assert "8 of 8 members' answers in adafuse.json.answers/members.jsonl, 0 new" in fit().err


def test_confidence_is_of_the_answers_that_fit_has_asked(again):
    done = again(command="confidence")
    assert done.code == 0, done.err
    assert "8 answers of llama, the best member alone: " in done.out and "these figures say little" in done.out
    # What it shows is what the answers' features say.
    answers = lines_of(again.folder / "adafuse.json.answers/members.jsonl")
    own = [next(one for one in record["answers"] if 0 in one["members"]) for record in answers]
    right = [exact_match(one["text"], asked["answer"]) for one, asked in zip(own, ASKED, strict=True)]
    values = [one["features"][0] for one in own]
    (line,) = (line for line in done.out.splitlines() if line.startswith("llama: mean per token") and "\u00b1" in line)
    assert line.split()[4] == f"{100 * auroc(values, right):.1f}"
    (line,) = (
        line for line in done.out.splitlines() if line.startswith("all members: calibrated") and "\u00b1" in line
    )
    assert line.count("\u00b1") == 3
    assert not again.file.exists()


def test_a_line_may_have_a_metric_of_its_own(again):
    texts = [
        next(one["text"] for one in record["answers"] if 0 in one["members"])
        for record in lines_of(again.folder / "adafuse.json.answers/members.jsonl")
    ]
    # By `contains` the first answer is right; by the default it is not.
    lines = [{**one, "answer": text.split()[0]} for one, text in zip(ASKED, texts, strict=True)]
    write_lines(again.folder / "dev.jsonl", [{**one, "metric": "contains"} for one in lines])
    assert again().code == 0
    assert read_json(again.file)["evidence"]["scores"]["llama alone"]["right"] == 1.0
    write_lines(again.folder / "dev.jsonl", [{**lines[0], "metric": "f1"}, *lines[1:]])
    done = again()
    assert done.code == 2 and "line 1 of dev.jsonl: `metric` must be one of ['exact_match'" in done.err


def test_the_members_may_rate_the_answers(fit, monkeypatch):
    choosing("select", monkeypatch)
    write_lines(fit.folder / "dev.jsonl", ASKED[:3])
    done = fit("--with-ratings")
    assert done.code == 0, done.err
    file = read_json(fit.file)
    config = AdaFuseConfig.coerce(fit.file)
    assert config.method_options["with_ratings"] and file["evidence"]["with_ratings"]
    assert file["adafuse_config"]["calibration"]["features"] == feature_names(2, True)
    answers = lines_of(fit.folder / "adafuse.json.answers/members.jsonl")[0]["answers"]
    assert {len(one["features"]) for one in answers} == {len(feature_names(2, True))}
    assert all(1 <= rating <= 5 for one in answers for rating in one["features"][-2:])
    assert main(["generate", PROMPTS[0], "--adafuse", "adafuse.json", *NEW]) == 0
    assert "`--with-ratings` must be true" in fit().err


def failing(monkeypatch, kind, prompts):
    """Has some prompts fail in one of the jobs."""
    rounds = EnsembleSpec.rounds

    def fail(self, asked, **options):
        config = self.model._adafuse_bound.adafuse_config
        method = AdaFuseConfig.coerce(config).method
        if {"select": "members", "words": "fusion"}.get(method) == kind and set(asked) & set(prompts):
            raise ValueError("too long for a member")
        return rounds(self, asked, **options)

    monkeypatch.setattr(EnsembleSpec, "rounds", fail)


def test_a_question_that_fails_is_left_out_or_wrong(fit, monkeypatch):
    failing(monkeypatch, "members", PROMPTS[3:4])
    done = fit()
    assert done.code == 0
    assert "7 questions of dev.jsonl" in done.out and "The first, line 4: too long for a member" in done.out
    assert [one["line"] for one in read_json(fit.file)["evidence"]["failed"]] == [4]
    said = "warning: 1 of 8 questions are left out, because the members failed on them. The first, line 4: too long"
    for command in ("headroom", "confidence"):
        done = fit(command=command)
        assert done.code == 0 and said in done.err
    monkeypatch.undo()


def test_where_all_fail_that_is_an_error_and_they_are_asked_again(fit, monkeypatch):
    failing(monkeypatch, "members", PROMPTS)
    done = fit()
    assert done.code == 2 and not fit.file.exists()
    assert not (fit.folder / "adafuse.json.answers/members.jsonl").exists()
    assert "The members must answer some of the questions, but all 8 failed; the first, line 1: too long" in done.err


@pytest.mark.parametrize("command", ["fit", "headroom", "confidence"])
def test_answers_with_the_features_of_another_version_are_refused(command, again):
    path = again.folder / "adafuse.json.answers/members.jsonl"
    records = lines_of(path)
    for answer in records[2]["answers"]:
        answer["features"].pop()
    write_lines(path, records)
    done = again(command=command)
    width = len(feature_names(2))
    assert done.code == 2 and not again.file.exists()
    assert f"must have the {width} features of this version of hf_adafuse, but have {width - 1}. Use" in done.err


@pytest.mark.parametrize(("right", "said"), [(True, "all candidates of the 3 questions were right"), (False, "wrong")])
def test_three_questions_all_right_or_all_wrong(right, said, again):
    known = {}
    for path in (again.folder / "adafuse.json.answers").glob("*.jsonl"):
        known[path.stem] = lines_of(path)[:3]
        write_lines(path, known[path.stem])
    texts = [[answer["text"] for answer in record["answers"]] for record in known["members"]]
    answers = [[*one, also["text"]] if right else "no such" for one, also in zip(texts, known["fusion"], strict=True)]
    write_lines(again.folder / "dev.jsonl", [{**one, "answer": a} for one, a in zip(ASKED, answers, strict=False)])
    done = again()
    assert done.code == 0, done.err
    assert "Use one member alone: llama." in done.out and said in done.out
    assert "Selection is right on the same questions as llama, and costs more." in done.out
    assert "3 questions do not tell llama from gpt_neox (+0.0 ± 0.0 points)." in done.out
    assert "With 3 questions no difference can be told from luck" in done.out


@pytest.mark.fast
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (8, "8 questions do not tell a from b (-12.5 ± 22.7 points)."),
        (40, "As good on these questions, within a standard error: b (-2.5 ± 4.4 points). Take the cheaper one."),
    ],
)
def test_a_cheaper_member_is_advised_only_on_enough_questions(number, said):
    first = [1.0, 1.0, 0.0] + [0.0] * (number - 3)
    second = [0.0, 0.0, 1.0] + [0.0] * (number - 3)
    none = [0.0] * number
    members = [list(pair) for pair in zip(first, second, strict=True)]
    judged = judge(Answered(members, [[[1.0], [1.0]]] * number, none, range(number)))
    figures = Figures(judged, headroom=None, majority=none, drawn=none, failed=[], metrics="contains")
    report = FitReport(figures, ["a", "b"], ["a", "b"], SimpleNamespace(with_ratings=False), "")
    assert report._equals() == [said]


@pytest.mark.fast
def test_means_over_partitions_are_won_in_part():
    rng = random.Random(0)
    right = [[float(rng.random() < 0.5) for _ in range(2)] for _ in range(40)]
    rows = [[[rng.random()] for _ in range(2)] for _ in range(40)]
    judged = judge(Answered(right, rows, [0.0] * 40, range(40)))
    assert not {0.0, 1.0}.issuperset(judged.select)
    headroom = Headroom.of([["a", "b"]] * 40, [[-1.0, -2.0]] * 40, [same_by("contains")] * 40)
    figures = Figures(judged, headroom, [0.0] * 40, [0.0] * 40, failed=[], metrics="contains (30), last_number (10)")
    args = {"data": "d.jsonl", "few_shot": "5", "chat": True, "stop": ["-#\n"], "max_new_tokens": 9}
    args |= {"dtype": "bfloat16", "device_map": None, "trust_remote_code": True, "allow_http": False}
    args |= {"api_key_env": None, "served_tokenizer": "T", "served_option": [("deadline", 60)]}
    report = FitReport(figures, ["a", "b"], ["a", "b"], SimpleNamespace(**args, with_ratings=False), "{question}")
    lines = report.text().splitlines()
    assert lines[0].startswith("40 questions of d.jsonl, contains (30), last_number (10), in points")
    (shown,) = (line for line in lines if line.strip().startswith("select: the likeliest answer"))
    assert shown.endswith("in part") and sum("in part" in line for line in lines) <= 2
    scores = report.to_dict()["evidence"]["scores"]
    assert "won" not in scores["select: the likeliest answer"] and scores["recommended fusion"]["won"] == 0
    command, examples = report.command(Path("out.json")).splitlines()
    flags = r"'--template={question}' --chat '--stop=-#\n' --max-new-tokens 9 --dtype bfloat16 --served-tokenizer T"
    flags += " --trust-remote-code --served-option deadline=60 --few-shot EXAMPLES"
    assert command.endswith(f"--adafuse out.json {flags}")
    assert examples == "EXAMPLES has the first 5 lines of d.jsonl."


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "a"], "`--assistant` must be given, but is not"),
        (["--few-shot", "8"], "`--few-shot` must be fewer than the 8 questions"),
        (["--few-shot", "7"], "The questions must be 2 or more different ones, but 'dev.jsonl' has 1"),
        (["--metric", "f1"], "argument --metric: invalid choice: 'f1'"),
        (["--out", "-"], "`--output` must be a file"),
        (["--template", "{q}"], "line 1 of dev.jsonl: "),
    ],
)
def test_what_cannot_be_asked(flags, message, fit):
    done = fit(*flags)
    assert done.code == 2 and message in done.err
    assert {path.name for path in fit.folder.iterdir()} == {"dev.jsonl"}


def test_files_that_are_none(fit):
    for text, message in (("{", "cannot be read"), ("[]", "has no JSON object"), ('{"max_words": 0}', "max_words")):
        fit.file.write_text(text)
        assert main(["generate", "Who?", "--adafuse", "adafuse.json"]) == 2
        with pytest.raises(ValueError, match=message):
            AdaFuseConfig.coerce(fit.file)
    fit.file.write_text('{"members": ["a", "b"], "adafuse_config": {"preset": "robust", "max_word_tokens": 9}}')
    assert AdaFuseConfig.coerce("adafuse.json") == AdaFuseConfig.robust().changed({"max_word_tokens": 9})
    assert main(["generate", "Who?", "--adafuse", "adafuse.json", "--model", "a"]) == 2
    assert main(["generate", "Who?", "--adafuse", "adafuse.json", "--preset", "paper"]) == 2
