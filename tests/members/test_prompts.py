"""Prompts and their masks, the assistants' own ones too: bad ones are refused, and which ids a member reads."""

from __future__ import annotations

import copy

import pytest
import torch
from support.calls import BYTES, CHARS, LEFT, PROMPT, arguments, assert_refused, inputs_of, own
from support.tiny import eos_ids, tiny_model

from hf_adafuse import disable_adafuse, enable_adafuse
from hf_adafuse.call.planning import planning
from hf_adafuse.call.run import make_members

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("alone", [False, True], ids=["ensemble", "alone"])
@pytest.mark.parametrize("mask", [[[1, 1, 1], [1, 1, 0]], [[0, 1, 1], [1, 0, 1]], [[1, 0, 0], [1, 1, 1]]])
def test_right_padded_prompts_are_refused(mask, alone):
    given = arguments(input_ids=torch.tensor([[5, 6, 7], [8, 9, 10]]), attention_mask=torch.tensor(mask))
    if alone:
        del given["assistant_models"], given["assistant_tokenizers"]
    assert_refused(given, "`input_ids` must be padded on the left, but is")


def test_right_padding_is_seen_without_a_mask_too():
    pad = BYTES.pad_token_id
    given = arguments(input_ids=torch.tensor([[5, 6, 7], [8, 9, pad]]), attention_mask=LEFT)
    assert_refused(given, "`input_ids` must be padded on the left")


def test_right_padded_assistant_inputs_are_refused():
    inputs = dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=torch.tensor([[1, 1, 0]]))
    assert_refused(arguments(assistant_inputs=[inputs]), r"`assistant_inputs\[0\]` must be padded on the left")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_assistant_inputs_of_another_number_of_rows_are_refused(rows):
    inputs = dict(input_ids=torch.full((rows, 4), 5), attention_mask=torch.ones(rows, 4, dtype=torch.long))
    given = arguments(assistant_inputs=[inputs], **inputs_of(BYTES, "She", PROMPT))
    message = assert_refused(given, r"`assistant_inputs\[0\]` must hold 2 prompts")
    assert f"({rows}, 4)" in message


@pytest.mark.parametrize("shape", [(1, 3), (1, 5), (2, 4), (4, 1), (2, 2)])
def test_a_mask_of_assistant_inputs_of_another_shape_is_refused(shape):
    inputs = dict(input_ids=torch.full((1, 4), 5), attention_mask=torch.ones(shape, dtype=torch.long))
    message = assert_refused(arguments(assistant_inputs=[inputs]), r"`assistant_inputs\[0\]`")
    assert str(shape) in message


@pytest.mark.parametrize("filler", [0, 1])
@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (1, 4), (4, 2), (3, 4)])
def test_a_mask_of_another_shape_is_refused(shape, filler):
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, 0] = filler  # transformers drops a mask of ones alone
    given = arguments(input_ids=torch.full((2, 4), 5), attention_mask=mask)
    assert_refused(given, "attention mask|position_ids|shape|size", form=False)


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": torch.ones(1, 4)},
        {},
        {"input_ids": "She"},
        {"input_ids": [[5, 6], [7]]},
        {"input_ids": torch.full((1, 1, 4), 5)},
        {"input_ids": None},
    ],
    ids=["mask-only", "empty", "text", "ragged", "3-D", "none"],
)
def test_assistant_inputs_that_are_no_prompts_are_refused(inputs):
    assert_refused(arguments(assistant_inputs=[inputs]), r"`assistant_inputs\[0\]` must ")


@pytest.mark.parametrize("ids", [[[5, 6, 7]], [5, 6, 7], torch.tensor([5, 6, 7])], ids=["rows", "row", "tensor"])
@pytest.mark.parametrize("as_dict", [True, False])
def test_assistant_inputs_of_one_prompt_may_be_plain(ids, as_dict):
    main = enable_adafuse(own())
    expected = main.generate(**arguments(assistant_inputs=[{"input_ids": torch.tensor([[5, 6, 7]])}], max_new_tokens=6))
    given = arguments(assistant_inputs=[{"input_ids": ids} if as_dict else ids], max_new_tokens=6)
    assert torch.equal(main.generate(**given), expected)


def test_an_empty_prompt_needs_a_beginning_of_sequence_token():
    # The main model's prompt is its BOS alone: no text, and the assistant adds no BOS.
    main = enable_adafuse(own("llama", "characters"))
    bos = torch.tensor([[CHARS.bos_token_id]])
    given = arguments(
        input_ids=bos, attention_mask=torch.ones_like(bos), tokenizer=CHARS,
        assistant_models=[tiny_model("gpt2", "byte_level")], assistant_tokenizers=[BYTES],
    )  # fmt: skip
    message = assert_refused(
        given, "prompt of assistant 1 .* must be at least one token, but is empty in row 0", main=main
    )
    assert "beginning-of-sequence" in message
    given["assistant_inputs"] = [{"input_ids": torch.tensor([[5]])}]
    assert main.generate(**given).shape == (1, 4)
    # With a BOS on both sides the empty prompt works, also where `generate()` makes it.
    given |= dict(
        assistant_models=[tiny_model("gpt2", "characters")], assistant_tokenizers=[CHARS], assistant_inputs=None
    )
    assert main.generate(**given).shape == (1, 4)
    del given["input_ids"], given["attention_mask"]
    assert main.generate(**given).shape == (1, 4)


