"""Answers of ensembles through the harness's model type: as `generate()` gives them, as the harness asks for them."""

from __future__ import annotations

import json
import types

import lm_eval
import pytest
from asked import CONTEXTS, KINDS, ensemble, harness_model, members, request, requests
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from support.calls import inputs_of
from support.saved_members import byte_level_tokenizer, metaspace_tokenizer, save_member

from hf_adafuse import AdaFuseConfig, chat_inputs, enable_adafuse
from hf_adafuse.lab.evaluation.contexts import prompt_rows
from hf_adafuse.lab.evaluation.language_model import AdaFuseLM
from hf_adafuse.lab.evaluation.responses import Responses

GREEDY = {"until": ["\n\n", " the"], "max_gen_toks": 12}
CONFIG = AdaFuseConfig(max_word_tokens=6)
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"


def asked(contexts=CONTEXTS, **changes):
    return requests("generate_until", [(context, GREEDY | changes) for context in contexts])


def written(kinds, context, config=CONFIG, until=GREEDY["until"], inputs=None, **options):
    """What `generate()` writes after one prompt."""
    (main, tokenizer), *others = members(*kinds)
    output = enable_adafuse(main).generate(
        **(inputs or inputs_of(tokenizer, context)),
        tokenizer=tokenizer,
        assistant_models=[model for model, _ in others],
        assistant_tokenizers=[tok for _, tok in others],
        adafuse_config=config,
        max_new_tokens=12,
        stop_strings=until or None,
        return_dict_in_generate=True,
        **{"do_sample": False, **options},
    )
    text = "".join(committed.text for committed in output.rounds[0])
    for stop in until:
        text = text.split(stop)[0]
    return text, [committed.text for committed in output.rounds[0]]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[2:]], ids=lambda kinds: kinds[0][1])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_those_of_generate_one_by_one(kinds, batch_size):
    lm = ensemble(kinds, CONFIG, batch_size=batch_size)
    texts = lm.generate_until(asked())
    expected = [written(kinds, context) for context in CONTEXTS]
    assert texts == [text for text, _ in expected]
    found = [[committed["text"] for committed in lm.rounds["task", number]] for number in range(len(CONTEXTS))]
    assert found == [rounds for _, rounds in expected]
    json.dumps(list(lm.rounds.values()), allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
def test_a_member_alone_writes_what_the_harness_own_writes(kind):
    found = ensemble([kind], False, batch_size=3).generate_until(asked())
    expected = harness_model(*kind, batch_size=1).generate_until(asked(), disable_tqdm=True)
    assert [text.strip() for text in found] == [text.strip() for text in expected]
    assert len(set(found)) > 1


def test_settings_of_a_task_are_honoured():
    kinds = KINDS[:2]
    lm = ensemble(kinds, CONFIG)
    (no_stop,) = lm.generate_until([request("generate_until", CONTEXTS[0], {"max_gen_toks": 12, "until": []})])
    assert no_stop == written(kinds, CONTEXTS[0], until=[])[0]
    (as_text,) = lm.generate_until([request("generate_until", CONTEXTS[0], {"max_gen_toks": 12, "until": "a"})])
    assert as_text == no_stop.split("a")[0]
    drawn = {"do_sample": True, "temperature": 2.0, "top_k": 40, "max_gen_toks": 12}
    assert len({ensemble(kinds).generate_until([request("generate_until", "She", drawn)])[0] for _ in range(4)}) > 1
    drawn |= {"until": []}
    lm = ensemble(kinds, batch_size=4)
    several = lm.generate_until([request("generate_until", "She", drawn) for _ in range(8)])  # `repeats` of a task
    assert len(set(several)) > 1
    assert len(set(lm.generate_until([request("generate_until", "She", GREEDY) for _ in range(3)]))) == 1
    with pytest.raises(ValueError, match="generation mode must be greedy search with AdaFuse"):
        lm.generate_until([request("generate_until", "She", {"num_beams": 2, "max_gen_toks": 5})])


def test_prompts_that_are_too_long_lose_their_beginning():
    kind = ("llama", "byte_level")
    long = asked(["There was a cat on the tree. " * 60])
    expected = harness_model(*kind).generate_until(long, disable_tqdm=True)
    assert ensemble([kind], False).generate_until(long) == expected
    with pytest.raises(ValueError, match="`max_gen_toks` must be below the context of every member, but is 600"):
        ensemble([kind]).generate_until(asked(max_gen_toks=600))


def test_what_is_known_is_not_asked_again(tmp_path):
    path = tmp_path / "responses.jsonl"
    pairs = requests("loglikelihood", [("She", " said"), ("She", " saw")])
    first = ensemble(KINDS[:2], CONFIG, responses=Responses(path), batch_size=2)
    texts, scores = first.generate_until(asked()), first.loglikelihood(pairs)
    with path.open("ab") as file:
        file.write(b'["torn')
    again = ensemble(KINDS[:2], CONFIG, responses=Responses(path))
    again._generate = again._scorer.pairs = None  # nobody is asked
    assert (again.generate_until(asked()), again.loglikelihood(pairs)) == (texts, scores)
    assert again.rounds == first.rounds
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="must hold responses of this command, but row 1 is none"):
        Responses(path)


