"""`AdaFusePredictor`: the answers of `hf-adafuse run`, whatever the batches are made of and however they are cut."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import re

import numpy as np
import pytest
import torch
from support.chats import members as chat_members
from support.jobs import NEW, PAIR, SETTINGS, answers_to, direct, lines_of, questions, write_lines
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS

import hf_adafuse
from hf_adafuse import AdaFuseDecodingError, AdaFuseEnsemble, AdaFusePredictor, batch, ensemble
from hf_adafuse.call import batch_columns
from hf_adafuse.cli import main
from hf_adafuse.demo.data import PROMPT
from hf_adafuse.trees.kv_cache_backend import KVCacheBackend

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")

FORM = {"template": PROMPT, "max_new_tokens": NEW}
TYPES = {"text": "string", "words": "int64", "finish_reason": "string", "error": "string"}
TOO_LONG = "why " * 3000
pytestmark = pytest.mark.usefixtures("short_contexts")


def pair():
    """Models of one's own: shallow copies."""
    return [(copy.copy(model), tokenizer) for model, tokenizer in PAIR()]


def predictor(**more):
    return AdaFusePredictor(pair(), **FORM | more)


def asked(number=14):
    return {"id": list(range(number)), "question": questions()[:number]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The demo's pair in folders, in float32."""
    root = tmp_path_factory.mktemp("members")
    for index, (model, tokenizer) in enumerate(PAIR()):
        model.save_pretrained(root / str(index))
        tokenizer.save_pretrained(root / str(index))
    return [str(root / "0"), str(root / "1")]


@pytest.fixture
def run(tmp_path, folders):
    """The records of `hf-adafuse run` on questions."""

    def answer(records, *flags):
        write_lines(tmp_path / "in.jsonl", records)
        files = [str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        members = ["--model", folders[0], "--assistant", folders[1]]
        template = PROMPT.replace("\n", "\\n")
        assert main(["run", *files, *members, *SETTINGS, "--template", template, "--on-error", "skip", *flags]) == 0
        return lines_of(tmp_path / "out.jsonl")

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lists", "arrays", "frame"])
def test_a_batch_comes_back_with_its_answers(kind):
    given = asked()
    if kind == "arrays":
        given = {"id": np.arange(14), "question": np.array(given["question"], dtype=object)}
    if kind == "frame":
        given = pandas.DataFrame(given, index=range(100, 114))
    before = copy.deepcopy(given)
    answered = predictor()(given)
    assert type(answered) is type(given) and list(answered.keys()) == ["id", "question", *TYPES]
    kinds = {"lists": list, "arrays": np.ndarray, "frame": pandas.Series}
    assert {type(answered[name]) for name in answered} == {kinds[kind]}
    assert list(answered["text"]) == answers_to(questions())
    assert list(answered["words"]) == [len(text.split()) for text in answered["text"]]
    ends = [direct(PROMPT.format(question=text))[-1].ends for text in questions()]
    assert list(answered["finish_reason"]) == ["stop" if has_ended else "length" for has_ended in ends]
    assert list(answered["error"]) == [""] * 14
    assert list(given.keys()) == list(before.keys()) and all(list(given[name]) == list(before[name]) for name in given)
    if kind == "frame":
        assert answered.index.equals(given.index)
    if kind == "lists":
        assert {type(answered[name][0]) for name in TYPES} == {str, int}
        json.dumps(answered)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 16])
def test_texts_do_not_depend_on_how_prompts_are_cut(size):
    answer = predictor(batch_size=size)
    assert answer(asked())["text"] == answers_to(questions())
    some = [answer({"question": questions()[start : start + 5]})["text"] for start in range(0, 14, 5)]
    assert sum(some, []) == answers_to(questions())


@pytest.mark.parametrize("kind", ["arrays", "frame"])
def test_columns_have_the_same_types_whatever_is_in_them(kind):
    answer = predictor()
    for texts in ([], questions()[:1], [TOO_LONG], [None], [questions()[0], None]):
        column = np.array(texts, dtype=object)
        answered = answer({"question": column} if kind == "arrays" else pandas.DataFrame({"question": column}))
        schema = pyarrow.table({name: pyarrow.array(answered[name]) for name in TYPES}).schema
        assert {name: str(schema.field(name).type).removeprefix("large_") for name in TYPES} == TYPES


