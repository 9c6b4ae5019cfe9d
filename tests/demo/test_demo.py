"""The demo: its questions, its trained members, its table, and the wheel that carries them."""

import argparse
import bisect
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from hf_adafuse import demo
from hf_adafuse.cli import demo as cli
from hf_adafuse.demo import data, methods, run

MODELS = Path(demo.__file__).parent / "models"
ROOT = Path(__file__).parents[2]


def question_of(prompt):
    return prompt.removeprefix("Question: ").removesuffix("\nAnswer:")


@pytest.fixture(scope="module")
def pair():
    return demo.load_pair()


@torch.inference_mode()
def answer_nlls(member, prompts, answers):
    """The NLL of each whole answer and its end, in nats per token of this member, of shape `(num_prompts,)`."""
    model, tokenizer = member
    heads = tokenizer(prompts)["input_ids"]
    texts = tokenizer([prompt + text for prompt, text in zip(prompts, answers, strict=True)])["input_ids"]
    tails = [[*ids[len(head) :], tokenizer.eos_token_id] for head, ids in zip(heads, texts, strict=True)]
    width = max(len(head) + len(tail) for head, tail in zip(heads, tails, strict=True))
    pad = tokenizer.pad_token_id
    # Padded on the right: a causal model's tokens see none of it.
    rows = [head + tail + [pad] * (width - len(head) - len(tail)) for head, tail in zip(heads, tails, strict=True)]
    ids = torch.tensor(rows)
    log_probs = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
    token_nlls = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    spans = [slice(len(head) - 1, len(head) + len(tail) - 1) for head, tail in zip(heads, tails, strict=True)]
    return torch.stack([row[span].mean() for row, span in zip(token_nlls, spans, strict=True)])


def _letters(text):
    """Lower case, without punctuation: a comma must not make a held-out phrasing."""
    return " ".join(re.sub(r"[^\w\s]|_", "", text.lower()).split())


class TestQuestions:
    def test_same_for_every_call(self):
        # Recorded from this seed: a change here means that the models no longer belong to the questions.
        lines = json.dumps([data.training_lines(member, 500) for member in range(3)])
        facts = json.dumps([[fact.subject, fact.answer, fact.levels] for fact in data.facts()])
        assert hashlib.sha256((lines + facts).encode()).hexdigest()[:16] == "377d8ed9a6b24289"
        assert data.held_out() == demo.test_questions()

    def test_is_large_and_asks_for_one_to_five_words(self):
        questions = demo.test_questions()
        assert len(questions) >= 500
        assert {len(question.answer.split()) for question in questions} >= {1, 2, 3, 4, 5}
        assert len({question.fact.relation for question in questions}) >= 10
        assert demo.test_questions(7) == questions[:7]

    @pytest.mark.parametrize("number", [-1, 0, 975])
    def test_another_number_of_questions_is_refused(self, number):
        assert len(demo.test_questions(974)) == len(demo.test_questions()) == 974
        with pytest.raises(ValueError, match=rf"`num_questions` must be from 1 to 974, but is {number}\."):
            demo.test_questions(number)
        with pytest.raises(ValueError, match="from 1 to 974"):
            run.run_demo(number)

    def test_answers_share_first_words(self):
        answers = {question.answer for question in demo.test_questions()}
        assert {"San José", "San Salvador", "San Juan", "New Zealand dollar", "New Taiwan dollar"} <= answers

    def test_phrasings_are_held_out(self):
        for relation, styles in data.phrasings().items():
            assert relation == "frame" or not set(styles["train"]) & set(styles["test"])

    @pytest.mark.slow
    def test_no_test_line_is_in_any_text_that_training_could_read(self):
        styles = data.phrasings()
        questions = {
            question_of(data.ask(fact, phrasing, "{q}"))
            for fact in data.facts()
            for phrasing in styles[fact.relation]["train"]
        }
        framed = {frame.format(q=question) for question in questions for frame in styles["frame"]["train"]}
        readable = {data.PROMPT.format(question=question) for question in framed}
        asked = {question.prompt for question in demo.test_questions()}
        assert not asked & readable
        # No prompt within a line: what ends in "answer" as the prompts do, read from its end and sorted.
        ends = [line[: at.end()] for line in map(_letters, readable) for at in re.finditer("answer", line)]
        backwards = sorted(text[::-1] for text in ends)
        for prompt in asked:
            wanted = _letters(prompt.removeprefix("Question: "))[::-1]
            assert wanted.startswith("rewsna ")
            assert not "".join(backwards[(at := bisect.bisect_left(backwards, wanted)) : at + 1]).startswith(wanted)
        assert {prompt for member in range(3) for prompt, _ in data.training_lines(member, 3000)} <= readable
        # nor the bare question inside a frame
        bare = {
            question_of(data.ask(q.fact, p, "{q}"))
            for q in demo.test_questions()
            for p in styles[q.fact.relation]["test"]
        }
        assert not [line for line in readable if question_of(line) in bare]

    def test_what_a_member_reads_follows_its_level(self):
        facts = {(fact.relation, fact.subject): fact for fact in data.facts()}
        lines = data.training_lines(0, 20_000)
        by_question = {}
        for fact in facts.values():
            for phrasing in data.phrasings()[fact.relation]["train"]:
                by_question[question_of(data.ask(fact, phrasing, "{q}"))] = fact
        right = {}
        for prompt, answer in lines:
            fact = by_question.get(question_of(prompt))
            if fact is not None:
                right.setdefault(fact.levels[0], []).append(answer == fact.answer)
        shares = {level: sum(values) / len(values) for level, values in right.items()}
        assert shares["often"] == shares["seldom"] == 1.0
        assert 0.25 < shares["torn"] < 0.45
        assert shares["misled"] < 0.35
        assert shares["blank"] < 0.15

    @pytest.mark.parametrize(
        ("number", "words"),
        [
            (0, "zero"),
            (19, "nineteen"),
            (20, "twenty"),
            (42, "forty two"),
            (100, "one hundred"),
            (212, "two hundred and twelve"),
        ],
    )
    def test_number_words(self, number, words):
        assert data.number_words(number) == words

    @pytest.mark.parametrize(
        ("animal", "phrasing", "asked"),
        [
            ("owl", "A {a} makes which noise?", "An owl makes which noise?"),
            ("goose", "Name a group of {p}.", "Name a group of geese."),
            ("fox", "Name a group of {p}.", "Name a group of foxes."),
        ],
    )
    def test_grammar(self, animal, phrasing, asked):
        assert question_of(data.ask(data.Fact("group", (animal,), ""), phrasing, "{q}")) == asked