def test_an_empty_main_prompt_is_refused():
    empty = torch.zeros(1, 0, dtype=torch.long)
    assert_refused(arguments(input_ids=empty, attention_mask=empty), None, form=False)
    masked = dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[0, 0], [1, 1]]))
    assert_refused(arguments(**masked), "prompt of the main model must be at least one token, but is empty in row 0")


def test_an_empty_row_of_assistant_inputs_is_refused():
    inputs = dict(input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.tensor([[1, 1], [0, 0]]))
    given = arguments(assistant_inputs=[inputs], **inputs_of(BYTES, "She", PROMPT))
    assert_refused(given, "prompt of assistant 1 .* is empty in row 1")


def test_a_prompt_longer_than_a_context_is_refused():
    ids = torch.full((2, 25), 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # the first row, without its padding, fits
    tight = own("gpt2", "byte_level", max_positions=24)
    given = arguments(input_ids=ids, attention_mask=mask)
    message = assert_refused(given, "prompt of the main model must be at most 24 tokens", main=enable_adafuse(tight))
    assert "25 tokens in row 1" in message and "max_position_embeddings" in message
    disable_adafuse(tight)
    given = arguments(
        input_ids=ids, attention_mask=mask, assistant_models=[tiny_model("llama", "byte_level", 1), tight],
        assistant_tokenizers=[BYTES, BYTES],
    )  # fmt: skip
    assert_refused(given, r"prompt of assistant 2 \(.+\) must be at most 24 tokens")
    given["assistant_inputs"] = [None, dict(input_ids=ids[:, 6:], attention_mask=mask[:, 6:])]
    assert enable_adafuse(own()).generate(**given).shape[0] == 2


def test_the_same_tokenizer_is_the_same_whatever_it_was_last_asked_for():
    """Padding and truncation are settings of a call: the ids of the prompt reach an assistant of the same tokenizer."""
    seen = []
    main, assistant = enable_adafuse(own()), own("llama", seed=1)
    handle = assistant.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    ids = torch.tensor([[*BYTES("She").input_ids, eos_ids(BYTES)[1], *BYTES("She").input_ids]])
    plain, padded = copy.deepcopy(BYTES), copy.deepcopy(BYTES)
    plain(["She"]), padded(["She", PROMPT], padding=True, truncation=True, max_length=3)
    try:
        for tokenizer in (plain, padded):
            given = arguments(input_ids=ids, attention_mask=torch.ones_like(ids), tokenizer=plain)
            main.generate(**given | dict(assistant_models=[assistant], assistant_tokenizers=[tokenizer]))
            assert seen[0] == ids.tolist()
            seen.clear()
    finally:
        handle.remove()


def rows_of(*ids):
    return torch.tensor([[5, 6, 7], [5, *ids]])


# A negative id cannot be decoded for the assistant, which is tried before it is looked at.
DECODED_FIRST = pytest.mark.xfail(raises=OverflowError)


@pytest.mark.parametrize(
    ("role", "token"),
    [
        pytest.param("main", -1, marks=DECODED_FIRST),
        ("main", 10**6),
        ("main", "size"),
        ("assistant", -1),
        ("assistant", 10**6),
        ("assistant", "size"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(role, token):
    model, name = (own(), "the main model") if role == "main" else (tiny_model("gpt2", "characters"), "assistant 1")
    size = model.config.vocab_size
    ids = rows_of(size if token == "size" else token, 7)
    inside = {"input_ids": rows_of(size - 1, 7), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    given = arguments(**inside) if role == "main" else arguments(**inputs_of(BYTES, "She", "She"))
    if role == "assistant":
        given["assistant_inputs"] = [inside]
    enable_adafuse(own()).generate(**given)  # the last one is inside
    given |= {"input_ids": ids} if role == "main" else {"assistant_inputs": [{"input_ids": ids}]}
    message = assert_refused(given, rf"^The prompt of {name}\b.* must be ids from 0 to {size - 1}, but has ")
    assert f"but has {ids[1, 1].item()} in row 1. " in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize("role", ["main", "assistant"])
def test_ids_that_are_no_integers_are_refused(role, dtype):
    ids = torch.ones(1, 3, dtype=dtype)
    given = arguments(input_ids=ids, attention_mask=torch.ones(1, 3, dtype=torch.long))
    if role == "assistant":
        given = arguments(assistant_inputs=[{"input_ids": ids}])
    argument = "input_ids" if role == "main" else r"assistant_inputs\[0\]"
    assert_refused(given, f"^`{argument}` must be integers, but is of type {dtype}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers_of_any_size_are_ids(dtype):
    main = enable_adafuse(own())
    ids = torch.tensor([[5, 6, 7]])
    expected = main.generate(**arguments(input_ids=ids, attention_mask=LEFT, assistant_inputs=[{"input_ids": ids}]))
    given = arguments(input_ids=ids, attention_mask=LEFT, assistant_inputs=[{"input_ids": ids.to(dtype)}])
    assert torch.equal(main.generate(**given), expected)


def test_members_are_told_whether_they_have_the_main_tokenizer():
    """Another object with the same vocabulary and rules counts as the same tokenizer."""
    model = enable_adafuse(own())
    others = [own(seed=2), own("gpt2", "characters"), own(seed=3)]
    tokenizers = [BYTES, CHARS, copy.deepcopy(BYTES)]
    with planning() as plans:
        model.generate(**inputs_of(BYTES, PROMPT), tokenizer=BYTES, assistant_models=others,
                       assistant_tokenizers=tokenizers, max_new_tokens=1)  # fmt: skip
    assert [member.has_main_tokenizer for member in make_members(plans[0])] == [True, True, False, True]