def test_texts_keep_zeros_at_their_ends():
    assert batch_columns.with_columns({"a": np.zeros(1)}, {"text": ["a\0"]}, {"text": "str"})["text"].tolist() == [
        "a\0"
    ]


def test_what_cannot_be_answered_takes_nothing_with_it(run):
    bad = [questions()[0], TOO_LONG, None, "  ", questions()[1], 7, "\ud800"]
    answered = predictor()({"question": bad})
    records = run([{"question": text} for text in bad])
    assert answered["text"] == [record["text"] for record in records]
    assert answered["error"] == [record.get("error", "") for record in records]
    assert answered["finish_reason"] == [record["finish_reason"] for record in records]
    assert [bool(error) for error in answered["error"]] == [False, True, True, True, False, False, True]
    assert "must be at most" in answered["error"][1] and "it is null" in answered["error"][2]


def test_missing_values_of_a_frame():
    column = pandas.Series([questions()[0], np.nan, None, pandas.NA], dtype=object)
    answered = predictor()(pandas.DataFrame({"question": column}))
    assert answered["text"].tolist() == [*answers_to(questions()[:1]), "", "", ""]
    assert answered["error"].str.contains("it is null").tolist() == [False, True, True, True]
    missing = [questions()[0], pandas.NA, pandas.NaT, np.float32("nan"), None]
    for given in (missing, np.array(missing, dtype=object)):
        errors = predictor()({"question": given})["error"]
        assert ["it is null" in error for error in errors] == [False, True, True, True, True]
    (error,) = predictor()({"question": [questions()[0].encode()]})["error"]
    assert error.endswith("must have a text in the field 'question', but it is bytes")
    twice = pandas.DataFrame([["a", "b"]] * 2, columns=["question"] * 2)
    with pytest.raises(ValueError, match="The columns of a batch must have 'question' once"):
        predictor()(twice)
    numbers = predictor(template="{a} and {b}")({"a": np.array([1.5, np.nan]), "b": np.array([2, 3])})
    assert [bool(error) for error in numbers["error"]] == [False, True]


def test_a_template_takes_any_columns(monkeypatch):
    prompts = []
    rounds = AdaFuseEnsemble.rounds
    monkeypatch.setattr(
        AdaFuseEnsemble, "rounds", lambda self, some, **kw: prompts.extend(some) or rounds(self, some, **kw)
    )
    values = {
        "n": np.array([3]),
        "list": np.array([np.array(["é", "b"]), None], dtype=object)[:1],
        "on": np.array([True]),
    }
    predictor(template="{n}{{}} {list}\n{on}")(values)
    predictor(template=None, prompt_column="the prompt")({"the prompt": ["Question: why\nAnswer:"]})
    assert prompts == ['3{} ["é", "b"]\ntrue', "Question: why\nAnswer:"]


@pytest.fixture
def failing(monkeypatch):
    """The fourth question fails in its third round, in a batch and alone."""
    rounds = AdaFuseEnsemble.rounds

    def fail(self, prompts, **kwargs):
        if any(questions()[3] in prompt for prompt in prompts):
            raise AdaFuseDecodingError("assistant 1", "out of memory", 3, [" half an"] * len(prompts), [])
        return rounds(self, prompts, **kwargs)

    monkeypatch.setattr(AdaFuseEnsemble, "rounds", fail)


def test_a_member_that_fails_is_recorded_with_the_text_until_there(failing):
    answered = predictor()(asked())
    assert answered["text"] == [*answers_to(questions()[:3]), " half an", *answers_to(questions()[4:])]
    assert answered["error"][3] == "assistant 1 failed in round 3: out of memory"
    assert (answered["words"][3], answered["finish_reason"][3]) == (0, "error")
    assert "".join(answered["error"][:3] + answered["error"][4:]) == ""


def test_errors_are_raised_when_asked(failing):
    answer = predictor(on_error="raise")
    assert answer(asked(3))["text"] == answers_to(questions()[:3])
    with pytest.raises(AdaFuseDecodingError, match="assistant 1 failed in round 3") as info:
        answer(asked())
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)  # as it comes back from another process
    with pytest.raises(ValueError, match="must be at most"):
        answer({"question": [questions()[0], TOO_LONG]})
    with pytest.raises(ValueError, match="it is null"):
        answer({"question": [questions()[0], None]})