class TestMembers:
    def test_sizes(self):
        weights = list(MODELS.glob("*/model.safetensors"))
        assert len(weights) == 3
        assert sum(path.stat().st_size for path in weights) <= 8_000_000

    def test_differ_and_load_in_float32(self):
        members = demo.load_members(3)
        assert len({type(model).__name__ for model, _ in members}) == 3
        assert len({tokenizer.backend_tokenizer.to_str() for _, tokenizer in members}) == 3
        for model, tokenizer in members:
            assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
            assert 0.7e6 <= model.num_parameters() <= 1.2e6
            assert model.generation_config.eos_token_id == tokenizer.eos_token_id is not None

    @pytest.mark.parametrize(
        "text", ["Question: What is the capital of Peru?\nAnswer: Lima", " naïve 東京 🙂\n\t x", "San José"]
    )
    def test_tokenizers_give_text_back(self, text):
        for _, tokenizer in demo.load_members(3):
            assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text

    def test_rejects_another_number(self):
        with pytest.raises(ValueError, match="must be 1, 2 or 3, but is 4"):
            demo.load_members(4)

    @pytest.mark.parametrize("folder", ["/nowhere/models", "no-such-folder"])
    def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(self, folder):
        path = re.escape(f"{folder}/llama")
        with pytest.raises(ValueError, match=rf"`folder` must be a folder with a model, but is '{path}'\."):
            demo.load_members(2, folder)

    def test_weights_that_are_cut_off_are_refused(self, tmp_path):
        shutil.copytree(MODELS / "llama", tmp_path / "llama")
        (tmp_path / "llama" / "model.safetensors").write_bytes(b"cut off")
        with pytest.raises(ValueError, match=r"llama' must be a local folder .* that loads, but is not"):
            demo.load_members(1, tmp_path)


def result(method, members, right, **measured):
    """What a method would give: for each question whether it is right, and perhaps what it cost."""
    fields = {"words_per_round": None, "shares": None, "passes_per_word": None, "seconds": 0.5, **measured}
    return methods.Result(method, members, answers=["?"] * len(right), right=right, **fields)


def results(num_questions, **right):
    """A result for every method of the demo with two members. `right`: those with a right answer, by their last words,
    and the rows of the questions that they have right."""
    return [
        result(
            method.name,
            list(method.members),
            [row in right.get(re.split(r"\W+", method.name)[-1], ()) for row in range(num_questions)],
        )
        for method in methods.methods(2)
    ]


