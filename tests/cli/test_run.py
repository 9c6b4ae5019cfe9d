"""Batch jobs: every question answered once, in input order, as `generate()` answers it, over kills and processes."""

from __future__ import annotations

import copy
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.jobs import (
    NEW,
    SETTINGS,
    answers_to,
    direct,
    killed_after,
    left_over,
    lines_of,
    questions,
    read_json,
    rewrite,
    write_lines,
)
from support.tiny import TOKENIZERS, tiny_model

import hf_adafuse
from hf_adafuse import chat_inputs, enable_adafuse
from hf_adafuse.cli import main
from hf_adafuse.cli.file_jobs import _Report
from hf_adafuse.demo.data import PROMPT
from hf_adafuse.trees.kv_cache_backend import KVCacheBackend
from hf_adafuse.trees.pass_policy import Policy


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
        assert record["finish_reason"] == ("stop" if direct(record["prompt"])[-1].ends else "length")
    assert {record["finish_reason"] for record in records} == {"stop", "length"}  # some numbers are long
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
    assert (records[0]["text"], records[0]["finish_reason"]) == (" Li", "stop")  # without the text it stops at


def test_examples_that_all_prompts_begin_with_are_read_once(job, monkeypatch):
    """By every member, over all batches; a batch reads what is its own, and filler for its shorter prompts."""
    examples = "".join(f"Question: {question}\nAnswer: 7\n\n" for question in questions()[:6])
    template = examples.replace("{", "{{").replace("}", "}}") + PROMPT
    columns = []
    read = KVCacheBackend._read_prompts

    def counted(self, ids, positions, mask, start, counted):
        columns.append((ids.shape[0], ids.shape[1] - start))
        return read(self, ids, positions, mask, start, counted)

    monkeypatch.setattr(KVCacheBackend, "_read_prompts", counted)
    assert job("--template", template, "--batch-size", "4", "--overwrite") == 0
    texts, shared = [record["text"] for record in lines_of(job.output)], columns[:]
    assert sum(width >= 40 for _, width in shared) == 2  # the examples, by each member
    columns.clear()
    monkeypatch.setattr(Policy, "least_shared_tokens", 10**9)
    assert job("--template", template, "--batch-size", "4", "--overwrite") == 0
    assert [record["text"] for record in lines_of(job.output)] == texts
    assert all(width > 80 for _, width in columns)
    assert sum(r * w for r, w in columns) > 3 * sum(r * w for r, w in shared)


def test_a_job_goes_on_with_the_preset_it_began_with(job, capsys):
    assert job("--preset", "robust") == 0
    assert job("--preset", "robust") == 0
    assert job() == 2
    assert "--preset" in capsys.readouterr().err


def test_answers_behind_examples_end_with_the_line(job):
    """Unless a stop is given, or the answers of the examples have several lines: then they end at an empty line."""
    stops = {}
    for name, answer, flags in [("line", "Lima", []), ("lines", "a\nb", []), ("given", "Lima", ["--stop", "zz"])]:
        rewrite(job, lambda asked, answer=answer: [{"question": q["question"], "answer": answer} for q in asked[:4]])
        assert job("--few-shot", "2", "--overwrite", *flags) == 0
        stops[name] = read_json(job.output.with_name("answers.jsonl.settings.json"))["stop"]
        assert [record["line"] for record in lines_of(job.output)] == [3, 4]
    assert stops == {"line": ["\n"], "lines": ["\n\n"], "given": ["zz"]}


def test_a_text_that_stops_is_without_the_text_it_stops_at(job):
    whole = answers_to(questions()[:6])
    rewrite(job, lambda asked: asked[:6])
    assert job("--stop", "a") == 0
    records = lines_of(job.output)
    assert [record["text"] for record in records] == [text.partition("a")[0] for text in whole]
    assert all(record["finish_reason"] == "stop" for record, text in zip(records, whole, strict=True) if "a" in text)


def test_a_line_every_half_minute_where_there_is_no_terminal(job, monkeypatch, capsys):
    times = iter(range(0, 10**6, 20))
    monkeypatch.setattr("hf_adafuse.demo.job_progress.time", SimpleNamespace(monotonic=lambda: float(next(times))))
    assert job() == 0
    *lines, summary = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"hf-adafuse: \d+ of 14 answers after \d+ s, .* words/s", one) for one in lines)
    assert "14 of 14 answers in" in summary
    assert job("--overwrite", "--no-progress") == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_line_of_a_job_that_goes_on_and_has_no_new_answer_yet(monkeypatch, capsys):
    times = iter((0, 60, 120))
    monkeypatch.setattr("hf_adafuse.demo.job_progress.time", SimpleNamespace(monotonic=lambda: float(next(times))))
    job = SimpleNamespace(questions=range(45), kept="answers", progress=None, unit="words", size_of=len)
    report = _Report(job, written=25, is_main=True)
    report.add([])
    report.add([{"line": 26}])
    none, one = capsys.readouterr().err.splitlines()
    assert none == "hf-adafuse: 25 of 45 answers were there, no new one after 60 s"
    assert re.fullmatch(r"hf-adafuse: 26 of 45 answers after 120 s, .* words/s", one)


def test_a_page_for_each_answer(job):
    rewrite(job, lambda asked: asked[:3])
    assert job("--html", str(job.output.parent / "pages")) == 0
    pages = {path.name: path.read_text(encoding="utf-8") for path in (job.output.parent / "pages").iterdir()}
    assert sorted(pages) == ["1.html", "2.html", "3.html"]
    assert all(answer.strip() in pages[f"{line}.html"] for line, answer in enumerate(answers_to(questions()[:3]), 1))


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
    flags = ["--model", str(tmp_path / names[0]), "--assistant", str(tmp_path / names[1])]
    settings = ["--preset", "paper", "--max-word-tokens", "4"]
    arguments = ["--output", str(tmp_path / "out.jsonl"), "--chat", *SETTINGS, *flags, *settings]
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


def command(job, *more, launcher=()) -> list[str]:
    return [sys.executable, *launcher, "-m", "hf_adafuse", "run", str(job.input), "--output", str(job.output),
            *SETTINGS, *more]  # fmt: skip


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hf_adafuse.__file__).parents[1])}


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_interrupted_it_says_what_is_kept(job, capsys):
    with killed_after(3):
        assert job("--batch-size", "1") == 130
    said = capsys.readouterr().err
    assert "hf-adafuse: interrupted; the same command goes on from here\n" in said
    assert f"hf-adafuse: 3 of {len(questions())} answers in {job.output}, 3 new" in said
    assert job() == 0 and [record["line"] for record in lines_of(job.output)] == list(range(1, 1 + len(questions())))