def test_the_harness_own_cache_is_filled_batch_by_batch():
    lm, kept = ensemble(KINDS[:2], CONFIG, batch_size=2), []
    lm.set_cache_hook(types.SimpleNamespace(add_partial=lambda *call: kept.append(call)))
    texts = lm.generate_until(asked())
    assert {call[1][0]: call[2] for call in kept} == dict(zip(CONTEXTS, texts, strict=True))
    assert all(call[0] == "generate_until" and call[1][1] == GREEDY for call in kept)


class TestChats:
    messages = ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Lily."})

    @pytest.fixture
    def templates(self, monkeypatch):
        for number, (_, tokenizer) in enumerate(members(*KINDS[:2])):
            monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("<", "(:"[number]).replace(">", ")"))

    def test_each_member_reads_its_own_template(self, templates):
        lm = ensemble(KINDS[:2], CONFIG)
        context = lm.apply_chat_template([*self.messages, {"role": "user", "content": "When?"}])
        tokenizers = [tokenizer for _, tokenizer in members(*KINDS[:2])]
        texts = [tok.decode(ids) for tok, ids in zip(tokenizers, prompt_rows(context, tokenizers), strict=True)]
        assert texts[0].startswith("(user) Who?\n(assistant) Lily.\n(user) When?")
        assert texts[1].startswith(":user) ")
        inputs = chat_inputs([*self.messages, {"role": "user", "content": "When?"}], tokenizers)
        assert lm.generate_until(asked([context])) == [written(KINDS[:2], None, inputs=inputs)[0]]

    def test_continuations_of_chats_are_scored(self, templates):
        kind = KINDS[0]
        own, lm = harness_model(*kind), ensemble([kind], False)
        pairs = [[(one.apply_chat_template(list(self.messages[:1])), " A cat")] for one in (own, lm)]
        expected, found = (
            model.loglikelihood(requests("loglikelihood", pair), True)[0]
            for model, pair in zip((own, lm), pairs, strict=True)
        )
        assert found[0] == pytest.approx(expected[0], abs=1e-3)

    def test_a_member_without_a_template_is_named(self):
        lm = ensemble(KINDS[:2])
        with pytest.raises(ValueError, match=r"`tokenizers\[0\]` must have a chat template"):
            lm.generate_until(asked([lm.apply_chat_template(list(self.messages[:1]))]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("members")
    return [save_member(root / "byte", byte_level_tokenizer(), 1), save_member(root / "meta", metaspace_tokenizer(), 3)]


class TestArguments:
    """What `--model_args` of the harness can say."""

    def test_names_and_settings_as_text(self, folders, tmp_path):
        (tmp_path / "settings.json").write_text('{"method": "words", "num_branches": 2}', encoding="utf-8")
        text = f"pretrained={folders[0]},assistants={folders[1]},adafuse_config={tmp_path / 'settings.json'},mean=root"
        lm = get_model("adafuse").create_from_arg_string(text + ",model_weights=2+1", {"batch_size": "2"})
        assert isinstance(lm, AdaFuseLM) and len(lm.handles) == 2
        assert lm.config == AdaFuseConfig(
            method="words", method_options={"mean": "root"}, num_branches=2, model_weights=(2, 1)
        )
        assert lm.tokenizer_name.count("+") == 1
        assert AdaFuseLM(folders[0], [folders[1]], adafuse_config='{"max_words": 2}').config.max_words == 2

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"fusoin": "word"}, "fields of AdaFuseConfig, but 'fusoin' is none"),
            (
                {"adafuse_config": "no.json"},
                "must be a file in JSON that holds settings, but 'no.json' cannot be read",
            ),
            ({"adafuse_config": False}, "must not be False with assistants"),
            ({"batch_size": "many"}, "`batch_size` must be a whole number"),
            ({"model_weights": (1, 2, 3)}, "`model_weights` must be one per member, but is 3 for 2"),
            ({"assistant_tokenizers": [None, None]}, "must be one per assistant, but is 2 for 1"),
        ],
    )
    def test_mistakes_are_named(self, given, message):
        (main, tokenizer), (other, other_tokenizer) = members(*KINDS[:2])
        with pytest.raises(ValueError, match=message):
            AdaFuseLM(main, [other], tokenizer, **{"assistant_tokenizers": [other_tokenizer], **given})


