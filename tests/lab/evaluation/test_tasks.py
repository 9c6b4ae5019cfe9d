"""The package's own tasks on files of one's own: prompts, what is asked, and scores worked out by hand."""

from __future__ import annotations

import json
import math
import sys

import pytest
from lm_eval.api.model import LM

from hf_adafuse import demo
from hf_adafuse.demo.methods import MAX_NEW_TOKENS
from hf_adafuse.lab.evaluation import harness, translation
from hf_adafuse.lab.evaluation.local_data import KEYS, find_file, load_splits

SHOTS = {"gsm8k": 4}
ROWS = {
    "nq": [("who wrote it", ["Ann", "Ann Lee"]), ("when was it", "1999")],
    "triviaqa": [("Who sang it?", ["The Beatles"]), ("Which river?", ["Rhine", "the Rhine"])],
    "squad": [("Tom ran.\nHe fell.\nWho ran?", ["Tom", "Tom"]), ("A cat sat.\nWhere?", ["on a mat"])],
    "gsm8k": [("2 and 3?", "It is 2 + 3 = 5.\n#### 5"), ("10 by 4?", "It is 2.5.\n#### 2.5")],
    "flores_en_de": [("The cat sleeps.", "Die Katze schläft."), ("Good morning.", "Guten Morgen.")],
    "flores_de_en": [("Die Katze schläft.", "The cat sleeps."), ("Guten Morgen.", "Good morning.")],
}
ANSWERS = {
    "nq": [" ann.", " in 1999"],
    "triviaqa": [" Beatles", " the river Rhine"],
    "squad": [" Tom", " mat"],
    "gsm8k": [" So 5 apples.\n#### 5", " It is 2.50"],
    "flores_en_de": [" Die Katze schläft.", " Morgen!"],
    "flores_de_en": [" The cat sleeps.", " Good morning."],
}
SCORES = {
    "nq": {"exact_match": 0.5, "f1": (1 + 2 / 3) / 2},
    "triviaqa": {"exact_match": 0.5, "f1": (1 + 2 / 3) / 2},
    "squad": {"exact_match": 0.5, "f1": (1 + 2 / 3) / 2},  # of "on mat", the article gone
    "gsm8k": {"last_number": 1.0, "marked_number": 0.5},
}
PROMPTS = {
    "nq": "Question: who wrote it\nAnswer:",
    "triviaqa": "Question: Who sang it?\nAnswer:",
    "squad": "Passage: Tom ran.\nHe fell.\nQuestion: Who ran?\nAnswer:",
    "gsm8k": "Question: 2 and 3?\nAnswer:",
    "flores_en_de": "English: The cat sleeps.\nGerman:",
    "flores_de_en": "German: Die Katze schläft.\nEnglish:",
}


