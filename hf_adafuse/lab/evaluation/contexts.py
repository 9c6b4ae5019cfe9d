"""Encodes what the harness asks for each member: prompts, chats, and pairs of a context and a continuation.

The harness hands a chat over as one string, made by one template. Members have templates of their own. So the messages
travel as JSON in that string, and are rendered here for each member.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...members.chat import chat_inputs
from ...members.mistral_tokenizers import encode_marks, fast_interface
from ...members.vocabulary import vocabulary_of

_CHAT = "hf-adafuse chat: "


def chat_context(messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat as the string that the harness passes on. `add_generation_prompt`: whether an answer follows; otherwise
    the last message is continued."""
    return _CHAT + json.dumps([list(messages), add_generation_prompt], ensure_ascii=False)


def prompt_rows(context: str, tokenizers: Sequence[Any]) -> list[list[int]]:
    """
    The ids of one prompt for each member, with the special tokens that its tokenizer puts in front of a text. Those
    that it puts behind a text are left out, here and below, as the text goes on.

    Raises:
        ValueError: the prompt is a chat, and a member has no template for it.
    """
    chat = _read_chat(context)
    if chat is None:
        return [vocabulary_of(tokenizer).encode_prompt(context) for tokenizer in tokenizers]
    messages, opens = chat
    inputs = chat_inputs(messages, tokenizers, add_generation_prompt=opens, continue_final_message=not opens)
    return [made["input_ids"][0].tolist() for made in (inputs, *inputs["assistant_inputs"])]


def pair_ids(context: str, continuation: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """
    The ids of a context and of its continuation, parted as in lm-eval's `_encode_pair`. Spaces at the context's end go
    to the continuation. Both texts are encoded together, and the continuation has the ids behind those of the context.

    Where a token lies across the border, the ids of both do not begin with those of the context. lm-eval then scores
    only a part of the continuation; here the continuation is encoded by itself. An empty context is the id that begins
    a sequence, or the one that ends it.
    """
    context = _as_text(context, tokenizer)
    if not context:
        ids = _encode(continuation, tokenizer, add_special_tokens=False)
        prefix = prefix_id(tokenizer)
        return ([prefix], ids) if ids[:1] != [prefix] else (ids[:1], ids[1:])
    kept = context.rstrip()
    if not kept:
        return pair_ids("", context + continuation, tokenizer)
    before = _encode(kept, tokenizer)
    both = _encode(context + continuation, tokenizer)
    if both[: len(before)] == before:
        return before, both[len(before) :]
    return before, vocabulary_of(tokenizer).encode(context[len(kept) :] + continuation).ids


def context_ids(context: str, tokenizer: Any) -> list[int]:
    """
    The ids of a context as the task gave it, with the special tokens that the tokenizer adds. Unlike [`pair_ids`] this
    keeps the spaces at its end, without which a cue for an answer may not be found.
    """
    context = _as_text(context, tokenizer)
    return _encode(context, tokenizer) if context else []


def continued_text(context: str, continuation: str) -> str:
    """The text that [`pair_ids`] takes for the continuation: with the spaces from the context's end."""
    if _read_chat(context) is not None:
        return continuation
    return context[len(context.rstrip()) :] + continuation


def text_ids(text: str, tokenizer: Any) -> list[int]:
    """The ids of a whole text, with the special tokens that the tokenizer adds."""
    return _encode(text, tokenizer)


def prefix_id(tokenizer: Any) -> int:
    """The id in front of the first token of a text: the one that begins a sequence, else the one that ends it."""
    given = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in given if token is not None)


def _as_text(context: str, tokenizer: Any) -> str:
    """A context as text. A chat is rendered by the tokenizer's own template, with its special tokens."""
    chat = _read_chat(context)
    if chat is None:
        return context
    messages, opens = chat
    # Raises what is wrong with the chat.
    chat_inputs(messages, [tokenizer], add_generation_prompt=opens, continue_final_message=not opens)
    rendered = fast_interface(tokenizer).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opens, continue_final_message=not opens
    )
    return str(rendered)


def _read_chat(context: str) -> tuple[list[dict[str, str]], bool] | None:
    if not context.startswith(_CHAT):
        return None
    messages, opens = json.loads(context.removeprefix(_CHAT))
    return messages, opens


def _encode(text: str, tokenizer: Any, add_special_tokens: bool = True) -> list[int]:
    # A rendered chat may begin with the special token already.
    if add_special_tokens and not text.startswith(tokenizer.decode([prefix_id(tokenizer)])):
        return vocabulary_of(tokenizer).encode_prompt(text)
    return encode_marks(tokenizer, text)
