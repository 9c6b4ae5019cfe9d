"""Batch jobs: every question answered once, in input order, as `generate()` answers it, over kills and processes."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from tiny import TOKENIZERS, tiny_model

import hf_adafuse
from hf_adafuse import AdaFuseDecodingError, chat_inputs, demo, enable_adafuse
from hf_adafuse.cli import main, members
from hf_adafuse.cli.answers import Answers
from hf_adafuse.cli.batches import Answerer
from hf_adafuse.cli.questions import Question, Template, read_questions
from hf_adafuse.demo.data import PROMPT

NEW = 10
SETTINGS = ["--max-new-tokens", str(NEW)]
PAIR = functools.cache(demo.load_pair)


@functools.cache
def questions() -> list[str]:
    head, tail = PROMPT.split("{question}")
    return [q.prompt.removeprefix(head).removesuffix(tail) for q in demo.test_questions(14)]


@functools.cache
def direct(prompt: str):
    """The rounds that `generate()` gives for the prompt alone."""
    (model, tokenizer), (other, other_tokenizer) = PAIR()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = enable_adafuse(copy.copy(model)).generate(
        **inputs,
        tokenizer=tokenizer,
        assistant_models=[other],
        assistant_tokenizers=[other_tokenizer],
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    return output.rounds[0]


def answers_to(asked: list[str]) -> list[str]:
    return ["".join(r.text for r in direct(PROMPT.format(question=question))) for question in asked]


def lines_of(path: Path) -> list[dict]:
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content
    return [json.loads(line) for line in content.splitlines()]


def write_lines(path: Path, records) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    monkeypatch.setattr(members, "default_pair", lambda: [(copy.copy(model), tok) for model, tok in PAIR()])


@pytest.fixture
def job(tmp_path):
    """Runs the command on `questions.jsonl`; gives the exit code."""
    asked = [{"id": f"q{index}", "question": question} for index, question in enumerate(questions())]
    write_lines(tmp_path / "questions.jsonl", asked)

    def run(*more, source=None):
        source = source or str(tmp_path / "questions.jsonl")
        return main(["run", source, "--output", str(tmp_path / "answers.jsonl"), *SETTINGS, *more])

    run.input, run.output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    return run


def rewrite(job, change) -> None:
    """Put other records into the input."""
    write_lines(job.input, change([json.loads(line) for line in job.input.read_text(encoding="utf-8").splitlines()]))


def left_over(job) -> set[str]:
    return {path.name for path in job.output.parent.iterdir()} - {job.input.name, job.output.name}


# What is answered


def test_answers_are_those_of_generate_in_input_order(job, capsys):
    assert job("--batch-size", "4") == 0
    records = lines_of(job.output)
    assert [record["text"] for record in records] == answers_to(questions())
    assert len({record["text"] for record in records}) > 7
    for number, (record, question) in enumerate(zip(records, questions(), strict=True), start=1):
        assert record["line"] == number
        assert record["input"] == {"id": f"q{number - 1}", "question": question}
        assert record["prompt"] == PROMPT.format(question=question)
        assert record["words"] == len(record["text"].split())
        assert record["ended"] is direct(record["prompt"])[-1].ends
    assert {record["ended"] for record in records} == {True, False}  # some numbers are long
    assert left_over(job) == {"answers.jsonl.settings.json"}
    out, err = capsys.readouterr()
    assert out == ""
    (summary,) = err.splitlines()  # no bar, as this is no terminal
    assert summary.startswith(f"hf-adafuse: 14 of 14 answers in {job.output}, 14 new, ")
    whole = job.output.read_bytes()
    assert job("--batch-size", "3", "--overwrite", "--progress") == 0  # nor does the batch size change anything
    assert job.output.read_bytes() == whole
    err = capsys.readouterr().err
    assert "14/14" in err
    assert "words/s" in err
    assert job() == 0
    assert " 14 of 14 answers " in capsys.readouterr().err
    assert job.output.read_bytes() == whole


def test_a_template_of_ones_own_and_settings(job):
    rewrite(job, lambda asked: [{"where": " Peru", "n": 3}, {"where": " Italy", "n": None}])
    assert (
        job("--template", "Question: What is the capital of{where}?\\nAnswer:", "--threshold", "2", "--stop", "m") == 0
    )
    records = lines_of(job.output)
    assert [record["prompt"] for record in records] == [
        "Question: What is the capital of Peru?\nAnswer:",
        "Question: What is the capital of Italy?\nAnswer:",
    ]
    assert records[0]["text"] == " Lim"
    assert not records[0]["ended"]


def test_standard_input(job, monkeypatch):
    content = "\ufeff" + job.input.read_text(encoding="utf-8").replace("\n", "\r\n\r\n", 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert job(source="-") == 0
    records = lines_of(job.output)
    assert [record["text"] for record in records] == answers_to(questions())
    assert [record["line"] for record in records[:5]] == [1, 3, 5, 7, 8]  # blank lines count, and are no questions


def test_chat_is_rendered_by_each_members_own_template(tmp_path):
    names, pair = ["byte_level", "sentencepiece"], []
    for k, (architecture, name) in enumerate(zip(["llama", "qwen3"], names, strict=True)):
        model, tokenizer = copy.deepcopy(tiny_model(architecture, name, k)), copy.deepcopy(TOKENIZERS[name]())
        tokenizer.chat_template = "{% for m in messages %}[" + name + "]{{ m['content'] }}{% endfor %}"
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        pair.append((model, tokenizer))
    asked = ["there was a cat", "once upon a time"]
    write_lines(tmp_path / "in.jsonl", [{"prompt": text} for text in asked])
    flags = ["--model", str(tmp_path / names[0]), "--assistant", str(tmp_path / names[1]), "--max-word-tokens", "4"]
    arguments = ["--output", str(tmp_path / "out.jsonl"), "--chat", *SETTINGS, *flags]
    assert main(["run", str(tmp_path / "in.jsonl"), *arguments]) == 0
    inputs = chat_inputs([[{"role": "user", "content": text}] for text in asked], [tok for _, tok in pair])
    output = enable_adafuse(pair[0][0]).generate(
        **inputs,
        tokenizer=pair[0][1],
        assistant_models=[pair[1][0]],
        assistant_tokenizers=[pair[1][1]],
        adafuse_config={"max_word_tokens": 4},
        max_new_tokens=NEW,
        return_dict_in_generate=True,
    )
    texts = ["".join(committed.text for committed in rounds) for rounds in output.rounds]
    assert [record["text"] for record in lines_of(tmp_path / "out.jsonl")] == texts


# The input


@pytest.mark.parametrize(
    ("template", "record", "prompt"),
    [
        ("{a}", {"a": "x"}, "x"),
        ("{{{a}}}\\n\\t\\\\n{b}", {"a": "{b}\\n", "b": 3}, "{{b}\\n}\n\t\\n3"),
        ("{a}{b}", {"a": "", "b": ["é", True, None]}, '["é", true, null]'),
        ("{a}", {"a": " \ttext "}, " \ttext "),
    ],
)
def test_templates(template, record, prompt):
    assert Template(template).fill(record) == prompt


@pytest.mark.parametrize("template", ["", "no field", "{}", "{0}", "{a", "a}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}"])
def test_templates_that_are_refused(template):
    with pytest.raises(ValueError, match=r"`--template` must (be text with fields|have a field) as \{name\}"):
        Template(template)


BAD = {
    "{": "must be a JSON object, but is not JSON in UTF-8",
    "[1]": "must be a JSON object, but is of type list",
    '"text"': "must be a JSON object, but is of type str",
    '{"answer": 1, "id": 2}': "must have the field 'question', but its fields are: answer, id",
    '{"question": null}': "must have a value in the field 'question', but it is null",
    '{"question": " \\n"}': "must make a prompt, but the template's fields are empty",
    '{"question": "\\ud800"}': "must be valid Unicode text",
    "[" * 100_000: "must be a JSON object, but is not JSON",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20])
def test_bad_lines_are_found(line, tmp_path):
    path = tmp_path / "in.jsonl"
    write_lines(path, [{"question": "a"}, line, {"question": "b"}])
    first, bad, last = read_questions(str(path), Template("{question}"))
    assert (first.prompt, last.prompt, last.line) == ("a", "b", 3)
    assert (bad.line, bad.prompt) == (2, None)
    assert bad.error.startswith(BAD[line])


def test_a_line_that_is_not_utf8(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"question": "a"}\n{"question": "\xff"}\n')
    assert "not JSON in UTF-8" in read_questions(str(tmp_path / "in.jsonl"), Template("{question}"))[1].error


def test_a_dataset(job, monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return [{"question": question, "seen": time.struct_time} for question in questions()[:2]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert job("--split", "test", "--subset", "easy", source="some/quiz") == 0
    assert asked == [("some/quiz", "easy", "test")]
    assert [record["text"] for record in lines_of(job.output)] == answers_to(questions()[:2])


def test_a_real_dataset(job, tmp_path, monkeypatch):
    """A folder of files is a dataset, too, and needs no Hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "quiz"
    folder.mkdir()
    write_lines(folder / "train.jsonl", [json.dumps({"question": question}) for question in questions()[:2]])
    assert job("--split", "train", source=str(folder)) == 0
    assert [record["text"] for record in lines_of(job.output)] == answers_to(questions()[:2])


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("some/quiz", [], "'some/quiz' is no file"),
        ("missing.jsonl", ["--split", "test"], "'missing.jsonl' is no file"),
        ("some/quiz", ["--split", "test"], 'pip install "hf_adafuse[datasets]"'),
        (".", [], "`--split` must be given with a dataset"),
        (None, ["--split", "test"], "`--split` and `--subset` must be left out with a file"),
        (None, ["--template", "none"], "`--template` must have a field"),
        (None, ["--batch-size", "0"], "must be a whole number of at least 1, but is '0'"),
        (None, ["--threshold", "-1"], "`margin_threshold` must be"),
        (None, ["--assistant", "x"], "`--model` must be given with `--assistant`"),
        (None, ["--chat"], "`tokenizers[0]` must have a chat template"),
        (None, ["--weights", "1,2,3"], "`model_weights` must be one per member"),
        (os.devnull, [], "no file"),
    ],
)
def test_errors_of_the_user(source, more, message, job, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    assert job(*more, source=source) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-adafuse: error: ")
    assert message in line
    assert not job.output.exists() or not job.output.read_bytes()


def test_an_empty_input(job, capsys):
    write_lines(job.input, ["", " "])
    assert job() == 2
    assert "The questions must not be empty" in capsys.readouterr().err


# Errors on the way


def test_a_bad_line_stops_before_anything_is_loaded(job, capsys, monkeypatch):
    monkeypatch.setattr(members, "load_members", None)
    rewrite(job, lambda asked: [asked[0], "{", asked[1], {"id": 3}])
    assert job() == 2
    err = capsys.readouterr().err
    assert f"line 2 of {job.input}: must be a JSON object" in err
    assert "So have 1 others." in err
    assert not job.output.exists()


def test_bad_lines_are_skipped_when_asked(job, capsys):
    rewrite(job, lambda asked: [asked[0], "{", asked[1], {"id": 3}, asked[2]])
    assert job("--on-error", "skip", "--batch-size", "2") == 0
    records = lines_of(job.output)
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    assert [r["text"] for r in records if "error" not in r] == answers_to(questions()[:3])
    assert [r["input"] for r in records if "error" in r] == [None, {"id": 3}]
    err = capsys.readouterr().err
    assert f"hf-adafuse: warning: line 2 of {job.input}: must be a JSON object" in err
    assert f"hf-adafuse: warning: line 4 of {job.input}: must have the field 'question'" in err
    assert "5 new (2 with an error)" in err
    whole = job.output.read_bytes()
    assert job("--on-error", "skip") == 0
    assert job.output.read_bytes() == whole


def test_a_prompt_that_is_too_long_takes_no_other_with_it(job, capsys):
    rewrite(job, lambda asked: [asked[0], {"question": "why " * 3000}, asked[1]])
    assert job("--on-error", "skip") == 0
    first, long, last = lines_of(job.output)
    assert [first["text"], last["text"]] == answers_to(questions()[:2])
    assert "must be at most" in long["error"]
    assert long["text"] == ""
    assert "warning: line 2 of" in capsys.readouterr().err


@pytest.fixture
def failing(monkeypatch):
    """The fourth question fails in its third round, in a batch and alone."""
    generate = Answerer._generate

    def fail(self, prompts):
        if any(questions()[3] in prompt for prompt in prompts):
            raise AdaFuseDecodingError("assistant 1", "out of memory", 3, [" half an"] * len(prompts), [])
        return generate(self, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "_generate", fail)
        yield patch


def test_a_failure_stops_and_the_next_run_asks_again(job, failing, capsys):
    assert job() == 1
    records = lines_of(job.output)
    assert [record["text"] for record in records] == [*answers_to(questions()[:3]), " half an"]
    assert records[3]["error"] == "assistant 1 failed in round 3: out of memory"
    err = capsys.readouterr().err
    assert f"hf-adafuse: error: line 4 of {job.input}: assistant 1 failed in round 3: out of memory. The answers" in err
    assert job() == 1  # still failing: nothing is doubled
    assert [record["line"] for record in lines_of(job.output)] == [1, 2, 3, 4]
    failing.undo()
    assert job() == 0
    records = lines_of(job.output)
    assert [record["text"] for record in records] == answers_to(questions())
    assert not any("error" in record or "stopped" in record for record in records)


def test_a_failure_is_skipped_when_asked(job, failing, capsys):
    assert job("--on-error", "skip", "--batch-size", "5") == 0
    records = lines_of(job.output)
    assert records[3]["text"] == " half an"
    assert records[3]["error"] == "assistant 1 failed in round 3: out of memory"
    del records[3]
    assert [record["text"] for record in records] == answers_to(questions()[:3] + questions()[4:])
    assert f"warning: line 4 of {job.input}: assistant 1" in capsys.readouterr().err


# Started again


def test_other_settings_are_refused(job, capsys):
    rewrite(job, lambda asked: asked[:2])
    assert job("--stop", "x") == 0
    whole = job.output.read_bytes()
    for more, message in (
        (["--stop", "y"], '`--stop` must be ["x"], as in the earlier run'),
        ([], "but is left out"),
        (["--stop", "x", "--threshold", "0.5"], "`--threshold` must be left out, as in the earlier run"),
        (["--stop", "x", "--chat"], "`--chat` must be left out"),
        (["--stop", "x", "--template", "{id}"], "`--template` must be"),
    ):
        assert job(*more) == 2
        assert message in capsys.readouterr().err
    rewrite(job, lambda asked: asked[::-1])
    assert job("--stop", "x") == 2
    assert "The questions must be those of the earlier run, but the answer to line 1" in capsys.readouterr().err
    rewrite(job, lambda asked: asked[1:])
    assert job("--stop", "x") == 2
    assert job.output.read_bytes() == whole
    capsys.readouterr()
    assert job("--overwrite") == 0
    assert len(lines_of(job.output)) == 1


def test_settings_that_gave_no_answer_do_not_bind(job, capsys):
    rewrite(job, lambda asked: asked[:1])
    assert job("--model", "missing/model", "--template", "{question}") == 2
    assert "must be a local folder or a Hub name" in capsys.readouterr().err
    assert job() == 0


@pytest.mark.parametrize("content", ['{"text": "mine"}\n', "mine", '{"line": "1"}\n'])
def test_a_file_of_something_else_is_kept(content, job, capsys):
    job.output.write_text(content)
    assert job() == 2
    assert "`--output` must be a file of this command or a new one" in capsys.readouterr().err
    assert job.output.read_text() == content


def test_an_answer_that_is_none_is_refused(job, capsys):
    rewrite(job, lambda asked: asked[:2])
    assert job() == 0
    first, second = job.output.read_text(encoding="utf-8").splitlines(keepends=True)
    for content in ("null\n" + second, first + "{}\n", second):
        job.output.write_text(content, encoding="utf-8")
        assert job() == 2
        assert "must hold answers" in (err := capsys.readouterr().err) or "those of the earlier run" in err
        assert job.output.read_text(encoding="utf-8") == content


def test_one_run_at_a_time(job, tmp_path, capsys):
    other = Answers(job.output, [])
    other.prepare({})
    assert job() == 2
    assert "must be written by one run at a time" in capsys.readouterr().err
    other.close()
    assert job() == 0


def command(job, *more, launcher=()) -> list[str]:
    return [sys.executable, *launcher, "-m", "hf_adafuse", "run", str(job.input), "--output", str(job.output),
            *SETTINGS, *more]  # fmt: skip


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hf_adafuse.__file__).parents[1])}


