"""`hf-adafuse tune`: what it asks, writes and says, over kills; with the demo's pair and a short table of rules."""

from __future__ import annotations

import copy
import re
import shlex

import pytest
from jobs import PAIR, TUNE_NEW, lines_of, questions, read_json, rewrite, write_lines, write_numbered
from transformers import GenerationConfig

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.cli import _parser, main, members
from hf_adafuse.cli.arguments import adafuse_config
from hf_adafuse.demo.data import PROMPT
from hf_adafuse.evaluation import asking
from hf_adafuse.evaluation.candidates import Candidate
from hf_adafuse.evaluation.metrics import exact_match

NAMES = ("llama", "gpt_neox")


@pytest.fixture
def asks(monkeypatch):
    """Counts the batches that a model is asked; `stop_after` of them it breaks off, as by Ctrl-C."""
    ask = asking.Panel.ask

    def counting(self, candidate, prompts):
        counting.prompts += [(candidate, prompt) for prompt in prompts]
        if counting.stop_after == 0:
            raise KeyboardInterrupt
        counting.stop_after -= 1
        return ask(self, candidate, prompts)

    counting.prompts, counting.stop_after = [], -1
    monkeypatch.setattr(asking.Panel, "ask", counting)
    return counting


def test_what_is_written_and_said(tune):
    code, out, err = tune("--progress")
    assert code == 0
    assert "answers" in err and "left after 8 questions" in err
    evidence, config = read_json(tune.output / "evidence.json"), read_json(tune.output / "adafuse_config.json")
    searched, held_out = evidence["searched"], evidence["held_out"]
    assert (len(searched), len(held_out)) == (10, 4)
    assert sorted([*searched, *held_out]) == list(range(1, 15))
    assert {path.name for path in (tune.output / "answers").iterdir()} == {
        "llama_alone.jsonl", "gpt_neox_alone.jsonl",
        "llama+gpt_neox_span.jsonl", "llama+gpt_neox_word-3-1.jsonl",
        "gpt_neox+llama_span.jsonl", "gpt_neox+llama_word-3-1.jsonl",
    }  # fmt: skip
    # The evidence is what the answers score.
    for entry in evidence["candidates"]:
        name = entry["candidate"].replace(" + ", "+").replace(": ", "_").replace(" alone", "_alone")
        answers = lines_of(tune.output / "answers" / f"{name.replace(' 3:1', '-3-1')}.jsonl")
        texts = {record["line"]: record["text"] for record in answers}
        for part, lines in (("searched", searched[: entry["searched"]["n"]]), ("held_out", held_out)):
            if entry[part] is not None:
                scores = [exact_match(texts[line], tune.asked[line - 1]["answer"]) for line in lines]
                assert entry[part]["mean"] == pytest.approx(sum(scores) / len(scores))
                assert entry[part]["n"] == len(lines)
        assert len(texts) == entry["searched"]["n"] + (entry["held_out"] or {"n": 0})["n"]
    alone = [entry for entry in evidence["candidates"] if entry["candidate"].endswith(" alone")]
    assert {entry["searched"]["n"] for entry in alone} == {10}
    winner = next(entry for entry in evidence["candidates"] if entry["candidate"] == evidence["winner"])
    assert winner["searched"]["mean"] >= max(entry["searched"]["mean"] for entry in alone)
    # The settings load again.
    stored = GenerationConfig.from_pretrained(tune.output).adafuse_config
    assert config["members"] == winner["members"]
    if evidence["winner"].endswith(" alone"):
        assert (stored, config["adafuse_config"]) == (False, None)
    else:
        assert AdaFuseConfig.from_dict(stored) == AdaFuseConfig.from_dict(config["adafuse_config"])
    assert "searched on 10 questions: 6 candidates, " in out
    assert "held out: 4 questions that the search has not seen\n" in out
    assert evidence["winner"] in out[out.index("The best choice") :]


