"""Flags of structured output and of sampling: what they give is what `generate()` gives; what is wrong is one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.jobs import left_over, lines_of, questions, rewrite
from support.saved_members import CONFIG, PROMPT, expected, flags

from hf_adafuse import AdaFuseConfig, demo
from hf_adafuse.cli import main, members
from hf_adafuse.cli.text_flags import STRUCTURED
from hf_adafuse.members.structured import KINDS

SCHEMA = {"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"]}
GRAMMAR = 'root ::= " the " ("cat" | "tree") "!"'
ANIMAL = {"type": "grammar", "grammar": 'root ::= "cat" | "tree"'}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": " the ", "content": ANIMAL, "end": "!"}}
DEMO = [str(Path(demo.__file__).parent / "models" / name) for name in demo.NAMES[:2]]
REGEX = r" [a-d]{2,4}!"


@pytest.fixture
def files(tmp_path):
    """Folder with a schema and a tag on several lines, and a grammar."""
    (tmp_path / "tag.json").write_text(json.dumps(TAG, indent=4), encoding="utf-8")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=4), encoding="utf-8")
    (tmp_path / "grammar.gbnf").write_text(GRAMMAR, encoding="utf-8")
    return tmp_path


def given(kind, files):
    """The flag, and what `generate()` is given for it."""
    return {
        "json_schema": (["--json-schema", str(files / "schema.json")], SCHEMA),
        "grammar": (["--grammar", str(files / "grammar.gbnf")], GRAMMAR),
        "regex": (["--regex", REGEX], REGEX),
        "structural_tag": (["--structural-tag", str(files / "tag.json")], TAG),
    }[kind]


def error_of(arguments, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line.removeprefix("hf-adafuse: error: ")


@pytest.fixture
def no_models(monkeypatch):
    """What is wrong is found before models are loaded."""
    monkeypatch.setattr(members, "load_members", lambda *_, **__: pytest.fail("models are loaded"))


def test_the_flags_are_what_generate_takes():
    """But for structural tags, which programs write."""
    assert {*STRUCTURED, "structural_tag"} == {*KINDS}


# Structured output


@pytest.mark.parametrize("kind", STRUCTURED)
def test_generate_with_a_grammar(kind, folders, files, capsys):
    flag, value = given(kind, files)
    folders = DEMO if kind == "json_schema" else folders  # these have no quotes
    text, _ = expected(folders, structured={kind: value})
    assert main(flags(folders, *flag, PROMPT)) == 0
    assert capsys.readouterr().out == text + "\n"
    assert text != expected(folders)[0]
    if kind == "json_schema":
        assert isinstance(json.loads(text)["cat"], bool)
    if kind in ("grammar", "structural_tag"):
        assert text in (" the cat!", " the tree!")
    if kind == "regex":
        assert re.fullmatch(REGEX, text)


def test_a_member_that_cannot_write_the_text(pair, files, capsys):
    arguments = flags(pair, *given("json_schema", files)[0], PROMPT)
    assert "but the main model has no token that may come first. Leave the" in error_of(arguments, capsys)


def test_a_text_that_the_main_model_cannot_finish(pair, capsys):
    """What it can write of it is there, and nothing that the grammar forbids."""
    assert main(flags(pair, "--regex", ' the "cat"', PROMPT)) == 1
    out, err = capsys.readouterr()
    assert out in (" the\n", " the \n")
    assert "the main model failed in round " in err
    assert ": it has no word that its grammar and its other logits processors allow." in err


def test_a_schema_may_have_a_byte_order_mark(files, capsys):
    (files / "schema.json").write_text("\ufeff" + json.dumps({"enum": ["a"]}), encoding="utf-8")
    assert main(["generate", "--json-schema", str(files / "schema.json"), PROMPT]) == 0
    assert capsys.readouterr().out == '"a"\n'


@pytest.mark.parametrize("kind", STRUCTURED)
def test_every_answer_of_a_job_follows_the_grammar(kind, job, files):
    flag, _ = given(kind, files)
    rewrite(job, lambda asked: asked[:5])
    assert job("--batch-size", "4", *flag, "--max-new-tokens", "24") == 0
    texts = [record["text"] for record in lines_of(job.output)]
    assert len(texts) == 5
    for text in texts:
        if kind == "json_schema":
            assert isinstance(json.loads(text)["cat"], bool)
        else:
            assert re.fullmatch(REGEX if kind == "regex" else " the (cat|tree)!", text)
    whole = job.output.read_bytes()
    assert job("--batch-size", "1", *flag, "--max-new-tokens", "24", "--overwrite") == 0
    assert job.output.read_bytes() == whole


def test_a_job_goes_on_with_the_same_grammar_only(job, files, capsys):
    rewrite(job, lambda asked: asked[:2])
    flag, _ = given("json_schema", files)
    assert job(*flag) == 0
    (files / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")  # laid out in another way
    assert job(*flag) == 0
    assert left_over(job) == {"answers.jsonl.settings.json", "schema.json", "tag.json", "grammar.gbnf"}
    capsys.readouterr()
    arguments = ["run", str(job.input), "--output", str(job.output), "--max-new-tokens", "10"]
    assert error_of([*arguments, *given("regex", files)[0]], capsys).startswith("`--json-schema` must be ")
    assert error_of(arguments, capsys).startswith("`--json-schema` must be ")
    (files / "schema.json").write_text('{"type": "integer"}', encoding="utf-8")
    line = error_of([*arguments, *flag], capsys)
    assert json.dumps(json.dumps(SCHEMA)) in line
    assert r'but is "{\"type\": \"integer\"}". Use the same' in line


WRONG_FILES = {
    "no file": (None, "must be a file, but {} cannot be read: No such file or directory. Check the name."),
    "no JSON": (
        b'{"type": ',
        "must be a file in JSON, but {} is not: Expecting value: line 1 column 10 (char 9). Corr",
    ),
    "deep": (b"[" * 100_000, "must be a file in JSON, but {} is not: maximum recursion depth exceeded"),
    "no UTF-8": (b'"\xff"', "must be a file in UTF-8, but {} is not: 'utf-8' codec can't decode byte 0xff"),
    "no schema": (
        b"[]",
        "must be one that compiles, but does not: Schema should be an object or bool, but got []. Corr",
    ),
    "no type": (b'{"type": "it"}', 'must be one that compiles, but does not: Unsupported type "it". Correct it.'),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
@pytest.mark.parametrize("command", ["generate", "run"])
def test_a_schema_that_cannot_be_used(command, kind, files, capsys, no_models):
    content, message = WRONG_FILES[kind]
    path = files / "wrong.json"
    if content is not None:
        path.write_bytes(content)
    arguments = [PROMPT] if command == "generate" else ["questions.jsonl", "--output", str(files / "answers.jsonl")]
    line = error_of([command, *arguments, "--json-schema", str(path)], capsys)
    assert line.startswith("`--json-schema` " + message.format(repr(str(path))))


UNIQUE = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


@pytest.mark.slow
def test_keywords_that_are_not_enforced(files):
    """A warning beside the text, which is by the rest of the schema."""
    (files / "schema.json").write_text(json.dumps(UNIQUE), encoding="utf-8")
    code = f"from hf_adafuse.cli import main; main(['generate', '--json-schema', {str(files / 'schema.json')!r}, 'a'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[1, 1]\n"
    assert "The JSON schema has keywords that the grammar does not enforce: `uniqueItems` at the root." in done.stderr
    assert done.stderr.count("does not enforce") == 1


def test_keywords_that_are_not_enforced_are_refused_where_it_is_strict(files, capsys, no_models):
    (files / "schema.json").write_text(json.dumps(UNIQUE), encoding="utf-8")
    line = error_of(["generate", PROMPT, "--strict", *given("json_schema", files)[0]], capsys)
    assert line == (
        "`--json-schema` must have only keywords that the grammar enforces where it is strict, but has `uniqueItems` "
        "at the root. Leave these out, or `strict`, and check the text yourself."
    )
    line = error_of(["generate", PROMPT, "--strict", "--regex", "a"], capsys)
    assert line == "`--strict` must be left out without `--json-schema`, but is given. Add that, or drop it."


def test_grammars_that_cannot_be_used(files, capsys, no_models):
    line = error_of(["generate", PROMPT, "--regex", "(a"], capsys)
    reason = "Regex parsing error at position 3: The parenthesis is not closed"
    assert line == f"`--regex` must be one that compiles, but does not: {reason}. Correct it."
    (files / "grammar.gbnf").write_text('top ::= "a"', encoding="utf-8")
    line = error_of(["generate", PROMPT, *given("grammar", files)[0]], capsys)
    assert line.startswith("`--grammar` must be one that compiles, but does not: EBNF parser error at line 1")
    line = error_of(["generate", PROMPT, *given("grammar", files)[0], "--regex", "a"], capsys)
    assert "argument --regex: not allowed with argument --grammar" in line


def test_without_the_library(capsys, monkeypatch, no_models):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    line = error_of(["generate", PROMPT, "--regex", "a"], capsys)
    assert line == '`--regex` needs the package xgrammar. Install it with `pip install "hf_adafuse[structured]"`.'


def test_a_job_with_weights_goes_on(job):
    """Settings are compared as they are kept."""
    rewrite(job, lambda asked: asked[:1])
    assert job("--weights", "2,1") == 0
    assert job("--weights", "2,1") == 0


# Sampling


def sampled(folders, seed, prompt=PROMPT):
    torch.manual_seed(seed)
    return expected(folders, AdaFuseConfig(max_word_tokens=CONFIG.max_word_tokens, do_sample=True))[0]


def test_generate_with_a_seed(folders, capsys):
    texts = []
    for seed in ("0", "0", "1", "2"):
        torch.manual_seed(int(torch.randint(99, ())))  # whatever has been drawn before
        assert main(flags(folders, "--sample", "--seed", seed, PROMPT)) == 0
        texts.append(capsys.readouterr().out)
    assert texts == [sampled(folders, seed) + "\n" for seed in (0, 0, 1, 2)]
    assert len(set(texts)) == 3


def test_generate_without_a_seed_is_another_text_each_time(folders, capsys):
    texts = set()
    for _ in range(4):
        torch.manual_seed(0)  # as in a new process
        assert main(flags(folders, "--sample", PROMPT)) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) > 1


def test_a_sampled_text_follows_the_grammar(folders, capsys):
    texts = set()
    for seed in range(4):
        assert main(flags(folders, "--sample", "--seed", str(seed), "--regex", REGEX, PROMPT)) == 0
        texts.add(capsys.readouterr().out.removesuffix("\n"))
    assert all(re.fullmatch(REGEX, text) for text in texts)
    assert len(texts) > 1


@pytest.mark.parametrize("command", ["generate", "run"])
def test_a_seed_without_sampling(command, tmp_path, capsys, no_models):
    arguments = [PROMPT] if command == "generate" else ["questions.jsonl", "--output", str(tmp_path / "answers.jsonl")]
    line = error_of([command, *arguments, "--seed", "3"], capsys)
    assert line == "`--seed` must be left out without `--sample`, but is given. Add --sample, or drop it."
    for seed in ("-1", "x", "²", str(2**63)):
        line = error_of([command, *arguments, "--sample", f"--seed={seed}"], capsys)
        assert f"argument --seed: must be a whole number from 0 to 2**63 - 1, but is {seed!r}" in line


def test_a_job_draws_the_same_in_any_batches(job, capsys):
    """Also where it goes on after a kill. A question that comes again is drawn again."""
    rewrite(job, lambda asked: [{"question": question} for question in questions()[:3] * 3])
    sample = ["--sample", "--weights", "1,1"]
    assert job("--batch-size", "8", *sample) == 0
    whole = job.output.read_bytes()
    texts = [record["text"] for record in lines_of(job.output)]
    assert any(len({*texts[row::3]}) > 1 for row in range(3)), texts
    for batch_size, kept in (("1", 0), ("2", 4), ("5", 2)):
        job.output.write_bytes(b"".join(whole.splitlines(keepends=True)[:kept]))
        assert job("--batch-size", batch_size, *sample) == 0
        assert job.output.read_bytes() == whole
    assert job(*sample, "--seed", "5", "--overwrite") == 0
    assert job.output.read_bytes() != whole
    capsys.readouterr()
    arguments = ["run", str(job.input), "--output", str(job.output), "--max-new-tokens", "10"]
    assert error_of([*arguments, *sample, "--seed", "6"], capsys).startswith(
        "`--seed` must be 5, as in the earlier run"
    )
    assert error_of([*arguments, "--weights", "1,1"], capsys).startswith("`--seed` must be 5")
