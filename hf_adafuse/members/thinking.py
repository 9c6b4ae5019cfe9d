"""How a model marks its thoughts, read off its chat template: `<think>`, `[THINK]`, channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .mistral_tokenizers import fast_interface

# Variables of chat templates that switch thinking: Qwen3 and most others, Granite and DeepSeek-V3.1.
SWITCHES = ("enable_thinking", "thinking")


# What a message of the model begins with where thoughts are a message of their own.
_MESSAGE = "<|end|><|start|>assistant"


@dataclass(frozen=True)
class ThinkingFormat:
    """
    The texts around what a model thinks before it answers.

    Attributes:
        opening (`str`): stands before the thoughts: `"<think>"`. Some templates write it at the end of the prompt, else
            the model does.
        closing (`str`): stands after them: `"</think>"`.
        separator (`str`): stands between `closing` and the answer: `"\\n\\n"`.
        cut (`str`): stands before `closing` where thoughts are cut off: `"\\n"`.
    """

    opening: str
    closing: str
    separator: str = ""
    cut: str = ""

    @property
    def is_message(self) -> bool:
        """Whether thoughts are a message of their own, and the answer is the next one."""
        return self.closing.startswith(_MESSAGE)

    @property
    def ending(self) -> str:
        """What closes thoughts that are cut off, up to the answer."""
        return self.cut + self.closing + self.separator


# Of the tags, the separator is that of Qwen3 and DeepSeek-R1. The last is that of gpt-oss: its thoughts are a message
# of their own, and the answer is the next one.
_FORMATS = (
    ThinkingFormat("<think>", "</think>", "\n\n", "\n"),
    ThinkingFormat("<thought>", "</thought>", "\n\n", "\n"),
    ThinkingFormat("<seed:think>", "</seed:think>", "", "\n"),
    ThinkingFormat("[THINK]", "[/THINK]"),
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingFormat("<|channel|>analysis<|message|>", f"{_MESSAGE}<|channel|>final<|message|>"),
)


def thinking_format(tokenizer: Any) -> ThinkingFormat | None:
    """How the model of this tokenizer thinks, as its chat template says; `None` of one that answers at once."""
    templates = getattr(fast_interface(tokenizer), "chat_template", None)
    text = "".join(templates.values()) if isinstance(templates, dict) else templates or ""
    if "<|channel|>" in text and "analysis" in text:
        return _FORMATS[-1]
    return next((one for one in _FORMATS if one.opening in text and one.closing in text), None)


def is_open(prompt: str, form: ThinkingFormat) -> bool:
    """Whether a rendered prompt ends within thoughts that are still to be written."""
    return prompt.rstrip().endswith(form.opening)


def is_closed(prompt: str, form: ThinkingFormat) -> bool:
    """Whether a rendered prompt ends behind thoughts, which may be empty: the answer is next."""
    return prompt.rstrip().endswith(form.closing.rstrip())


def closed_at_once(prompt: str, form: ThinkingFormat) -> str:
    """What follows a rendered prompt so that its model answers without thinking."""
    if is_closed(prompt, form):
        return ""
    if form.is_message:  # which may be left out
        return form.closing.removeprefix(_MESSAGE)
    return form.ending if is_open(prompt, form) else form.opening + form.cut + form.ending


def without_thoughts(prompt: str, form: ThinkingFormat) -> str:
    """A rendered prompt without what stands behind it for the answer to follow: thoughts, or marks of none."""
    if is_open(prompt, form):
        return prompt.rstrip().removesuffix(form.opening)
    if not is_closed(prompt, form):
        return prompt
    before, _, thoughts = prompt.rpartition(form.opening)
    closing = form.closing.rstrip()
    if before and thoughts.count(closing) == 1:  # those before are of earlier answers
        return before
    return prompt[: prompt.rindex(closing)] + _MESSAGE * form.is_message


def thoughts_of(new: str, prompt: str, form: ThinkingFormat) -> str | None:
    """
    The thoughts in what a model has written behind its prompt; `None` where it has answered at once.

    Args:
        new (`str`): with the special tokens, up to and with `closing` where it was written.
        prompt (`str`): as rendered.
        form (`ThinkingFormat`): the marks that enclose the model's thoughts.
    """
    if not is_open(prompt, form):
        if not new.lstrip().startswith(form.opening):
            return None
        new = new.lstrip().removeprefix(form.opening)
    return new.partition(form.closing)[0].strip()


def whole_text(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids, special tokens included."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