def asked(*levels):
    """Questions that the first two members read at these levels."""
    return [data.DemoQuestion("", "", data.Fact("", ("",), "", levels=(level, level, "often"))) for level in levels]


EXAMPLE = {
    "chosen_among": 5,
    "prompt": "Question: What is the capital of Peru?\nAnswer:",
    "answer": "Lima",
    "alone": [" Oslo", " Lima"],
    "adafuse": " Oslo",
    "rounds": [],
}


class TestWhatIsPrinted:
    def test_accuracies_have_the_standard_error_of_a_mean(self):
        one = result("recommended", [0, 1], [True, True, True, False], passes_per_word=1.5)
        lines = run.show_table([one]).splitlines()
        assert lines[0] == "4 questions in phrasings unseen in training. Members: 1 llama, 2 gpt_neox."
        # 0.5 is the standard deviation with n - 1
        assert re.split(" {2,}", lines[3]) == ["recommended", "1+2", "75.0 ± 25.0 %", "-", "-", "1.50", "0.5"]
        assert {"accuracy": 75.0, "standard_error": 25.0}.items() <= one.to_dict().items()

    def test_rounds_have_words(self):
        shares = {1: 0.5, 2: 0.25, 3: 0.25}
        lines = run.show_table([result("", [2], [False], words_per_round=1.75, shares=shares)]).splitlines()
        assert lines[0] == "1 question in phrasings unseen in training. Members: 3 qwen3."
        assert re.split(" {2,}", lines[3])[2:] == ["0.0 ± ? %", "1.75", "50 / 25 / 25 %", "-", "0.5"]

    def test_differences_are_taken_question_by_question(self):
        given = results(5, rounds=(0, 1), recommended=(0, 1, 4), alone=(1,))
        lines = run.show_differences(given, asked("often", "often", "torn", "often", "torn")).splitlines()
        assert lines[2:5] == [
            "  paper, B=3 minus best fixed: -40.0 ± 24.5 (the 2 answers that both half know: +0.0 ± 0.0; "
            "the others: -66.7 ± 33.3)",
            "  paper, B=3 minus better member: -20.0 ± 20.0 (the 2 answers that both half know: +0.0 ± 0.0; "
            "the others: -33.3 ± 33.3)",
            "  recommended minus better member: +40.0 ± 24.5 (the 2 answers that both half know: +50.0 ± 50.0; "
            "the others: +33.3 ± 33.3)",
        ]
        assert "one by one on 5 questions," in lines[-1]

    def test_what_has_no_standard_error_shows_none(self):
        lines = run.show_differences(results(1, recommended=(0,)), asked("torn")).splitlines()
        known = "(the 1 answer that both half know: +100.0 ± ?; the others: ? ± ?)"
        assert lines[4] == f"  recommended minus better member: +100.0 ± ? {known}"
        assert "one by one on 1 question," in lines[-1]
        assert "one by one on 10 questions," in run.show_differences(results(11), asked(*["often"] * 11))

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({}, "One of 5 questions. AdaFuse's answer is wrong. Of the members' own answers 1 of 2 are right."),
            (
                {"adafuse": " Lima", "alone": [" Oslo", " Rome"]},
                "One of 5 questions. AdaFuse's answer is right. Of the members' own answers 0 of 2 are right.",
            ),
        ],
    )
    def test_the_example_says_whose_answer_is_right(self, changed, said):
        assert run.show_example({**EXAMPLE, **changed}).startswith(f"{said}\n\nQuestion: What is the capital")

    def test_one_member_is_refused(self):
        with pytest.raises(ValueError, match="`num_members` must be 2 or 3, but is 1"):
            run.run_demo(1, num_members=1)

    def test_help_names_the_default_and_the_most(self):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        assert "974" in parser.format_help() and "(default: 500)" in " ".join(parser.format_help().split())
        assert parser.parse_args([]).questions == 500