def test_killed_and_started_again(job):
    rewrite(job, lambda asked: asked * 4)
    with subprocess.Popen(command(job, "--batch-size", "1"), env=ENVIRONMENT, stderr=subprocess.PIPE) as process:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            if job.output.exists() and job.output.read_bytes().count(b"\n") > 2:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        error = process.stderr.read()
    assert process.returncode == -signal.SIGKILL, error
    before = job.output.read_bytes()
    assert 2 < before.count(b"\n") < 40
    with job.output.open("ab") as file:
        file.write(b'{"line": 99, "input": {"id": "torn')
    assert job() == 0
    assert job.output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    records = lines_of(job.output)
    assert [record["line"] for record in records] == list(range(1, 57))
    assert [record["text"] for record in records] == answers_to(questions() * 4)


# Several processes


def test_two_processes_go_on_from_what_two_killed_ones_left(job):
    assert job() == 0
    whole = job.output.read_bytes()
    lines = whole.splitlines(keepends=True)
    job.output.write_bytes(b"".join(lines[:2]) + lines[2][:9])
    job.output.with_name("answers.jsonl.part1").write_bytes(lines[1] + lines[4] + lines[5] + lines[6][:20])
    job.output.with_name("answers.jsonl.part2").write_bytes(lines[8])
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    arguments = command(job, "--batch-size", "2", launcher=[*torchrun, "--rdzv-endpoint", "localhost:0"])
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert job.output.read_bytes() == whole
    assert left_over(job) == {"answers.jsonl.settings.json"}
    assert done.stderr.count("14 of 14 answers") == 1