def direct(candidate, prompt):
    """What `generate()` answers, decoded with nothing but the tokenizer."""
    (model, tokenizer), *others = [PAIR()[member] for member in candidate.members]
    options = {} if not others else {
        "assistant_models": [other for other, _ in others],
        "assistant_tokenizers": [other for _, other in others],
        "adafuse_config": candidate.config,
    }  # fmt: skip
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    main_model = enable_adafuse(copy.copy(model)) if others else model
    made = main_model.generate(**inputs, **options, tokenizer=tokenizer, max_new_tokens=TUNE_NEW, do_sample=False)
    return tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("members", [(0,), (1,), (0, 1), (1, 0)], ids=str)
def test_candidates_answer_as_generate_does(members):
    settings = {} if len(members) == 1 else {"fusion": "word"}
    candidate = Candidate(members, "word", settings)
    prompts = [PROMPT.format(question=question) for question in questions()[:6]]
    expected = [direct(candidate, prompt) for prompt in prompts]
    members = [(copy.copy(model), tokenizer) for model, tokenizer in PAIR()]
    assert asking.Panel(members, asking.Asking(TUNE_NEW)).ask(candidate, prompts) == expected
    stops = asking.Panel(members, asking.Asking(TUNE_NEW, ["a", "zz"])).ask(candidate, prompts)
    assert stops == [text.partition("a")[0] for text in expected]
    assert stops != expected


def test_broken_off_and_started_again(tune, asks):
    assert tune(output="whole")[0] == 0
    whole, everything = read_json(tune.folder / "whole/evidence.json"), list(asks.prompts)
    asks.prompts, asks.stop_after = [], 4
    assert tune()[0] == 130
    assert not (tune.output / "evidence.json").exists()
    torn = tune.output / "answers/llama_alone.jsonl"
    torn.write_bytes(torn.read_bytes()[:-9])
    asks.prompts, asks.stop_after = [], -1
    code, out, _ = tune()
    evidence = read_json(tune.output / "evidence.json")
    again = len(everything) - len(asks.prompts)
    assert code == 0 and again > 20
    for key in whole.keys() - {"seconds", "new_answers"}:
        assert evidence[key] == whole[key]
    assert evidence["new_answers"] == len(asks.prompts)
    assert len(set(asks.prompts)) == len(asks.prompts)
    # A third time nothing is left to ask, and another seed or metric asks only what is new.
    asks.prompts = []
    assert tune()[1] == out
    assert asks.prompts == []
    assert tune("--metric", "f1")[0] == 0
    assert len(asks.prompts) < 20
    for path in (tune.output / "answers").iterdir():
        assert len({record["line"] for record in lines_of(path)}) == len(lines_of(path))


def test_compare_reads_the_answers(tune, capsys):
    assert tune()[0] == 0
    names = ["llama_alone.jsonl", "gpt_neox_alone.jsonl"]
    assert main(["compare", *(str(tune.output / "answers" / name) for name in names)]) == 0
    assert "exact_match on the 14 questions that both answer" in capsys.readouterr().out


