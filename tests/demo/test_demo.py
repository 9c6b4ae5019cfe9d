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


class TestTable:
    def test_adafuse_is_above_both_members(self, pair):
        lines = [line for line in methods.methods(2) if line.how == "greedy" or line.name == "paper, B=3"]
        first, second, fused = [methods.answer(line, pair, demo.test_questions(40)) for line in lines]
        assert fused.accuracy > max(first.accuracy, second.accuracy)
        assert fused.words_per_round > 1
        assert sum(fused.shares.values()) == pytest.approx(1)
        assert fused.passes_per_word > 0
        assert len(fused.answers) == 40

    @pytest.mark.slow
    def test_batches_change_no_answer(self, pair):
        for line in methods.methods(2):
            results = [methods.answer(line, pair, demo.test_questions(6), size, 0) for size in (1, 6)]
            assert results[0].answers == results[1].answers, line.name

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
        run.run_demo(2, stream=stream, num_members=2)
        assert "round 1" in stream.getvalue()
        assert "paper, B=3" in stream.getvalue() and "recommended" in stream.getvalue()
        with pytest.raises(SystemExit):
            parser.parse_args(["--questions", "0"])


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