BAD_ARGUMENTS = [
    ({"members": "gpt2"}, "`members` must be a list of at least one model"),
    ({"members": []}, "`members` must be a list of at least one model"),
    ({"adafuse_config": {"num_branches": 0}}, "`num_branches` must be"),
    ({"adafuse_config": {"method": "vote"}}, "`method` must be"),
    ({"adafuse_config": False}, "`adafuse_config` must not be False"),
    ({"adafuse_config": "best"}, "`adafuse_config` must be an AdaFuseConfig"),
    ({"prompt_column": 3}, "`prompt_column` must be the name of a column, but is 3. "),
    ({"output_column": ""}, "`output_column` must be the name of a column, but is ''. "),
    ({"output_column": "error"}, "`output_column` must be a new column, but is 'error'. "),
    ({"prompt_column": "text"}, "`output_column` must be a new column, but is 'text'. "),
    ({"template": "{text}:"}, "`output_column` must be a new column, but is 'text'. "),
    ({"template": "no field"}, "`template` must have a field as {name}, but is 'no field'. "),
    ({"template": "{0}"}, "`template` must be text with fields as {name}, but is '{0}': "),
    ({"template": 7}, "`template` must be text with fields as {name}, but is 7: "),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be a whole number of at least 1, but is 0. "),
    ({"max_new_tokens": 1.5}, "`max_new_tokens` must be a whole number of at least 1, but is 1.5. "),
    ({"batch_size": True}, "`batch_size` must be a whole number of at least 1, but is True. "),
    ({"seed": -1}, "`seed` must be a whole number of at least 0, but is -1. "),
    ({"stop": ""}, "`stop` must be a text or a list of texts, none empty, but is ''. "),
    ({"stop": [3]}, "`stop` must be a text or a list of texts, none empty, but is [3]. "),
    ({"structured": {"xml": ""}}, "`structured` must be a dict with one of "),
    ({"thinking": "off"}, "`thinking` must be left out without `chat`, but is 'off'. "),
    ({"max_thinking_tokens": 5}, "`max_thinking_tokens` must be left out without `chat`, but is 5. "),
    ({"chat": True, "thinking": "no"}, '`thinking` must be "apart", "main" or "off", but is \'no\'. '),
    ({"chat": 1}, "`chat` must be True or False, but is 1. "),
    ({"lazy": None}, "`lazy` must be True or False, but is None. "),
    ({"on_error": np.array(["raise", "skip"])}, '`on_error` must be "record" or "raise", but is array('),
    ({"on_error": "skip"}, '`on_error` must be "record" or "raise", but is \'skip\'. '),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[message for _, message in BAD_ARGUMENTS])
def test_bad_arguments_are_found_before_anything_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr(ensemble, "_pair", None)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        AdaFusePredictor(**{"members": ["nowhere/to-be-found"], **arguments})


def test_bad_batches():
    answer = predictor()
    with pytest.raises(ValueError, match=r"must have 'question', but are: id, prompt\. Rename one"):
        answer({"id": [1], "prompt": ["a"]})
    with pytest.raises(ValueError, match=r"must not have 'words', but are: question, words\. Rename one"):
        answer({"question": ["a"], "words": [1]})
    with pytest.raises(ValueError, match=r"must have 'question', but are: none"):
        answer(pandas.DataFrame())
    with pytest.raises(
        ValueError, match=r"dict of columns or a pandas DataFrame, but is of type Table\. .*batch_format"
    ):
        answer(pyarrow.table({"question": ["a"]}))
    for column in ("question", 5, np.array(5), None):
        with pytest.raises(ValueError, match=r"A column of a batch must be a list of values, but is "):
            answer({"question": column})
    assert predictor(output_column="answer")({"question": [], "text": []}).keys() == {"question", "text", "answer"} | (
        TYPES.keys() - {"text"}
    )


def test_members_that_do_not_load():
    with pytest.raises(ValueError, match=r"`members\[0\]` must be a model, .* 'nowhere' does not load"):
        AdaFusePredictor(["nowhere"])
    lazy = AdaFusePredictor(["nowhere"], lazy=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="does not load"):  # no failure of a prompt: it is not recorded
            lazy({"prompt": ["a"]})