def record_of(question: Question) -> dict:
    return {"line": question.line, "prompt": question.prompt, "text": f"answer {question.line}"}


@pytest.mark.parametrize("seed", range(30))
def test_any_number_of_processes_killed_at_any_time(seed, tmp_path):
    rng = random.Random(seed)
    asked = [Question(line, {}, f"prompt {line}") for line in sorted(rng.sample(range(1, 60), 20))]
    path, torn = tmp_path / "answers", b'{"line": 7, "te'
    made = []
    for _ in range(30):
        count = rng.randint(1, 4)
        processes = [Answers(path, asked, index, count) for index in range(count)]
        processes[0].prepare({"model": "a"})
        shares = [answers.load()[index::count] for index, answers in enumerate(processes)]
        processes[0].collect()
        for _ in range(rng.randint(0, 6)):
            index = rng.randrange(count)
            if shares[index]:
                question = shares[index].pop(0)
                made.append(question.line)
                processes[index].write(record_of(question))
            written = [record["line"] for record in lines_of(path)]
            assert written == [question.line for question in asked][: len(written)]  # in order at any time
        if not any(shares):
            break
        processes[0].close()
        victim = rng.choice([path, *sorted(tmp_path.glob("answers.part*"))])
        with victim.open("ab") as file:  # where the kill has torn a line
            file.write(torn[: rng.randrange(len(torn))])
    else:
        pytest.fail("never came to the end")
    processes[0].finish()
    processes[0].close()
    assert sorted(made) == [question.line for question in asked]  # nothing lost, nothing repeated
    assert lines_of(path) == [record_of(question) for question in asked]
    assert {file.name for file in tmp_path.iterdir()} == {"answers", "answers.settings.json"}


def test_a_process_that_stops_does_not_stop_the_order(tmp_path):
    asked = [Question(line, {}, f"prompt {line}") for line in range(1, 6)]
    path = tmp_path / "answers"
    processes = [Answers(path, asked, index, 2) for index in range(2)]
    processes[0].prepare({})
    for answers in processes:
        answers.load()
    processes[0].write(record_of(asked[0]))
    processes[1].write({**record_of(asked[1]), "error": "no", "stopped": True})
    assert processes[0].write(record_of(asked[2])) == []  # waits for the second, which the next run asks again
    processes[0].close()
    again = Answers(path, asked)
    again.prepare({})
    assert [question.line for question in again.load()] == [2, 4, 5]
    again.close()
