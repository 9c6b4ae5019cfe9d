"""Think apart, answer together: what each member thinks is its own, and the answer behind it is fused."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import support.thinkers
import torch
from peft import LoraConfig, get_peft_model
from support.thinkers import A_SEEN, ANSWERS, CHAT, OPENED, PLAIN, QWEN, A, member, pair, words_tokenizer
from support.tiny import tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_adafuse import AdaFuseConfig, AdaFuseDecodingError, AdaFuseEnsemble, AdaFusePredictor
from hf_adafuse.decoding.reviews import Reviews
from hf_adafuse.hub import modeling_adafuse
from hf_adafuse.members import thoughts
from hf_adafuse.members.model_handle import ModelHandle
from hf_adafuse.members.rating_prompts import RatingPrompts
from hf_adafuse.members.thinking import closed_at_once, thinking_format, thoughts_of, without_thoughts
from hf_adafuse.members.thoughts import thinking_inputs


def answer(members, config=None, **kwargs):
    rounds = AdaFuseEnsemble(members, config).rounds([CHAT], chat=True, max_new_tokens=4, **kwargs)[0]
    return rounds.text.strip(), rounds.thoughts


@pytest.mark.parametrize("templates", [(QWEN, QWEN), (OPENED, QWEN), (OPENED, OPENED)], ids=["own", "both", "opened"])
@pytest.mark.parametrize("config", [AdaFuseConfig(), None], ids=["paper", "robust"])
def test_each_member_answers_behind_its_own_thoughts(templates, config):
    """By hand: A is surer of "sky" (18 to 12) than B of "rose" (15 to 12); without thoughts both say "gray"."""
    apart = answer(pair(*templates), config)
    assert apart == ("sky", ["blue dim", "red dim"])
    assert answer(pair(*templates), config, thinking="off") == ("gray", [None, None])
    # B alone says "rose": it is A's certainty that counts, and the other way round with the weights.
    weighted = {"model_weights": (1.0, 20.0)} if config is None else config.changed({"model_weights": (1.0, 20.0)})
    assert answer(pair(*templates), weighted) == ("rose", ["blue dim", "red dim"])


def test_only_the_main_model_thinks():
    """By hand: the other one says "gray" with a little more certainty than the main model says "sky"."""
    assert answer(pair(), thinking="main") == ("gray", ["blue dim", None])
    assert answer(pair(), {"model_weights": (20.0, 1.0)}, thinking="main") == ("sky", ["blue dim", None])
    assert answer(pair()[::-1], {"model_weights": (20.0, 1.0)}, thinking="main") == ("rose", ["red dim", None])


@pytest.mark.parametrize(
    ("served", "thinking", "message"),
    [
        (
            0,
            "main",
            """`thinking` must be "off" where the main model is a thinking model behind a server, but is 'main'""",
        ),
        (
            0,
            None,
            """`thinking` must be "off" where the main model is a thinking model behind a server, but is 'apart'""",
        ),
        (
            1,
            "apart",
            """`thinking` must be "off" or "main" where assistant 1 is a thinking model behind a server, but""",
        ),
    ],
)
def test_a_member_behind_a_server_cannot_think(served, thinking, message):
    members = [SimpleNamespace(tokenizer=words_tokenizer(QWEN), is_local=index != served) for index in range(2)]
    with pytest.raises(ValueError, match=re.escape(message)):
        thinking_inputs([CHAT], members, thinking)


def test_thoughts_are_cut_at_the_most_tokens():
    """Cut in the middle: what was thought until there counts."""
    assert answer(pair(), max_thinking_tokens=2) == ("sky", ["blue", "red"])
    assert answer(pair(OPENED, OPENED), max_thinking_tokens=1) == ("sky", ["blue", "red"])
    assert answer(pair(), max_thinking_tokens=0) == ("gray", [None, None])
    assert answer(pair(OPENED, OPENED), max_thinking_tokens=0) == ("gray", [None, None])


def test_a_member_that_does_not_think_joins_the_answer():
    members = [pair()[0], member(PLAIN, {**ANSWERS, ("bot", "rose"): 10.0}, {})]
    assert answer(members) == ("sky", ["blue dim", None])
    assert answer(members[::-1]) == ("sky", [None, "blue dim"])
    # One whose template knows of thoughts, but which answers at once.
    silent = member(QWEN, {**ANSWERS, ("bot", "rose"): 30.0}, {})
    assert answer([silent, pair()[1]]) == ("rose", [None, "red dim"])
    # One that ends its text within its thoughts.
    ended = member(QWEN, {**A, ("blue", "</s>"): 50.0}, A_SEEN)
    alike = {"preset": "robust", "model_weights": None}
    assert answer([ended, pair()[1]], alike) == ("sky", ["blue", "red dim"])


def test_a_batch_is_each_prompt_alone():
    ensemble = AdaFuseEnsemble(pair())
    chats = [CHAT, [{"role": "user", "content": "ask far red"}], "far"]
    told = {}
    batch = ensemble.rounds(
        chats, chat=True, max_new_tokens=4, on_answer=lambda row, rounds: told.update({row: rounds})
    )
    for row, chat in enumerate(chats):
        (alone,) = ensemble.rounds([chat], chat=True, max_new_tokens=4)
        assert (batch[row].text, batch[row].thoughts) == (alone.text, alone.thoughts)
        assert told[row].thoughts == alone.thoughts
    assert batch[1].thoughts[0] == "blue dim"


def test_several_texts_of_a_chat_have_its_thoughts():
    chats, told = [CHAT, "far"], {}
    options = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True, "max_new_tokens": 4}
    output = AdaFuseEnsemble(pair()).generate(
        chats, chat=True, on_answer=lambda row, rounds: told.update({row: rounds.thoughts}), **options
    )
    assert [rounds.thoughts for rounds in output.rounds] == [["blue dim", "red dim"]] * 4
    assert told == {row: ["blue dim", "red dim"] for row in range(4)}


def endless():
    return support.thinkers.endless("{{ bos_token or '' }}")


def thoughts_in(ensemble, **call):
    torch.manual_seed(3)
    return ensemble.rounds("was there a cat", chat=True, max_thinking_tokens=8, max_new_tokens=2, **call)[0].thoughts


def test_thoughts_are_drawn_where_words_are():
    ensemble = AdaFuseEnsemble(endless())
    drawn = thoughts_in(ensemble, do_sample=True, temperature=3.0)
    assert drawn != thoughts_in(ensemble)
    assert thoughts_in(ensemble, generation_config=GenerationConfig(do_sample=True, temperature=3.0)) == drawn
    assert thoughts_in(ensemble, adafuse_config={"preset": "robust", "do_sample": True}, temperature=3.0) == drawn
    assert thoughts_in(
        ensemble, adafuse_config={"preset": "robust", "do_sample": False}, do_sample=True
    ) == thoughts_in(ensemble)
    assert thoughts_in(ensemble, do_sample=True, min_p=1.0) == thoughts_in(ensemble)  # other settings count, too


def test_a_member_that_returns_more_than_ids_thinks_too():
    members = endless()
    expected = thoughts_in(AdaFuseEnsemble(members))
    model = copy.copy(members[1][0])
    model.generation_config = GenerationConfig(return_dict_in_generate=True, num_return_sequences=3, do_sample=True)
    assert thoughts_in(AdaFuseEnsemble([members[0], (model, members[1][1])])) == expected


def test_a_member_with_the_code_of_a_repository_thinks_without_the_ensemble_of_it():
    main, (model, tokenizer) = endless()
    exported = copy.copy(model)
    exported.__class__ = getattr(modeling_adafuse, type(model).__name__)
    thoughts = [thoughts_in(AdaFuseEnsemble([main, (one, tokenizer)])) for one in (model, exported)]
    assert thoughts[0] == thoughts[1]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_members_of_a_call_think_as_bound_ones_do(tmp_path):
    """By their names, and with an adapter."""
    main, (model, tokenizer) = endless()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    with_adapter = get_peft_model(copy.deepcopy(model), config)
    other = AdaFuseEnsemble([main, (tiny_model("gpt2", "sentencepiece", 5), tokenizer)])
    plain = thoughts_in(AdaFuseEnsemble([main, (model, tokenizer)]))
    assert thoughts_in(other, assistant_models=[str(tmp_path)]) == plain != thoughts_in(other)
    adapted = copy.deepcopy(with_adapter).merge_and_unload()
    expected = thoughts_in(AdaFuseEnsemble([main, (adapted, tokenizer)]))
    assert expected != plain
    pair = (with_adapter, "default")
    assert thoughts_in(AdaFuseEnsemble([main, (pair, tokenizer)])) == expected
    assert thoughts_in(other, assistant_models=[pair], assistant_tokenizers=[tokenizer]) == expected


def test_random_members_equal_what_is_done_by_hand():
    """Thoughts that never close, by the plain `generate()` of each member, and the prompts put together by hand."""
    members = endless()
    chat, config = [{"role": "user", "content": "was there a cat"}], AdaFuseConfig(max_word_tokens=4)
    prompts, thoughts = [], []
    for model, tokenizer in members:
        ids = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        thoughts.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=False).strip())
        closing = tokenizer("\n</think>\n\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
        prompts.append(torch.cat([made, closing], dim=1))
    ensemble = AdaFuseEnsemble(members, config)
    expected = ensemble.generate(
        prompts[0],
        attention_mask=torch.ones_like(prompts[0]),
        assistant_inputs=[{"input_ids": prompts[1], "attention_mask": torch.ones_like(prompts[1])}],
        max_new_tokens=6,
        return_dict_in_generate=True,
    )
    rounds = ensemble.rounds([chat], chat=True, max_thinking_tokens=5, max_new_tokens=6)
    assert rounds[0].text == expected.rounds[0].text != ""
    assert rounds[0].thoughts == thoughts


# The last message of the assistant's is left open where it is continued.
CONTINUED = (
    "{% for m in messages %}{{ m['content'] }}{{ ' ' if not loop.last or add_generation_prompt }}{% endfor %}"
    "{% if add_generation_prompt %}bot <think>{% endif %}{# </think> #}"
)
GPT_OSS = "{{ '<|start|>assistant' }}{# <|channel|>analysis<|message|> <|channel|>final<|message|> #}"


@pytest.mark.parametrize(
    ("template", "prompt", "closed", "written", "thoughts"),
    [
        (QWEN, "bot", "<think>\n\n</think>\n\n", "<think>\nit is\n</think>", "it is"),
        (QWEN, "bot <think>\n\n</think>\n\n", "", "yes", None),
        (OPENED, "bot<think>\n", "\n</think>\n\n", "it is</think>", "it is"),
        ("[THINK][/THINK]", "bot", "[THINK][/THINK]", "[THINK]it[/THINK]", "it"),
        (
            GPT_OSS,
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>analysis<|message|>it<|end|><|start|>assistant<|channel|>final<|message|>",
            "it",
        ),
        (GPT_OSS, "<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>final<|message|>yes", None),
    ],
)
def test_formats(template, prompt, closed, written, thoughts):
    tokenizer = words_tokenizer(template)
    form = thinking_format(tokenizer)
    assert closed_at_once(prompt, form) == closed
    assert thoughts_of(written, prompt, form) == thoughts


def test_templates_without_thoughts_have_no_format():
    assert thinking_format(words_tokenizer(PLAIN)) is None
    assert thinking_format(words_tokenizer(None)) is None
    assert thinking_format(words_tokenizer({"default": QWEN, "rag": PLAIN})).closing == "</think>"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chat": True, "thinking": "both"}, '`thinking` must be "apart", "main" or "off", but is \'both\''),
        ({"chat": True, "max_thinking_tokens": -1}, "`max_thinking_tokens` must be a whole number of at least 0"),
        ({"chat": True, "thinking": "off", "max_thinking_tokens": 5}, 'must be left out with `thinking="off"`'),
        ({"thinking": "apart"}, "`thinking` must be left out without `chat`"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    members = pair()
    with pytest.raises(ValueError, match=message):
        AdaFuseEnsemble(members).rounds("ask", **given)


MERGED = "{% for m in messages %}{{ m['content'] }} {% endfor %}bot <think>{# </think> #}"


class Scripted(LlamaForCausalLM):
    """Writes one of two texts behind every prompt, by how long the prompt is."""

    def generate(self, input_ids, attention_mask, max_new_tokens, pad_token_id, stop_strings=None, tokenizer=None, **_):
        rows = []
        for mask in attention_mask.tolist():
            text = " one.</think>\n\n" if sum(mask) < 40 else " one two three four five six.</think>\n\n"
            rows.append(tokenizer(text, add_special_tokens=False).input_ids)
        width = max(map(len, rows))
        new = [row + [pad_token_id] * (width - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(new)], dim=1)


def test_a_mark_of_several_tokens_in_a_batch():
    """Its last token may hold what follows, and rows that end early are padded."""
    backend = Tokenizer(models.BPE(continuing_subword_prefix="", unk_token=None))
    pieces = pre_tokenizers.Split(Regex(r"</|>\n*| ?[a-z]+|."), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<|pad|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["a </think>\n\n b </think>\n\n", "one two three four five six.</think>"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = MERGED
    written = tokenizer.convert_ids_to_tokens(tokenizer("</think>\n\n").input_ids)
    assert written[-1].endswith("\u010a\u010a") and len(written[-1]) > 2, written
    model = copy.copy(tiny_model())
    model.__class__ = Scripted
    handle = ModelHandle("the main model", model, tokenizer)
    chats = [[{"role": "user", "content": text}] for text in ("ab", "ab" * 40)]
    batch, thoughts = thinking_inputs(chats, [handle])
    for row, chat in enumerate(chats):
        (alone, own) = thinking_inputs([chat], [handle])
        kept = batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist()
        assert kept == alone["input_ids"][0].tolist() and thoughts[row] == own[0]
        text = tokenizer.decode(kept)
        assert text.endswith(".</think>\n\n") and text.count("</think>") == 1 and "<|pad|>" not in text
    assert [of_row[0].text for of_row in thoughts] == ["one.", "one two three four five six."]


def test_predictors_think_as_ensembles_do():
    """By hand, as above: "sky" behind thoughts, "gray" without them."""
    for given, text in (({}, " sky"), ({"thinking": "off"}, " gray"), ({"max_thinking_tokens": 0}, " gray")):
        predictor = AdaFusePredictor(pair(), chat=True, max_new_tokens=4, **given)
        assert predictor({"prompt": ["ask"]})["text"] == [text], given


def test_a_member_that_fails_while_it_thinks_harms_no_other_prompt():
    (main, tokenizer), other = endless()
    model = copy.copy(main)

    def fail(module, args, kwargs):
        if (kwargs["input_ids"] == tokenizer("Q", add_special_tokens=False).input_ids[0]).any():
            raise torch.OutOfMemoryError("no memory left")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        chat = {"chat": True, "max_new_tokens": 2}
        with pytest.raises(AdaFuseDecodingError, match="the main model failed in round 0: OutOfMemoryError: no memory"):
            AdaFuseEnsemble([(model, tokenizer), other]).texts("Q", max_thinking_tokens=3, **chat)
        predictor = AdaFusePredictor([(model, tokenizer), other], **chat)
        found = predictor({"prompt": ["was a cat", "Q"]})
        assert found["error"][0] == "" and "OutOfMemoryError" in found["error"][1] and found["text"][0]
    finally:
        model._forward_pre_hooks.clear()


def test_max_time_is_that_of_thoughts_too(monkeypatch):
    told = []
    monkeypatch.setattr(thoughts._Thinker, "_write", lambda self, rows: told.append(self.how) or [[] for _ in rows])
    AdaFuseEnsemble(endless()).texts("was a cat", chat=True, max_time=60.0, max_new_tokens=2)
    assert [0 < how["max_time"] <= 60 for how in told] == [True, True] and told[0]["max_time"] >= told[1]["max_time"]
    AdaFuseEnsemble(endless()).texts("was a cat", chat=True, max_new_tokens=2)
    assert "max_time" not in told[-1]


def test_thoughts_end_with_a_context():
    tokenizer = endless()[0][1]
    pair = [(copy.copy(tiny_model(name, "byte_level")), tokenizer) for name in ("gpt2", "llama")]
    for model, _ in pair:
        model.generation_config = GenerationConfig(eos_token_id=None)
    with pytest.warns(UserWarning, match="outgrows the context of the main model"):
        rounds = AdaFuseEnsemble(pair).rounds("was a cat", chat=True, max_new_tokens=4)[0]
    assert 400 < rounds.num_thinking_tokens[0] < 512 <= rounds.num_thinking_tokens[1] and rounds.text
    with pytest.raises(ValueError, match="must be at most 512 tokens"):
        AdaFuseEnsemble(pair).texts("was a cat " * 400, chat=True, max_new_tokens=4)


def test_a_temperature_of_zero_draws_nothing():
    settings = {"adafuse_config": {"preset": "robust", "do_sample": True}}
    ensemble = AdaFuseEnsemble(endless())
    assert thoughts_in(ensemble, temperature=0.0, **settings) == thoughts_in(ensemble)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"adafuse_config": {"num_branches": 0}}, "num_branches"),
        ({"structured": {"regex": "("}}, "structured"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
)
def test_settings_are_checked_before_members_think(given, message, monkeypatch):
    monkeypatch.setattr(thoughts._Thinker, "_write", lambda *_: pytest.fail("a member has thought"))
    with pytest.raises(ValueError, match=message):
        AdaFuseEnsemble(pair()).rounds("ask", chat=True, **{"max_new_tokens": 2, **given})


def test_the_check_of_settings_leaves_no_trace():
    """A streamer is told the prompt once, and what is drawn follows from the seed as in a call by hand."""
    ensemble, told = AdaFuseEnsemble(endless()), []

    class Streamer:
        def put(self, value):
            told.append(value.tolist())

        def end(self):
            told.append("end")

    torch.manual_seed(3)
    rounds = ensemble.rounds(
        "was a cat", chat=True, max_thinking_tokens=5, max_new_tokens=4, do_sample=True, streamer=Streamer()
    )[0]
    torch.manual_seed(3)
    sampling = {"do_sample": True}
    inputs, thought = thinking_inputs([[{"role": "user", "content": "was a cat"}]], ensemble.handles, None, 5, sampling)
    by_hand = ensemble.output(inputs, max_new_tokens=4, do_sample=True).rounds[0]
    assert (rounds.text, rounds.thoughts) == (by_hand.text, [one.text for one in thought[0]])
    assert told[0] == inputs["input_ids"].tolist() and told.count("end") == 1


@pytest.mark.parametrize("thinking", ["apart", "main", "off"])
@pytest.mark.parametrize("template", [QWEN, CONTINUED], ids=["own", "opened"])
def test_nobody_thinks_within_an_answer_that_is_continued(template, thinking, monkeypatch):
    """The text goes on where the last message ends: no mark comes between, and no tokens are spent on thoughts."""
    monkeypatch.setattr(thoughts._Thinker, "_write", lambda *_: pytest.fail("a member thinks"))
    members = AdaFuseEnsemble(pair(template, template)).handles
    chat = [*CHAT, {"role": "assistant", "content": "blue far"}]
    made, own = thinking_inputs([chat], members, thinking)
    for k, one in enumerate([made, *made["assistant_inputs"]]):
        assert members[k].tokenizer.decode(one["input_ids"][0]).strip().endswith("blue far")
    assert [one.text for one in own[0]] == [None, None]


def test_beside_an_answer_that_is_continued_others_think():
    members = AdaFuseEnsemble(pair(CONTINUED, CONTINUED)).handles
    continued = [*CHAT, {"role": "assistant", "content": "blue far"}]
    batch, own = thinking_inputs([continued, CHAT, continued], members)
    assert [[one.text for one in of_row] for of_row in own] == [[None] * 2, ["blue dim", "red dim"], [None] * 2]
    for row, chat in enumerate([continued, CHAT, continued]):
        alone = thinking_inputs([chat], members)[0]
        assert batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist() == alone["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("template", "written", "behind"),
    [
        # An answer at once: gpt-oss begins it with a channel, which is no part of the text.
        (GPT_OSS, "<|channel|>final<|message|>yes", "<|channel|>final<|message|>"),
        (GPT_OSS, "<|channel|>ana", "<|channel|>final<|message|>"),
        (QWEN, "yes", ""),
        ("[THINK][/THINK]", "[THI", "[THINK][/THINK]"),  # cut off within the mark
        ("[THINK][/THINK]", "", ""),
    ],
)
def test_what_stands_behind_a_prompt_of_a_member_that_has_not_thought(template, written, behind, monkeypatch):
    """The ids of a text are the text itself here."""
    monkeypatch.setattr(thoughts, "whole_text", lambda tokenizer, ids: "".join(ids))
    monkeypatch.setattr(thoughts, "encode_marks", lambda tokenizer, text: list(text))
    monkeypatch.setattr(thoughts._Thinker, "_write", lambda self, rows: [list(written) for _ in rows])
    tokenizer = words_tokenizer(template)
    handle = type("Handle", (), {"tokenizer": tokenizer})()
    prompts, own = thoughts._Thinker(handle, 0, thinking_format(tokenizer), 8, {}).think([list("<|start|>assistant")])
    assert "".join(prompts[0]) == "<|start|>assistant" + behind and own[0].text is None


@pytest.mark.parametrize(
    ("template", "prompt", "asked"),
    [
        (QWEN, "user Who?\nbot\n<think>\nit is\n</think>\n\n", "user Who?\nbot\n"),
        (QWEN, "user Who?\nbot\n<think>\n\n</think>\n\n", "user Who?\nbot\n"),
        (QWEN, "user Who?\nbot\n", "user Who?\nbot\n"),
        (QWEN, "user What is <think>?\nbot\n", "user What is <think>?\nbot\n"),
        (QWEN, "user Who?\nbot\n</think>", "user Who?\nbot\n"),
        (OPENED, "user Who?\nbot<think>\n", "user Who?\nbot"),
        (GPT_OSS, "Who?<|end|><|start|>assistant<|channel|>final<|message|>", "Who?<|end|><|start|>assistant"),
        (
            GPT_OSS,
            "Who?<|end|><|start|>assistant<|channel|>analysis<|message|>it"
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            "Who?<|end|><|start|>assistant",
        ),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>Who?"
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>Who?"
            "<|end|><|start|>assistant",
        ),
    ],
)
def test_what_is_asked_is_the_prompt_without_thoughts(template, prompt, asked):
    assert without_thoughts(prompt, thinking_format(words_tokenizer(template))) == asked


def test_raters_do_not_read_the_main_models_thoughts(monkeypatch):
    """The question is what the user has asked, and each rater rates at once."""
    asked, closings = [], []
    start, make = Reviews.start, RatingPrompts.__init__
    monkeypatch.setattr(Reviews, "start", lambda self, questions: asked.extend(questions) or start(self, questions))

    def made(self, tokenizer, *rest):
        make(self, tokenizer, *rest)
        closings.append(tokenizer.decode(self._closing))

    monkeypatch.setattr(RatingPrompts, "__init__", made)
    members = endless()
    rounds = AdaFuseEnsemble(members, {"method": "peer-review"}).rounds(
        "was a cat", chat=True, max_thinking_tokens=5, max_new_tokens=3
    )[0]
    assert rounds.thoughts[0] and asked == ["was a cat"]
    assert len(closings) == 2 and all(one.rstrip().endswith("</think>") for one in closings)