class Parrot(LM):
    """Answers by a table, and keeps what it was asked."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.asked, self.rounds = answers, [], {}

    def generate_until(self, requests, **_):
        self.asked += requests
        return [self.answers[request.doc_id] for request in requests]

    def loglikelihood(self, requests, **_):
        raise AssertionError

    loglikelihood_rolling = loglikelihood


@pytest.fixture
def data(tmp_path):
    for key, rows in ROWS.items():
        examples = [(f"example {n}\nof {key}", [f"answer {n}"]) for n in range(SHOTS.get(key, 5))]
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in [*examples, *rows]]
        (tmp_path / f"{key}_mine.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(tmp_path)


@pytest.fixture(autouse=True)
def no_tokenizer_of_spbleu(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "_tokenizer_file", lambda: tmp_path / "none")
    translation.has_spbleu.cache_clear()


@pytest.mark.filterwarnings("ignore:spBLEU is left out")
@pytest.mark.parametrize("key", KEYS)
def test_task(key, data):
    lm = Parrot(ANSWERS[key])
    results = harness.evaluate(lm, harness.load_tasks([key], data), harness.Plan())
    assert [request.doc["question"] for request in lm.asked] == [question for question, _ in ROWS[key]]
    prompt, settings = lm.asked[0].args
    assert prompt.endswith(f"answer {SHOTS.get(key, 5) - 1}\n\n{PROMPTS[key]}")
    assert [prompt.find(f"answer {n}\n\n") for n in range(SHOTS.get(key, 5))] == sorted(
        {prompt.find(f"answer {n}\n\n") for n in range(SHOTS.get(key, 5))} - {-1}
    )
    assert "example 0" in prompt and "until" in settings and settings["do_sample"] is False
    scores = results["results"][key]
    if key in SCORES:
        assert {name: scores[f"{name},none"] for name in SCORES[key]} == pytest.approx(SCORES[key])
        assert scores[f"{next(iter(SCORES[key]))}_stderr,none"] != "N/A"
    else:
        import sacrebleu

        texts, right = [text.strip() for text in ANSWERS[key]], [[answer for _, answer in ROWS[key]]]
        assert scores["chrf,none"] == pytest.approx(sacrebleu.corpus_chrf(texts, right).score)
        assert scores["bleu,none"] == pytest.approx(sacrebleu.corpus_bleu(texts, right).score)
        assert scores["chrf_stderr,none"] >= 0 and "spbleu,none" not in scores
        single = [sample["sentence_chrf"] for sample in results["samples"][key]]
        assert single[0] == pytest.approx(100) and scores["sentence_chrf,none"] == pytest.approx(sum(single) / 2)


def test_number_of_worked_examples(data):
    lm = Parrot([" x"] * 9)
    harness.evaluate(lm, harness.load_tasks(["nq"], data, 2), harness.Plan(num_fewshot=2, limit=3, max_new_tokens=7))
    prompt, settings = lm.asked[0].args
    assert prompt.count("answer") == 2 and lm.asked[0].doc["question"].startswith("example 2")
    assert len(lm.asked) == 3 and settings["max_gen_toks"] == 7
    none = Parrot([" x"] * 9)
    harness.evaluate(none, harness.load_tasks(["nq"], data, 0), harness.Plan(num_fewshot=0))
    assert none.asked[0].args[0] == "Question: example 0\nof nq\nAnswer:"


def test_gsm8k_without_marks_is_scored_by_the_last_number_alone(data, tmp_path):
    path = tmp_path / "gsm8k_mine.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("#### ", "So it is "), encoding="utf-8")
    results = harness.evaluate(Parrot(ANSWERS["gsm8k"]), harness.load_tasks(["gsm8k"], data), harness.Plan())
    assert "marked_number,none" not in results["results"]["gsm8k"]
    assert results["results"]["gsm8k"]["last_number,none"] == 1


def test_spbleu_is_left_out_aloud():
    with pytest.warns(UserWarning, match="spBLEU is left out.*plain BLEU"):
        assert not translation.has_spbleu()


def test_several_accepted_translations():
    pairs = [(["a b c d", "e f g h"], "e f g h"), (["i j k l"], "i j k l")]
    assert translation.corpus_bleu(pairs) == pytest.approx(100)
    assert translation.standard_error("bleu", pairs) == pytest.approx(0)


def test_translations_of_which_no_word_is_right():
    pairs = [(["a b c d"], "x"), (["i j k l"], "y"), (["m n"], "z")]
    assert translation.standard_error("bleu", pairs) == 0


def test_a_difference_of_translations_and_its_error():
    """Of few sentences the jackknife leaves out one at a time."""
    right = ["the cat sat on the mat", "a dog ran over the hill", "we like to read long books", "no one saw the bird"]
    one = [([text], text.replace("the", "a")) for text in right]
    other = [([text], text[:12]) for text in right]
    found = translation.difference("bleu", one, other)
    assert found.value == pytest.approx(translation.corpus_bleu(one) - translation.corpus_bleu(other)) and found.n == 4
    parts = []
    for left_out in range(4):
        kept = [[pair for index, pair in enumerate(pairs) if index != left_out] for pairs in (one, other)]
        parts.append(translation.corpus_bleu(kept[0]) - translation.corpus_bleu(kept[1]))
    variance = sum((part - sum(parts) / 4) ** 2 for part in parts) * 3 / 4
    assert found.error == pytest.approx(math.sqrt(variance)) and found.error > 0
    same = translation.difference("bleu", one, one)
    assert (same.value, same.error) == (0, 0)
    assert math.isnan(translation.difference("chrf", one[:1], other[:1]).error)


def test_the_demo_is_a_task_without_files():
    lm = Parrot([" Lima"] * 974)
    samples = harness.ask(lm, harness.load_tasks(["demo"], "nowhere"), harness.Plan(limit=3))
    assert [request.args[0] for request in lm.asked] == [question.prompt for question in demo.test_questions(3)]
    assert [sample["doc"]["answers"] for sample in samples["demo"]] == [[q.answer] for q in demo.test_questions(3)]
    assert lm.asked[0].args[1]["max_gen_toks"] == MAX_NEW_TOKENS


@pytest.mark.parametrize("plan", [harness.Plan(), harness.Plan(1, 1, max_new_tokens=7), harness.Plan(0)], ids=str)
def test_samples_alone_are_those_of_an_evaluation(plan, data, capsys):
    found = []
    for ask in (lambda *a: harness.evaluate(*a)["samples"], harness.ask):
        lm = Parrot([" Ann"] * 9)
        lm.rounds = {("nq", 0): [{"text": "x"}]}
        found.append(ask(lm, harness.load_tasks(["nq"], data, plan.num_fewshot), plan))
        capsys.readouterr()
    assert found[0] == found[1] and found[0]["nq"][0]["rounds"] == [{"text": "x"}]
    shown = harness.prompts(harness.load_tasks(["nq"], data, plan.num_fewshot), plan)
    assert shown == {"nq": [sample["arguments"][0][0] for sample in found[0]["nq"]]}
    assert capsys.readouterr().err == ""  # no bar


class TestFiles:
    def test_several_or_none(self, data, tmp_path):
        (tmp_path / "gsm8k_mine.jsonl").unlink()
        with pytest.raises(ValueError, match=r"one file gsm8k\*.jsonl for the task gsm8k, but .* has no file"):
            find_file(data, "gsm8k")
        (tmp_path / "nq_other.jsonl").write_text("", encoding="utf-8")
        with pytest.raises(ValueError, match=r"has the files nq_mine.jsonl, nq_other.jsonl of that name"):
            find_file(data, "nq")
        with pytest.raises(ValueError, match="`--data` must be a folder, but 'nowhere' is none"):
            find_file("nowhere", "nq")

    @pytest.mark.parametrize("line", ["no json", '{"question": "a"}', '{"question": 1, "answer": "a"}', "[]",
                                      '{"question": "a", "answer": []}'])  # fmt: skip
    def test_bad_lines(self, line, tmp_path):
        (tmp_path / "nq.jsonl").write_text('{"question": "a", "answer": "b"}\n\n' + line + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r'Lines must be {"question": .*}, but line 3 of .* is not'):
            load_splits("nq", 0, str(tmp_path))

    def test_too_few_lines(self, data):
        with pytest.raises(ValueError, match="must have more lines than the 7 worked examples, but has 7"):
            load_splits("nq", 5, data, 7)

    def test_the_hub_where_no_folder_is_given(self):
        with pytest.raises(ValueError, match=r"task nq must be on the Hub .* does not load .*Pass --data FOLDER"):
            load_splits("nq", 5)  # the tests have no network


def test_missing_tasks_are_named(data, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", _own_only(sys.modules["lm_eval.tasks"].TaskManager))
    with pytest.raises(ValueError, match=r"but 'triviqa' is none\. Did you mean triviaqa\?"):
        harness.load_tasks(["triviqa"], data)


def _own_only(manager):
    """The harness's own tasks are thousands of files, which take seconds to read."""
    return lambda include_defaults=True, **options: manager(include_defaults=False, **options)