def test_pickled_before_and_after_it_is_loaded(folders):
    lazy = AdaFusePredictor(folders, "robust", **FORM, lazy=True)
    loaded = AdaFusePredictor(folders, "robust", **FORM)
    expected = loaded(asked(4))
    assert len(pickle.dumps(loaded)) < 5000 and pickle.dumps(loaded) == pickle.dumps(lazy)
    for one in (lazy, pickle.loads(pickle.dumps(loaded)), copy.deepcopy(loaded)):
        assert one(asked(4)) == expected


def test_loaded_members_are_pickled_with_it():
    answer = predictor()
    again = pickle.loads(pickle.dumps(answer))
    assert again(asked(4)) == answer(asked(4)) and answer(asked(4))["text"] == answers_to(questions()[:4])


def test_members_by_name_are_loaded_once(folders, monkeypatch):
    loads = []
    pairs = ensemble._pair
    monkeypatch.setattr(ensemble, "_pair", lambda *args: loads.append(args[1]) or pairs(*args))
    answer = AdaFusePredictor([(folders[0], folders[0]), folders[1]], **FORM, lazy=True, dtype="float32")
    assert loads == []
    assert [answer(asked(2))["text"], answer(asked(2))["text"]] == [answers_to(questions()[:2])] * 2
    assert loads == [(folders[0], folders[0]), folders[1]]


def test_datasets_map_gives_what_the_command_gives(run, folders):
    datasets = pytest.importorskip("datasets")
    records = [{"id": index, "question": text} for index, text in enumerate([*questions(), TOO_LONG])]
    dataset = datasets.Dataset.from_list(records)
    answer = AdaFusePredictor(folders, **FORM)
    answered = dataset.map(answer, batched=True, batch_size=4)  # the first error comes in the last batch
    for row, record in zip(answered, run(records), strict=True):
        assert {"id": row["id"], "question": row["question"]} == record["input"]
        assert (row["text"], row["words"], row["finish_reason"]) == (
            record["text"], record.get("words", 0), record["finish_reason"],
        )  # fmt: skip
        assert row["error"] == record.get("error", "")
    assert row["error"]
    assert {name: answered.features[name].dtype for name in TYPES} == TYPES
    for kind in ("numpy", "pandas"):
        formatted = dataset.select(range(4)).with_format(kind).map(answer, batched=True, batch_size=2)
        assert formatted.with_format(None)["text"][:] == answered["text"][:4]


def test_datasets_find_what_they_have_made(folders):
    fingerprint = pytest.importorskip("datasets.fingerprint")
    loaded, lazy = AdaFusePredictor(folders, **FORM), AdaFusePredictor(folders, **FORM, lazy=True)
    loaded(asked(1))
    assert fingerprint.Hasher.hash(loaded) == fingerprint.Hasher.hash(lazy)
    assert fingerprint.Hasher.hash(loaded) != fingerprint.Hasher.hash(AdaFusePredictor(folders, **FORM, stop="a"))


def test_frames_of_spark():
    """Without Spark: it calls a function that it has pickled with the frames of a partition."""
    frame = pandas.DataFrame(asked())
    function = pickle.loads(pickle.dumps(predictor().map_in_pandas))
    made = function(iter([frame[:10], frame[10:12], frame[12:12], frame[12:]]))
    assert iter(made) is made
    made = list(made)
    assert [len(one) for one in made] == [10, 2, 0, 2]
    assert pandas.concat(made)["text"].tolist() == answers_to(questions())


def test_what_all_batches_begin_with_is_read_once(monkeypatch):
    examples = "".join(f"Question: {question}\nAnswer: 7\n\n" for question in questions()[:6])
    template = examples.replace("{", "{{").replace("}", "}}") + PROMPT
    answer = predictor(template=template)
    rows = []
    read = KVCacheBackend._read_prompts

    def counted(self, ids, *args):
        rows.append(ids.shape[0])
        return read(self, ids, *args)

    monkeypatch.setattr(KVCacheBackend, "_read_prompts", counted)
    texts = [answer({"question": questions()[start : start + 4]})["text"] for start in (0, 4, 8)]
    assert rows.count(1) == 2  # by each member
    assert sum(texts, []) == predictor(template=template)({"question": questions()[:12]})["text"]