def test_the_harness_takes_the_model_by_object(tmp_path):
    """A multiple choice through `simple_evaluate`, with the harness's own members beside ours."""
    rows = [{"q": context, "choices": ["cat", "tree", "girl"], "gold": n % 3} for n, context in enumerate(CONTEXTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "choose",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}} the",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    manager = TaskManager(include_defaults=False)
    found = [
        lm_eval.simple_evaluate(model=lm, tasks=[dict(task)], task_manager=manager, bootstrap_iters=0)
        for lm in (ensemble(KINDS[:1], False), harness_model(*KINDS[0]), ensemble(KINDS[:2], method="words"))
    ]
    scores = [[sample["filtered_resps"] for sample in one["samples"]["choose"]] for one in found]
    for ours, theirs in zip(scores[0], scores[1], strict=True):
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)
    assert found[0]["results"]["choose"]["acc,none"] == found[1]["results"]["choose"]["acc,none"]
    best = [max(range(3), key=lambda k: row[k][0]) for row in scores[2]]
    assert found[2]["results"]["choose"]["acc,none"] == sum(b == n % 3 for n, b in enumerate(best)) / len(CONTEXTS)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_call_it_has_kept_the_answers_that_were_there(tmp_path):
    path = tmp_path / "responses.jsonl"
    whole = ensemble(KINDS[:2], CONFIG, batch_size=1)
    texts = whole.generate_until(asked())
    first = ensemble(KINDS[:2], CONFIG, responses=Responses(path), batch_size=1)
    kept = []

    def kill_after_two(kind, arguments, answer):
        kept.append(arguments[0])
        if len(kept) == 2:
            raise KeyboardInterrupt

    first.set_cache_hook(types.SimpleNamespace(add_partial=kill_after_two))
    with pytest.raises(KeyboardInterrupt):
        first.generate_until(asked())
    again = ensemble(KINDS[:2], CONFIG, responses=Responses(path), batch_size=1)
    assert len(again._responses) == 2
    seen = []
    again.set_cache_hook(types.SimpleNamespace(add_partial=lambda kind, arguments, answer: seen.append(arguments[0])))
    assert again.generate_until(asked()) == texts
    assert {*seen} == {*CONTEXTS} - {*kept} != set()
    assert again.rounds == whole.rounds
    # Of the call that was killed nobody knows the passes: its words do not count either, its seconds do.
    assert again.cost.words == sum(len(text.split()) for text, context in zip(texts, CONTEXTS) if context in seen)
    assert whole.cost.words == sum(len(text.split()) for text in texts)
    assert whole.cost.passes > again.cost.passes > 0 < again.cost.seconds