def test_equal_prompts_are_on_one_side_of_the_split(tune, monkeypatch):
    asked = [{"question": f"say {k // 3}", "answer": [str(k // 3), f"of line {k}"]} for k in range(60)]
    write_lines(tune.folder / "dev.jsonl", [asked[(7 * k) % 60] for k in range(60)])
    monkeypatch.setattr(asking.Panel, "ask", answering(lambda one, k: True))
    assert tune()[0] == 0
    evidence = read_json(tune.output / "evidence.json")
    texts = {record["line"]: record["text"] for record in lines_of(tune.output / "answers/llama_alone.jsonl")}
    searched, held_out = ({texts[line] for line in evidence[part]} for part in ("searched", "held_out"))
    assert (len(searched), len(held_out)) == (14, 6) and not searched & held_out


def test_worked_examples_are_shown_and_not_asked(tune, asks):
    assert tune("--few-shot", "2")[0] == 0
    first, second = tune.asked[:2]
    head = "".join(f"{PROMPT.format(**one)} {one['answer'][0]}\n\n" for one in (first, second))
    assert {prompt for _, prompt in asks.prompts} == {head + PROMPT.format(**one) for one in tune.asked[2:]}
    write_lines(tune.folder / "shown.jsonl", [{"q": "Who?", "answer": "Me"}])
    write_lines(tune.folder / "other.jsonl", [{"q": one["question"], "answer": "4"} for one in tune.asked])
    asks.prompts = []
    flags = ["--few-shot", str(tune.folder / "shown.jsonl"), "--template", "Q: {q}\\nA: "]
    assert tune(*flags, data="other.jsonl", output="other")[0] == 0
    assert {p for _, p in asks.prompts} == {f"Q: Who?\nA: Me\n\nQ: {one['question']}\nA: " for one in tune.asked}


def test_a_question_that_is_a_worked_example_is_not_asked(tune, asks):
    first, *others = tune.asked
    write_lines(tune.folder / "again.jsonl", [first, *others, first, {"question": first["question"], "answer": "5"}])
    code, _, err = tune("--few-shot", "1", data="again.jsonl")
    assert code == 0 and "hf-adafuse: 2 questions are among the worked examples, and are not asked" in err
    # Only whole questions count.
    write_lines(tune.folder / "alike.jsonl", [{"question": f"{others[0]['question']}1", "answer": "5"}, *others])
    assert "among" not in tune("--few-shot", "1", "--template", "{question}", data="alike.jsonl", output="alike")[2]
    head = f"{PROMPT.format(**first)} {first['answer'][0]}\n\n"
    assert {prompt for _, prompt in asks.prompts if "Question: " in prompt} == {
        head + PROMPT.format(**one) for one in others
    }


def test_worked_examples_of_a_run(job):
    rewrite(job, lambda asked: [{**one, "answer": ["4", "four"]} for one in asked])
    assert job("--few-shot", "2") == 0
    head = "".join(f"{PROMPT.format(question=question)} 4\n\n" for question in questions()[:2])
    records = lines_of(job.output)
    assert [record["line"] for record in records] == list(range(3, 15))
    assert [record["prompt"] for record in records] == [head + PROMPT.format(question=q) for q in questions()[2:]]
    assert job("--few-shot", "3") == 2
    rewrite(job, lambda asked: [{"question": one["question"]} for one in asked])
    assert job("--few-shot", "2", "--overwrite") == 2


@pytest.mark.parametrize(
    ("flags", "answer", "stop"),
    [([], "4", ["\n"]), ([], "2 + 2\nis 4", ["\n\n"]), (["--stop", "x"], "4", ["x"])],
)
def test_where_answers_stop(flags, answer, stop, tune, monkeypatch):
    write_lines(tune.folder / "dev.jsonl", [{"question": text, "answer": answer} for text in questions()])
    monkeypatch.setattr(asking.Panel, "ask", lambda self, candidate, prompts: ["4"] * len(prompts))
    assert tune(*flags)[0] == 0
    assert read_json(tune.output / "settings.json")["stop"] == stop


def answering(right):
    """Instead of the models: each candidate is right where `right(candidate, number)` says."""

    def ask(self, candidate, prompts):
        return [f"{number}" if right(candidate, number) else "x" for number in (int(p.split()[-2]) for p in prompts)]

    return ask


def test_one_member_alone_is_best(tune, monkeypatch):
    write_numbered(tune.folder)
    monkeypatch.setattr(asking.Panel, "ask", answering(lambda one, k: k % 3 if one.members == (1,) else k % 3 == 1))
    code, out, _ = tune()
    assert code == 0
    assert "The best choice is one member alone: gpt_neox alone.\n" in out
    assert "is not above it: -" in out
    assert GenerationConfig.from_pretrained(tune.output).adafuse_config is False
    assert read_json(tune.output / "adafuse_config.json")["adafuse_config"] is None


def test_an_ensemble_is_best(tune, monkeypatch):
    write_numbered(tune.folder)

    def right(one, k):
        return k % 3 if one.rule.startswith("word") and one.members == (1, 0) else k % 3 == 1

    monkeypatch.setattr(asking.Panel, "ask", answering(right))
    code, out, _ = tune()
    assert code == 0
    assert "The best choice: gpt_neox + llama: word 3:1.\n" in out
    assert out.count("\nIts flags: --model ") == 1 and " --preset paper --fusion word --weights 3,1\n" in out
    stored = GenerationConfig.from_pretrained(tune.output).adafuse_config
    assert AdaFuseConfig.from_dict(stored) == AdaFuseConfig(fusion="word", model_weights=(3, 1))


def test_an_ensemble_that_is_behind_where_it_was_not_searched_for(tune, monkeypatch):
    write_numbered(tune.folder)
    assert tune()[0] == 0
    held_out = {line - 1 for line in read_json(tune.output / "evidence.json")["held_out"]}

    def right(one, k):  # the second member is the better one on what is held out
        if one.is_alone:
            return k % 3 == 1 if (one.members == (1,)) != (k in held_out) else k % 9 == 1
        return k % 9 == 1 if k in held_out else k % 3

    monkeypatch.setattr(asking.Panel, "ask", answering(right))
    code, out, _ = tune("--overwrite")
    evidence = read_json(tune.output / "evidence.json")
    assert code == 0
    assert (evidence["best_member"], evidence["best_member_held_out"]) == ("gpt_neox alone", "llama alone")
    assert evidence["winner"] == "gpt_neox alone" and "The best choice is one member alone: gpt_neox alone.\n" in out
    (line,) = (line for line in out.splitlines() if line.startswith("The best ensemble, "))
    assert " is behind the best member where it was not searched for: +" in line
    assert line.endswith(" held out (n = 30), there against llama alone.")
    assert evidence["gain_held_out"]["difference"] < 0 < evidence["gain_searched"]["difference"]


def test_the_rules_to_try_by_name(tune, monkeypatch):
    write_numbered(tune.folder)
    monkeypatch.setattr(asking.Panel, "ask", answering(lambda one, k: k % 3 if one.rule == "unite" else k % 3 == 1))
    code, out, _ = tune("--methods", "unite,robust,rules")
    assert code == 0 and f"searched on 70 questions: {2 + 2 * 4} candidates, " in out
    assert ": unite.\n" in out and " --preset paper --method unite\n" in out
    stored = GenerationConfig.from_pretrained(tune.output).adafuse_config
    assert AdaFuseConfig.from_dict(stored) == AdaFuseConfig(method="unite")


def with_settings(monkeypatch, stored):
    """The demo's pair, the second with settings in its generation config."""
    pair = [(copy.copy(model), tokenizer) for model, tokenizer in PAIR()]
    pair[1][0].generation_config = copy.deepcopy(pair[1][0].generation_config)
    pair[1][0].generation_config.adafuse_config = stored
    monkeypatch.setattr(members, "default_pair", lambda: pair)


def test_settings_of_the_main_model_are_tried(tune, monkeypatch):
    write_numbered(tune.folder)
    with_settings(monkeypatch, {"max_words": 1, "model_weights": [0.7, 0.3]})
    right = answering(lambda one, k: k % 3 if one.rule == "the model's own settings" else k % 3 == 1)
    monkeypatch.setattr(asking.Panel, "ask", right)
    code, out, _ = tune()
    assert code == 0 and "searched on 70 questions: 7 candidates, " in out
    assert "The best choice: gpt_neox + llama: the model's own settings.\n" in out
    assert out.count(" --preset paper --max-words 1 --weights 0.7,0.3\n") == 1
    stored = GenerationConfig.from_pretrained(tune.output).adafuse_config
    assert AdaFuseConfig.from_dict(stored) == AdaFuseConfig(max_words=1, model_weights=(0.7, 0.3))
    assert tune()[1] == out  # also when nothing is left to ask


def test_settings_of_the_main_model_that_are_none(tune, monkeypatch):
    with_settings(monkeypatch, {"max_wrods": 1})
    code, _, err = tune()
    assert code == 2 and "The generation config of '" in err and "but has ['max_wrods']. Check the spelling." in err


def test_the_flags_that_are_printed_give_the_choice_back(tune, monkeypatch):
    """Read as a shell and the command line read them, beside a main model with settings of its own."""
    write_numbered(tune.folder)
    pair = [(copy.copy(model), tokenizer) for model, tokenizer in PAIR()]
    monkeypatch.setattr(members, "load_members", lambda *_, **__: pair)
    names = ["my models/it's $HOME", "b; c"]
    monkeypatch.setattr(asking.Panel, "ask", answering(lambda one, k: k % 3 if one.rule == "word 3:1" else k % 3 == 1))
    code, out, _ = tune("--model", names[0], "--assistant", names[1])
    assert code == 0
    (printed,) = re.findall("^Its flags: (.*)$", out, flags=re.MULTILINE)
    args = _parser().parse_args(["run", "in.jsonl", "--output", "out", *shlex.split(printed)])
    assert sorted([args.model, *args.assistant]) == sorted(names)
    monkeypatch.setattr(pair[0][0].generation_config, "adafuse_config", {"num_branches": 5}, raising=False)
    stored = GenerationConfig.from_pretrained(tune.output).adafuse_config
    assert adafuse_config(args, pair[0][0]) == AdaFuseConfig.from_dict(stored)
    assert [args.model, *args.assistant] == read_json(tune.output / "adafuse_config.json")["members"]


def test_chats(tune, monkeypatch):
    pair = [(copy.copy(model), copy.deepcopy(tokenizer)) for model, tokenizer in PAIR()]
    for number, (_, tokenizer) in enumerate(pair):
        tokenizer.chat_template = f"{{{{ messages[0]['content'] }}}} [{number}]"
    monkeypatch.setattr("hf_adafuse.cli.members.default_pair", lambda: pair)
    code, _, _ = tune("--chat")
    assert code == 0
    assert read_json(tune.output / "settings.json")["template"] == "{question}"
    record = lines_of(tune.output / "answers/llama_alone.jsonl")[0]
    assert record["prompt"] == tune.asked[record["line"] - 1]["question"]
    assert record["text"] == direct(Candidate((0,)), f"{record['prompt']} [0]")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--metric", "x"], "`--metric` must be one of ['exact_match', "),
        (["--methods", "unit"], "`--methods` must be all, rules, or of ['span', 'word 3:1', 'robust', "),
        (["--model", "A"], "The members must be 2 or more, but are 1."),
        (["--assistant", "B"], "`--model` must be given with `--assistant`, but is not."),
        (["--budget", "9"], "`budget` must be at least "),
        (["--holdout", "1"], "`holdout` must be above 0 and below 1, but is 1.0."),
        (["--few-shot", "14"], "`--few-shot` must be fewer than the 14 questions, but is 14."),
        (["--few-shot", "nowhere"], "`--few-shot` must be a number or a JSONL file, but 'nowhere' is neither."),
        (["--few-shot", "5"], "The questions must be 10 or more, but are 9."),
        (["--template", "{x}"], "must have the field 'x', but its fields are: question, answer."),
    ],
)
def test_what_cannot_be_tuned(flags, expected, tune):
    code, out, err = tune(*flags)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
    assert not list(tune.output.glob("answers/*"))


def test_a_question_without_an_answer(tune):
    write_lines(tune.folder / "dev.jsonl", [*tune.asked, {"question": "Who?"}])
    assert "line 15 of" in (error := tune()[2]) and "must have the field 'answer', but has none. Mend it." in error


def test_other_settings_and_other_questions_are_refused(tune):
    assert tune()[0] == 0
    assert "`--stop` must be " in tune("--stop", "x")[2]
    write_lines(tune.folder / "dev.jsonl", tune.asked[::-1])
    code, _, err = tune()
    assert code == 2
    assert "The questions and rules must be those of the earlier run, but the answer to line" in err
    # What the earlier run has found would pass for what this one finds.
    assert {path.name for path in tune.output.iterdir()} == {"answers", "lock", "settings.json"}
    assert tune("--overwrite")[0] == 0
    assert (tune.output / "evidence.json").exists()
