"""The file of answers of a batch job: continued by the same settings only, never doubled, by one run at a time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.jobs import lines_of, record_of, rewrite

from hf_adafuse.cli.answers import AnswersFile
from hf_adafuse.cli.job_settings import check_settings, keep_settings
from hf_adafuse.cli.questions import Question


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
        (["--stop", "x", "--served-option", "num_steps=2"], "`--served-option` must be left out"),
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
    assert job("--overwrite", "--model", "missing/model", "--template", "{question}") == 2
    assert "missing/model" in capsys.readouterr().err
    assert job.output.read_bytes() == whole  # nothing is dropped before the models are loaded
    assert job("--overwrite") == 0
    assert len(lines_of(job.output)) == 1


def test_what_is_read_is_not_written_over(job, capsys):
    asked = job.input.read_bytes()
    for flags in (["--output", str(job.input)], ["--few-shot", str(job.output)]):
        job.output.write_bytes(asked)
        assert job(*flags, "--overwrite") == 2
        assert "`--output` must be another file than the command reads" in capsys.readouterr().err
        assert job.input.read_bytes() == job.output.read_bytes() == asked
    assert job("--overwrite") == 2
    assert "must be a file of this command or a new one" in capsys.readouterr().err
    assert job.output.read_bytes() == asked


def test_settings_that_gave_no_answer_do_not_bind(job, capsys):
    rewrite(job, lambda asked: asked[:1])
    assert job("--model", "missing/model", "--template", "{question}") == 2
    assert "must be a local folder or a Hub name" in capsys.readouterr().err
    assert job() == 0


def test_settings_that_are_nought_are_said(tmp_path):
    """Not taken for left out, though 0 is equal to False; a flag that an earlier version did not know is."""
    keep_settings(tmp_path / "kept", {"seed": 0, "chat": False})
    with pytest.raises(ValueError, match="`--seed` must be 0, as in the earlier run that wrote 'out', but is left out"):
        check_settings(tmp_path / "kept", {"seed": None, "chat": False}, Path("out"))
    with pytest.raises(ValueError, match=r"`--threshold` must be left out, .*, but is 0\.0"):
        check_settings(tmp_path / "kept", {"seed": 0, "threshold": 0.0}, Path("out"))


@pytest.mark.parametrize("content", ["[]", "3", "{"])
def test_settings_that_are_none_are_refused(content, tmp_path):
    (tmp_path / "kept").write_text(content)
    with pytest.raises(ValueError, match="must hold the earlier run's settings, but is no JSON object"):
        check_settings(tmp_path / "kept", {}, Path("out"))


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
    other = AnswersFile(job.output, [])
    other.prepare({})
    assert job() == 2
    assert "must be written by one run at a time" in capsys.readouterr().err
    other.close()
    assert job() == 0


@pytest.mark.parametrize("seed", range(30))
def test_any_number_of_processes_killed_at_any_time(seed, tmp_path):
    rng = random.Random(seed)
    asked = [Question(line, {}, f"prompt {line}") for line in sorted(rng.sample(range(1, 60), 20))]
    path, torn = tmp_path / "answers", b'{"line": 7, "te'
    made = []
    for _ in range(30):
        count = rng.randint(1, 4)
        processes = [AnswersFile(path, asked, index, count) for index in range(count)]
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
    processes = [AnswersFile(path, asked, index, 2) for index in range(2)]
    processes[0].prepare({})
    for answers in processes:
        answers.load()
    processes[0].write(record_of(asked[0]))
    processes[1].write({**record_of(asked[1]), "error": "no", "stopped": True})
    assert processes[0].write(record_of(asked[2])) == []  # waits for the second, which the next run asks again
    processes[0].close()
    again = AnswersFile(path, asked)
    again.prepare({})
    assert [question.line for question in again.load()] == [2, 4, 5]
    again.close()
