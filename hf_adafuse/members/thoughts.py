"""Members think alone and answer together: each thinking member writes its own thoughts behind its own prompt, and the
ensemble fuses the answer that follows. No member reads another's thoughts.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import BatchEncoding, StoppingCriteria

from .chat import answer_place, chat_inputs
from .mistral_tokenizers import encode_marks
from .model_handle import ModelHandle
from .prompt_inputs import pad_left
from .thinking import (
    SWITCHES,
    ThinkingFormat,
    closed_at_once,
    thinking_format,
    thoughts_of,
    whole_text,
)

MODES = ("apart", "main", "off")
DEFAULT_BUDGET = 1024


@dataclass(frozen=True)
class Thought:
    """
    What a member has thought about a prompt.

    Args:
        text (`str`, *optional*): its thoughts; `None` where it had none.
        num_tokens (`int`): how many tokens they are behind its prompt, with the marks around them.
    """

    text: str | None = None
    num_tokens: int = 0


class ThinkingError(Exception):
    """
    A member has failed while it thought.

    Args:
        member (`str`): its name.
        reason (`str`): what went wrong.
    """

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(member, reason)
        self.member = member
        self.reason = reason


class Pace(Protocol):
    """Says when the next token of thoughts may be computed: another thread, which decodes other texts with the same
    models, gives turns."""

    def begin(self, num_tokens: int, member_index: int) -> int | None:
        """Wait for the first turn of a member, with prompts of so many tokens. Returns how many tokens its thoughts may
        be with the marks that close them, `None` where that is not limited here. May raise, and then nothing is
        thought."""

    def next(self) -> None:
        """A token has been computed: wait for the next turn. May raise, and then nothing more is thought."""

    def end(self) -> None:
        """No further turn is needed."""


_pace: ContextVar[Pace | None] = ContextVar("thinking_at", default=None)


@contextmanager
def thinking_at(pace: Pace) -> Iterator[None]:
    """Within this context members think at a given pace."""
    token = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(token)


class _Paced(StoppingCriteria):
    """Stops nothing; waits after each token."""

    is_function_of_ids = True

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._pace.next()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def _turns(pace: Pace, num_tokens: int, member_index: int) -> Iterator[int | None]:
    try:
        yield pace.begin(num_tokens, member_index)
    finally:
        pace.end()


def check_chat_arguments(
    chat: bool, thinking: str | None, max_thinking_tokens: int | None, template_kwargs: Any = None, **others: Any
) -> None:
    """Raises `ValueError` where an argument for chats is given without `chat`, `template_kwargs` cannot be passed on,
    or [`check_thinking`] does."""
    given = {"thinking": thinking, "max_thinking_tokens": max_thinking_tokens, "template_kwargs": template_kwargs}
    for name, value in {**given, **others}.items():
        if not chat and value is not None:
            raise ValueError(
                f"`{name}` must be left out without `chat`, but is {value!r}. Pass `chat=True`, or drop it."
            )
    check_thinking(thinking, max_thinking_tokens)
    if template_kwargs is None:
        return
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        raise ValueError(
            f"`template_kwargs` must be a dict of names and values, but is {template_kwargs!r}. Write it like "
            '{"reasoning_effort": "low"}.'
        )
    taken = next((name for name in ("messages", "tokenizers") if name in template_kwargs), None)
    if taken is not None:
        raise ValueError(f"`template_kwargs` must not name what the call has already, but has {taken!r}. Drop it.")


def check_thinking(thinking: str | None, max_thinking_tokens: int | None) -> None:
    """Raises `ValueError` where they are not what [`thinking_inputs`] takes."""
    if thinking is not None and not (isinstance(thinking, str) and thinking in MODES):
        raise ValueError(f'`thinking` must be "apart", "main" or "off", but is {thinking!r}. Choose one of these.')
    number = max_thinking_tokens
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
        raise ValueError(f"`max_thinking_tokens` must be a whole number of at least 0, but is {number!r}. Give one.")
    if number is not None and thinking == "off":
        raise ValueError(f'`max_thinking_tokens` must be left out with `thinking="off"`, but is {number}. Drop it.')


def thinking_inputs(
    chats: Sequence[Sequence[Mapping[str, Any]]],
    members: Sequence[ModelHandle],
    thinking: str | None = None,
    max_thinking_tokens: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    end: float = math.inf,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[BatchEncoding, list[list[Thought]]]:
    """
    The inputs of all members for chats, behind whatever each member thinks.

    A member thinks where its chat template marks thoughts (`<think>`, the channels of gpt-oss, and their like). It
    writes them by its own `generate()`. Where they are longer than `max_thinking_tokens`, they are cut off there and
    closed. A member that answers without having thought begins with an empty answer, like all others. Where the last
    message of a chat is continued nobody thinks: the answer has begun.

    Args:
        chats (`list[list[dict]]`): conversations.
        members (`list[ModelHandle]`): the members, the main model first.
        thinking (`str`, *optional*, defaults to `"apart"`): `"apart"`: each thinking member thinks. `"main"`: the main
            model does, the others do not. `"off"`: none does.
        max_thinking_tokens (`int`, *optional*, defaults to 1024): the most tokens of one member's thoughts.
        sampling (`dict`, *optional*): arguments of `generate()` that say how thoughts are drawn (`do_sample`,
            `temperature`); by default they are greedy.
        end (`float`, *optional*): when thoughts are cut off, by `time.monotonic()`.
        template_kwargs (`dict`, *optional*): further arguments of [`chat_inputs`].

    Returns:
        the inputs as of [`chat_inputs`], and per prompt what each member has thought.

    Raises:
        ValueError: a member behind a server would have to think.
        ThinkingError: a member failed.
    """
    check_thinking(thinking, max_thinking_tokens)
    template_kwargs = template_kwargs or {}
    tokenizers = [member.tokenizer for member in members]
    forms = [thinking_format(tokenizer) for tokenizer in tokenizers]
    if not any(forms):
        return chat_inputs(chats, tokenizers, **template_kwargs), [[Thought()] * len(members) for _ in chats]
    thinks = [form is not None and thinking != "off" and (thinking != "main" or k == 0) for k, form in enumerate(forms)]
    for k, member in enumerate(members):
        if thinks[k] and not member.is_local:
            allowed, who = ('"off" or "main"', f"assistant {k}") if k else ('"off"', "the main model")
            raise ValueError(
                f"`thinking` must be {allowed} where {who} is a thinking model behind a server, but is "
                f'{thinking or "apart"!r}. Pass `thinking="off"`, or load that model here.'
            )
    rendered = {
        is_on: chat_inputs(chats, tokenizers, **{**dict.fromkeys(SWITCHES, is_on), **template_kwargs})
        for is_on in (True, False)
    }
    place = [template_kwargs.get(name) for name in ("add_generation_prompt", "continue_final_message")]
    opened = [answer_place(chat, *place)[0] for chat in chats]
    made, thoughts = [], []
    for k, (member, tokenizer, form) in enumerate(zip(members, tokenizers, forms, strict=True)):
        inputs = rendered[thinks[k]]
        rows = _unpadded(inputs if k == 0 else inputs["assistant_inputs"][k - 1])
        own = [Thought()] * len(rows)
        begun = [index for index, is_opened in enumerate(opened) if is_opened]
        if form is not None and begun:
            budget = (DEFAULT_BUDGET if max_thinking_tokens is None else max_thinking_tokens) if thinks[k] else 0
            how = {**(sampling or {}), **({} if end == math.inf else {"max_time": max(end - time.monotonic(), 0.001)})}
            behind = _Thinker(member, k, form, budget, how).think([rows[index] for index in begun])
            for index, row, thought in zip(begun, *behind, strict=True):
                rows[index] = row
                own[index] = thought
        made.append(pad_left(rows, tokenizer))
        thoughts.append(own)
    return BatchEncoding({**made[0], "assistant_inputs": made[1:]}), [list(row) for row in zip(*thoughts, strict=True)]


@dataclass(frozen=True)
class _Thinker:
    """
    A member that thinks.

    Args:
        handle (`ModelHandle`): the member.
        member_index (`int`): its place among the members; the main model has 0.
        form (`ThinkingFormat`): how it marks its thoughts.
        budget (`int`): the most tokens of its thoughts.
        how (`dict`): further arguments of its `generate()`.
    """

    handle: ModelHandle
    member_index: int
    form: ThinkingFormat
    budget: int
    how: Mapping[str, Any]

    def think(self, rows: list[list[int]]) -> tuple[list[list[int]], list[Thought]]:
        """The prompts with the member's thoughts behind them, closed, and the thoughts."""
        tokenizer, form = self.handle.tokenizer, self.form
        written = self._write(rows) if self.budget else [[] for _ in rows]
        prompts, thoughts = [], []
        for row, new in zip(rows, written, strict=True):
            prompt, text = whole_text(tokenizer, row), whole_text(tokenizer, new)
            own = thoughts_of(text, prompt, form) if self.budget else None
            if own is None:  # it has answered at once, or may not think, or no further than the mark of thoughts
                is_cut = text and form.opening.startswith(text.lstrip())
                is_to_be_told = not self.budget or is_cut or form.is_message
                end = closed_at_once(prompt, form) if is_to_be_told else ""
            elif form.closing in text:
                # The token that ends the mark may hold a part of what separates it from the answer.
                behind = text.partition(form.closing)[2]
                end = form.separator.removeprefix(behind) if form.separator.startswith(behind) else form.separator
            else:
                end = form.ending
            kept = [] if own is None else new
            prompts.append(row + kept + encode_marks(tokenizer, end))
            thoughts.append(Thought() if own is None else Thought(own, len(prompts[-1]) - len(row)))
        return prompts, thoughts

    def _write(self, rows: list[list[int]]) -> list[list[int]]:
        """What the model writes alone behind each prompt, up to the end of its thoughts, without an end of sequence."""
        model, tokenizer = self.handle.model, self.handle.tokenizer
        inputs = pad_left(rows, tokenizer).to(self.handle.device)
        length = inputs["input_ids"].shape[1]
        if self.handle.max_length is not None and length >= self.handle.max_length:  # which is an error of its own
            return [[] for _ in rows]
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
        closing = encode_marks(tokenizer, self.form.closing)
        how = {"return_dict_in_generate": False, "num_return_sequences": 1, "do_sample": False, **self.how}
        if len(closing) == 1:
            how["eos_token_id"] = [*ends, closing[0]]
        else:
            how |= {"stop_strings": [self.form.closing], "tokenizer": tokenizer}
        if hasattr(model, "_adafuse_arguments") or hasattr(model, "_adafuse_base"):  # enabled, or an exported ensemble
            how["adafuse_config"] = False
        filler = next((one for one in (tokenizer.pad_token_id, *ends) if one is not None), 0)
        if (pace := _pace.get()) is not None:
            how["stopping_criteria"] = [_Paced(pace)]
        with nullcontext() if pace is None else _turns(pace, length, self.member_index) as room:
            try:
                made = model.generate(**inputs, max_new_tokens=self._most(length, room), pad_token_id=filler, **how)
            except (RuntimeError, IndexError) as error:
                raise ThinkingError(self.handle.name, f"{type(error).__name__}: {error}") from error
        written = []
        for row in made[:, length:].tolist():
            stop = next((at for at, token in enumerate(row) if token in ends), len(row))
            written.append(row[: _end_of(tokenizer, row[:stop], self.form.closing, closing)])
        return written

    def _most(self, length: int, room: int | None) -> int:
        """The most tokens that the member may think behind prompts of this length. Behind its thoughts there is room
        for the marks, and in a context that ends for a token of the answer. `room`: as of [`Pace`]."""
        num_marks = len(encode_marks(self.handle.tokenizer, self.form.ending))
        limits = [self.budget]
        if room is not None:
            limits.append(room - num_marks)
        if self.handle.max_length is not None:
            limits.append(self.handle.max_length - length - num_marks - 1)
        return max(min(limits), 1)


def _end_of(tokenizer: Any, ids: list[int], mark: str, mark_ids: list[int]) -> int:
    """How many ids there are up to the one with which a mark is complete, in its own ids or, where its last one holds
    what follows, in the text; all where it never is."""
    size = len(mark_ids)
    for end in range(size, len(ids) + 1):
        if ids[end - size : end] == mark_ids:
            return end
    if mark not in whole_text(tokenizer, ids):
        return len(ids)
    return bisect.bisect_left(range(len(ids)), True, key=lambda number: mark in whole_text(tokenizer, ids[:number]))


def _unpadded(inputs: Any) -> list[list[int]]:
    pairs = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True)
    return [[token for token, kept in zip(ids, mask, strict=True) if kept] for ids, mask in pairs]