def test_sampled_texts_follow_from_the_seed_and_the_prompt(run):
    config = {"preset": "robust", "do_sample": True}
    records = [{"question": text} for text in questions()]
    expected = [record["text"] for record in run(records, "--sample", "--seed", "3")]
    assert expected != answers_to(questions())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for size in (2, 16):
        answer = predictor(adafuse_config=config, seed=3, batch_size=size)
        doubled = answer({"question": [*questions(), *questions()[:3]]})
        assert doubled["text"] == [*expected, *expected[:3]]
    assert torch.equal(torch.get_rng_state(), state)
    assert predictor(adafuse_config=config, seed=4)(asked())["text"] != expected


def test_stops_chats_and_structured_texts_reach_generate(run):
    records = [{"question": text} for text in questions()[:5]]
    answered = predictor(stop=["a"], adafuse_config={"margin_threshold": 2.0})(asked(5))
    expected = run(records, "--stop", "a", "--preset", "paper", "--threshold", "2")
    assert answered["text"] == [record["text"] for record in expected]
    assert answered["finish_reason"] == [record["finish_reason"] for record in expected]
    assert "stop" in answered["finish_reason"] and not any("a" in text for text in answered["text"])
    pytest.importorskip("xgrammar")
    digits = predictor(structured={"regex": " [0-9]{2}"})(asked(3))
    assert all(text.strip().isdigit() for text in digits["text"])


def test_a_chat_is_rendered_by_each_members_own_template():
    members = chat_members()
    given = {"prompt": ["who wrote it", "when"]}
    answered = AdaFusePredictor(members, {"max_word_tokens": 4}, chat=True, max_new_tokens=6)(given)
    both = AdaFuseEnsemble(members, {"max_word_tokens": 4})
    assert answered["text"] == both.texts(given["prompt"], chat=True, max_new_tokens=6)
    assert answered["text"] != both.texts(given["prompt"], max_new_tokens=6)
    members = [
        (model, TOKENIZERS[name]()) for (model, _), name in zip(members, ["byte_level", "sentencepiece"], strict=True)
    ]
    with pytest.raises(ValueError, match=r"`tokenizers\[0\]` must have a chat template"):
        AdaFusePredictor(members, chat=True)


def test_settings_saved_with_the_main_model_are_taken_where_none_are_given(run):
    members = pair()
    members[0][0].generation_config = copy.deepcopy(members[0][0].generation_config)
    members[0][0].generation_config.adafuse_config = {"margin_threshold": 2.0, "num_branches": 2}
    flags = ["--preset", "paper", "--threshold", "2", "--branches", "2"]
    records = run([{"question": text} for text in questions()], *flags)
    expected = [record["text"] for record in records]
    assert AdaFusePredictor(members, **FORM)(asked())["text"] == expected != answers_to(questions())
    assert AdaFusePredictor(members, True, **FORM)(asked())["text"] == answers_to(questions())


def test_a_member_behind_a_server_is_named(folders):
    behind = StandIn(*PAIR()[1], name=folders[1])
    with serving(behind) as url:
        lazy = AdaFusePredictor([folders[0], f"vllm:{url}"], **FORM, lazy=True)
        assert behind.requests == []
        assert pickle.loads(pickle.dumps(lazy))(asked(4))["text"] == answers_to(questions()[:4])
        assert behind.requests


def test_no_engine_is_imported():
    for module in (batch, batch_columns):
        nodes = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Import)]
        assert not {"ray", "pandas", "pyarrow", "datasets", "pyspark"} & {a.name for node in nodes for a in node.names}


def test_export():
    assert "AdaFusePredictor" in hf_adafuse.__all__ and hf_adafuse.AdaFusePredictor is AdaFusePredictor


@pytest.mark.parametrize("prompts", [[""], ["", ""], ["", "why"]])
def test_prompts_without_a_token_are_refused(prompts):
    with pytest.raises(ValueError, match="at least one token"):
        AdaFuseEnsemble(pair()).texts(prompts, max_new_tokens=2, stop_strings=["."])


def test_conversations_are_no_prompts():
    """They would be asked as JSON, in one user message."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    array = np.array(chat, dtype=object)
    staff = [{"name": "Ann", "role": "chair"}]
    found = AdaFusePredictor(chat_members(), chat=True, max_new_tokens=2)({"prompt": [chat, array, "Who?", staff]})
    assert all("but it is a conversation. Give the text of one message" in error for error in found["error"][:2])
    assert found["error"][2:] == ["", ""]
