"""Tokenizers of mistral-common: equal to the fast tokenizer of the same vocabulary, as main model's and assistant's.

mistral-common is no part of the `test` extra: with it `AutoTokenizer` loads other classes. `.ci/run` installs it for
this file alone.
"""

from __future__ import annotations

import base64
import copy
import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

pytest.importorskip("mistral_common")

from transformers.integrations.mistral import convert_tekken_tokenizer

from hf_adafuse import AdaFuseEnsemble, chat_inputs, demo, enable_adafuse
from hf_adafuse.cli import main
from hf_adafuse.hub.export import export_adafuse
from hf_adafuse.lab.evaluation.contexts import chat_context, context_ids
from hf_adafuse.members.mistral_tokenizers import MistralTokenizer, encode_marks, fast_interface
from hf_adafuse.members.thinking import thinking_format
from hf_adafuse.members.vocabulary import vocabulary_of

DEMO = str(Path(demo.__file__).parent / "models" / demo.NAMES[0])
PROMPT = "Question: What is the capital of Chad?\nAnswer:"
WORDS = [" the", " cat", "cat", " is", " a", "Question", " Chad", " What", " capital", "Answer", " É", "日", " of"]
NAMES = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
NAMES += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
NAMES += ["[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
SPLITS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tekken(path):
    """A vocabulary of all bytes and of the beginnings of some words, as mistral-common stores one."""
    parts = [word.encode()[:end] for word in WORDS for end in range(2, len(word.encode()) + 1)]
    tokens = list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *parts]))
    config = {
        "pattern": SPLITS,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + len(NAMES),
        "default_num_special_tokens": len(NAMES),
        "version": "v7",
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(NAMES)]
    path.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}), encoding="utf-8")
    return len(tokens) + len(NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Mistral with such a tokenizer."""
    folder = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(num_key_value_heads=2, max_position_embeddings=256, vocab_size=350, **sizes)
    model = MistralForCausalLM(config)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    assert write_tekken(folder / "tekken.json") < 350
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def ours(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__ == "MistralCommonBackend"
    return tokenizer


@pytest.fixture(scope="module")
def fast(folder):
    tokenizer = convert_tekken_tokenizer(str(folder / "tekken.json"))
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


@pytest.fixture(scope="module")
def other():
    return AutoModelForCausalLM.from_pretrained(DEMO).eval(), AutoTokenizer.from_pretrained(DEMO)


TEXTS = ["", "the cat is", " the cat", " What É日本\n\n  x", "a\nb 12.5", "😀", "  two", "日", "[INST] a</s>"]


def test_a_vocabulary_is_that_of_the_fast_tokenizer(ours, fast):
    one, two = vocabulary_of(ours), vocabulary_of(fast)
    assert one.all_pieces() == two.all_pieces()
    assert one.all_pieces()[: len(NAMES)] == [b""] * len(NAMES)
    assert one.piece(len(NAMES) + 0xC3) == b"\xc3"  # which `get_vocab()` leaves out
    assert [one.token_of(bytes([byte])) for byte in range(256)] == [two.token_of(bytes([byte])) for byte in range(256)]
    assert (one.appended, one.lost_in_prompts) == (two.appended, two.lost_in_prompts)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_ids_of_the_fast_tokenizer(text, ours, fast):
    one, two = vocabulary_of(ours), vocabulary_of(fast)
    assert one.encode(text) == two.encode(text)
    assert one.encode(text).exact
    ids = one.encode_prompt(text)
    assert ids == ours(text)["input_ids"]
    if "[INST]" not in text:  # to mistral-common marks in a prompt are characters
        assert ids == two.encode_prompt(text)
    assert one.prompt_text(ids) == text


def test_a_special_token_that_a_text_spells_out(ours, fast):
    marks = "<s>[INST]the cat[/INST]"
    assert encode_marks(ours, marks) == encode_marks(fast, marks) == [1, 3, *ours("the cat")["input_ids"][1:], 4]
    assert encode_marks(ours, "") == []


@pytest.mark.parametrize(
    "options",
    [{}, {"structured": {"regex": " [a-c]{4}"}}, {"stop_strings": ["la"]}, {"adafuse_config": {"method": "unite"}}],
)
@pytest.mark.parametrize("is_main", [True, False])
def test_an_ensemble_answers_as_with_the_fast_tokenizer(is_main, options, model, ours, fast, other):
    texts = []
    for tokenizer in (ours, fast):
        members = [(model, tokenizer), other]
        ensemble = AdaFuseEnsemble(members if is_main else members[::-1])
        texts.append(ensemble.texts([PROMPT, "A"], max_new_tokens=10, **options))
    assert texts[0] == texts[1]
    assert all(texts[0])


@pytest.mark.parametrize("stop", [None, ["la"]])
def test_generate(stop, model, ours, fast, other):
    model = copy.deepcopy(model)
    enable_adafuse(model)
    written = []
    for tokenizer in (ours, fast):
        inputs = tokenizer(PROMPT, return_tensors="pt")
        assistants = {"assistant_models": [other[0]], "assistant_tokenizers": [other[1]]}
        output = model.generate(**inputs, **assistants, tokenizer=tokenizer, max_new_tokens=8, stop_strings=stop)
        written.append(output.tolist())
    assert written[0] == written[1]


CHAT = [
    {"role": "system", "content": "the cat"},
    {"role": "user", "content": [{"type": "text", "text": "What is"}]},
]


def test_a_chat_is_encoded_by_mistral_common(ours, other):
    expected = ours.apply_chat_template(CHAT)["input_ids"]
    inputs = chat_inputs(CHAT, [ours, other[1]], enable_thinking=False)  # which says nothing to it
    assert inputs["input_ids"].tolist() == [expected]
    mark = NAMES.index
    assert expected[:2] == [1, mark("[SYSTEM_PROMPT]")] and expected[-1] == mark("[/INST]")
    inputs = chat_inputs([CHAT, CHAT[1:]], [other[1], ours])["assistant_inputs"][0]
    short = ours.apply_chat_template(CHAT[1:])["input_ids"]
    assert inputs["input_ids"].tolist()[0] == expected
    assert inputs["input_ids"].tolist()[1][-len(short) :] == short
    continued = [*CHAT, {"role": "assistant", "content": "the cat"}]
    ids = chat_inputs(continued, [ours])["input_ids"].tolist()
    assert ids == [[*expected, *ours("the cat", add_special_tokens=False)["input_ids"]]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"chat_template": "{{ messages }}"}, "`chat_template` must be left out with a tokenizer of mistral-common"),
        ({"documents": [{"text": "a"}]}, "`documents` must be left out with a tokenizer of mistral-common"),
    ],
)
def test_what_mistral_common_cannot_honour(options, match, ours):
    with pytest.raises(ValueError, match=match):
        chat_inputs(CHAT, [ours], **options)


def test_a_chat_of_the_harness(ours):
    """It passes texts, in which the marks are spelled out."""
    context = chat_context([*CHAT[:1], {"role": "user", "content": "What is"}], True)
    assert context_ids(context, ours) == ours.apply_chat_template(CHAT)["input_ids"]


def test_ids_beyond_the_vocabulary_have_no_text(ours):
    """As of an embedding that is padded."""
    ids = [*ours("the cat")["input_ids"], 340]
    assert vocabulary_of(ours, 350).text(ids[1:]) == "the cat"
    assert vocabulary_of(ours, 350).all_pieces()[len(ours) :] == [b""] * (350 - len(ours))


def test_who_thinks(ours):
    assert thinking_format(ours) is None
    assert fast_interface(ours).chat_template == "<s>[INST]a[/INST]a</s>[INST]a[/INST]"


def test_others_are_as_they_were(fast, other):
    assert fast_interface(fast) is fast and fast_interface(None) is None
    assert fast_interface("a") == "a"


def test_a_tokenizer_is_let_go_of(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary_of(tokenizer) is vocabulary and isinstance(vocabulary.tokenizer, MistralTokenizer)
    assert fast_interface(fast_interface(tokenizer)) is fast_interface(tokenizer)
    vocabulary_of(fast_interface(tokenizer))
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_the_command_line(folder, ours, other, model, capsys):
    arguments = ["--model", str(folder), "--assistant", DEMO, "--max-new-tokens", "8"]
    for chat in ([], ["--chat"]):
        assert main(["generate", *arguments, *chat, PROMPT]) == 0
        (text,) = AdaFuseEnsemble([(model, ours), other]).texts([PROMPT], max_new_tokens=8, chat=bool(chat))
        assert capsys.readouterr().out == f"{text}\n"


def test_an_exported_ensemble(tmp_path, model, ours, other):
    export_adafuse(tmp_path / "out", model, ours, [other[0]], [other[1]])
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(ours) and loaded(PROMPT)["input_ids"] == ours(PROMPT)["input_ids"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    output = again.generate(**ours(PROMPT, return_tensors="pt"), max_new_tokens=8, pad_token_id=10)
    expected = AdaFuseEnsemble([(model, ours), other]).texts([PROMPT], max_new_tokens=8)
    new = output[0, len(ours(PROMPT)["input_ids"]) :].tolist()
    assert [fast_interface(ours).decode(new, skip_special_tokens=True)] == expected