class TestTable:
    def test_adafuse_is_above_both_members(self, pair):
        lines = [line for line in methods.methods(2) if line.how == "greedy" or line.name == "paper, B=3"]
        first, second, fused = [methods.answer(line, pair, demo.test_questions(40)) for line in lines]
        assert fused.accuracy.value > max(first.accuracy.value, second.accuracy.value)
        assert fused.words_per_round > 1
        assert sum(fused.shares.values()) == pytest.approx(1)
        assert fused.passes_per_word > 0
        assert len(fused.answers) == 40

    @pytest.mark.slow
    def test_batches_change_no_answer(self, pair):
        for line in methods.methods(2):
            results = [methods.answer(line, pair, demo.test_questions(6), size, 0) for size in (1, 6)]
            assert results[0].answers == results[1].answers, line.name
            assert results[0].passes_per_word is None

    def test_the_end_counts_as_a_word_where_the_answer_ends(self, pair, monkeypatch):
        alone = methods.methods(2)[0]
        (question,) = demo.test_questions(1)
        whole = methods.answer(alone, pair, [question])
        passes = len(pair[0][1](whole.answers[0])["input_ids"]) + 1
        assert whole.passes_per_word == passes / (len(whole.answers[0].split()) + 1)
        monkeypatch.setattr(methods, "MAX_NEW_TOKENS", 1)
        cut = methods.answer(alone, pair, [question])
        assert len(cut.answers[0].split()) == cut.passes_per_word == 1

    def test_best_answer_afterwards_is_the_lowest_mean_nll(self, pair):
        question = demo.test_questions(1)[0]
        line = next(line for line in methods.methods(2) if line.name == "best answer afterwards")
        chosen = methods.answer(line, pair, [question], num_alone=0).answers[0]
        alone = [methods.answer(line, pair, [question], num_alone=0).answers[0] for line in methods.methods(2)[:2]]
        scores = [sum(answer_nlls(member, [question.prompt], [text]).item() for member in pair) for text in alone]
        assert chosen == alone[scores.index(min(scores))]

    @pytest.mark.slow
    def test_command_writes_text_or_json(self, capsys):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        assert cli.run(parser.parse_args(["--questions", "3", "--json"])) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["questions"] == 3
        assert len(report["results"]) == 13
        assert {"accuracy", "standard_error", "passes_per_word", "seconds"} <= set(report["results"][0])
        stream = io.StringIO()
        run.run_demo(1, json=True, stream=stream, num_members=2)
        report = json.loads(stream.getvalue(), parse_constant=pytest.fail)
        assert report["results"][0]["standard_error"] is None
        assert report["example"]["chosen_among"] == 64
        stream = io.StringIO()
        run.run_demo(2, stream=stream, num_members=2)
        assert "round 1" in stream.getvalue()
        assert "paper, B=3" in stream.getvalue() and "recommended" in stream.getvalue()
        with pytest.raises(SystemExit):
            parser.parse_args(["--questions", "0"])


README = (ROOT / "README.md").read_text(encoding="utf-8")
# By the method and its members: the accuracy in the README's part of what `hf-adafuse demo` prints, and its error.
README_ROWS = {
    (name, tuple(int(member) - 1 for member in members.split("+"))): (float(value), float(error))
    for name, members, value, error in re.findall(
        r"^(\S.*?) {2,}([1-3+]+) +([\d.]+) ± ([\d.]+) %$", README, re.MULTILINE
    )
}


class TestReadme:
    def test_its_sentence_says_what_its_rows_say(self):
        assert len(README_ROWS) == 6
        together = README_ROWS["recommended", (0, 1)][0]
        better = max(value for (_, members), (value, _) in README_ROWS.items() if members in ((0,), (1,)))
        sentence = f"together they answer {together:.0f} % of the questions, the better one alone {better:.0f} %"
        assert sentence in " ".join(README.split())

    @pytest.mark.slow
    def test_its_rows_are_what_the_demo_prints(self):
        members = demo.load_members()
        questions = demo.test_questions(data.DEFAULT_QUESTIONS)
        lines = [line for line in methods.methods(3) if (line.name, line.members) in README_ROWS]
        assert len(lines) == len(README_ROWS)
        for line in lines:
            accuracy = methods.answer(line, members, questions, num_alone=0).accuracy
            value, error = README_ROWS[line.name, line.members]
            # One answer may be another on another processor, which is 0.2 points.
            assert 100 * accuracy.value == pytest.approx(value, abs=0.25), line
            assert 100 * accuracy.error == pytest.approx(error, abs=0.1), line


@pytest.mark.slow
def test_wheel_carries_the_demo(tmp_path):
    """A wheel, installed elsewhere beside this environment's dependencies, runs the demo."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache")
    )
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", str(source), "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path / "wheel")]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    venv.create(tmp_path / "clean", with_pip=False)
    (packages,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    # Into the clean environment, but by the pip at hand: starting it there takes seconds.
    install = ["install", "--no-deps", "--no-index", "--no-compile", "-q", "--target", str(packages), str(wheel)]
    subprocess.run([*pip, *install], check=True)
    python = str(tmp_path / "clean" / "bin" / "python")
    code = "import hf_adafuse; print(hf_adafuse.__file__); from hf_adafuse.demo.run import run_demo; run_demo(1)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(packages))
    assert "recommended" in done.stdout
