"""Chat messages as each member's own prompt, through its own chat template.

Members were trained on different chat formats: a prompt that one template made is not what another member expects.

```python
>>> from transformers import AutoTokenizer
>>> from hf_adafuse import chat_inputs

>>> names = ["mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct"]
>>> messages = [{"role": "user", "content": "Who wrote Faust?"}]
>>> inputs = chat_inputs(messages, [AutoTokenizer.from_pretrained(name) for name in names])
>>> sorted(inputs), len(inputs["assistant_inputs"])  # ready for `model.generate(**inputs, ...)`
(['assistant_inputs', 'attention_mask', 'input_ids'], 1)

```
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import BatchEncoding
from transformers.utils import logging

from .mistral_tokenizers import fast_interface
from .prompt_inputs import check_tokenizer_list, pad_left
from .thinking import SWITCHES
from .vocabulary import vocabulary_of

logger = logging.get_logger(__name__)

# How a member reads a chat whose tokenizer has no chat template: a base model beside an instruct model, say. The answer
# begins on a line of its own, as in most templates, so that its first word is the same text for all members.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] | capitalize + ':\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)

_PROBE = "hf-adafuse"


class _FixedArgument(NamedTuple):
    """The values of an argument that ask for what `chat_inputs` does anyway, the rule that an error names, and what to
    do instead of passing another value."""

    values: tuple[Any, ...]
    rule: str
    advice: str


# Arguments of `apply_chat_template`, of tokenizers and processors, that are no variables of a template.
_ARGUMENTS = {
    "tokenize": _FixedArgument(
        (True,), "be True", "`chat_inputs` makes ids; for the text call each tokenizer's own method."
    ),
    "return_dict": _FixedArgument((True,), "be True", "`chat_inputs` returns ids and masks by name."),
    "return_tensors": _FixedArgument((None, "pt"), 'be "pt"', "`generate()` takes torch's tensors."),
    "padding": _FixedArgument(
        (True, False, None, "longest", "do_not_pad"),
        'be True or "longest"',
        "The chats are padded on the left to the longest one, as `generate()` needs them.",
    ),
    "truncation": _FixedArgument(
        (False, None, "do_not_truncate"),
        "be False",
        "Each member's tokenizer would cut the chat at another place. Leave out messages instead.",
    ),
    "max_length": _FixedArgument((None,), "be left out", "Chats are not cut. Leave out messages instead."),
    "return_assistant_tokens_mask": _FixedArgument(
        (False, None), "be False", "It is for training; `generate()` does not take it."
    ),
    "tokenizer_kwargs": _FixedArgument(
        (None, {}), "be left out", "The ids are those of the members' tokenizers as they are."
    ),
    "processor_kwargs": _FixedArgument(
        (None, {}), "be left out", "It is for processors; pass their tokenizers and leave it out."
    ),
    "load_audio_from_video": _FixedArgument(
        (False, None), "be False", "It is for processors of audio; members read text."
    ),
}


def chat_inputs(
    messages: Sequence[Any],
    tokenizers: Sequence[Any],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | str | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    chat_template: str | None = None,
    **template_kwargs: Any,
) -> Any:
    """
    The inputs of all members for a chat, each rendered with the member's own chat template.

    A member whose tokenizer has no chat template (a base model beside an instruct model) reads a plain rendering, and a
    warning says so once. `[{"role": "user", "content": "Who wrote Faust?"}]` is rendered as
    `"### User:\\nWho wrote Faust?\\n\\n### Assistant:\\n"`.

    Args:
        messages (`list[dict]` or `list[list[dict]]`): a conversation, or a batch of them. Each message has a `role`.
        tokenizers (`list[PreTrainedTokenizerBase]`): one per member, the main model's first.
        add_generation_prompt (`bool`, *optional*): whether an answer is opened behind the last message. By default it
            is, unless that message is continued.
        continue_final_message (`bool` or `str`, *optional*): whether the text goes on from that of the last message, or
            the name of the field of that message from which it goes on. By default it does where that message is the
            assistant's.
        tools, documents (*optional*): passed to every member's `apply_chat_template`.
        chat_template (`str`, *optional*): the name of one of the main tokenizer's templates, like `"tool_use"`. Another
            member takes its own template of that name, or its default where it has none. It may also be the text of a
            template, which the main model alone takes.
        template_kwargs (*optional*): variables of the templates for every member, like `enable_thinking=False`. Of the
            other arguments of `apply_chat_template` only those are taken that ask for what this function does anyway:
            `tokenize=True`, `return_dict=True`, `return_tensors="pt"`, `padding=True`, and `sanitize_control_tokens`
            where the installed transformers has it. The others are refused by name.

    Returns:
        `BatchEncoding`: `input_ids` and `attention_mask` of shape `(batch_size, sequence_length)`, padded on the left,
        for the main model, and `assistant_inputs`, a list of the same for each assistant.

    Raises:
        ValueError: no conversation, no tokenizer with a chat template, a template that refuses the messages, an
            argument that cannot be honoured, or tools, documents or contents without text for a member that has no
            template.
    """
    opens, continues = add_generation_prompt, continue_final_message
    if not isinstance(opens, bool | None):
        raise ValueError(f"`add_generation_prompt` must be True or False, but is {opens!r}. Leave it out.")
    if not isinstance(continues, bool | str | None):
        raise ValueError(
            "`continue_final_message` must be True, False or the name of a field of the last message, but is "
            f"{continues!r}. Leave it out."
        )
    if opens and continues:
        raise ValueError(
            "`add_generation_prompt` must be False with `continue_final_message`, but is True. Choose one of the two."
        )
    check_tokenizer_list(tokenizers)
    tokenizers = [fast_interface(tokenizer) for tokenizer in tokenizers]
    variables = _template_variables(template_kwargs, tokenizers)
    variables |= {"tools": _listed("tools", tools), "documents": _listed("documents", documents)}
    conversations = _conversations(messages)
    templates = _templates(tokenizers, chat_template)
    made = []
    for index, (tokenizer, template) in enumerate(zip(tokenizers, templates, strict=True)):
        options = variables if template is None else {**variables, "chat_template": template}
        if template is None and not _template(tokenizer):
            _check_plain(tokenizer, index, conversations, variables)
            options = {"chat_template": PLAIN_TEMPLATE}
        rows = [_render(tokenizer, index, chat, opens, continues, options) for chat in conversations]
        made.append(pad_left(rows, tokenizer))
    return BatchEncoding({**made[0], "assistant_inputs": made[1:]})


def rendered_turn(tokenizer: Any, content: str, **variables: Any) -> tuple[str, bool]:
    """
    A message of the user's as text, with an answer opened behind it, in which the model does not think where its
    template can say so; and whether the tokenizer has a chat template. Without one it is the plain rendering.

    Args:
        tokenizer (`PreTrainedTokenizerBase`), content (`str`): whose template it is, and the user's message.
        variables (*optional*): of the template; by default those that switch thinking off.

    Raises:
        ValueError: the template refuses the message.
    """
    tokenizer = fast_interface(tokenizer)
    has_template = bool(_template(tokenizer))
    options = (variables or dict.fromkeys(SWITCHES, False)) if has_template else {"chat_template": PLAIN_TEMPLATE}
    messages = [{"role": "user", "content": content}]
    rule = f"The chat template of every member must take a user's message, but that of {_name(tokenizer)} refuses it"
    with _refusing(rule, "Change that `chat_template`, or leave it out."):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return str(text), has_template


def takes_system(tokenizers: Sequence[Any]) -> bool:
    """Whether the chat templates of all members take a message of the system's: Gemma's of 2024 refuse it."""
    try:
        chat_inputs([{"role": "system", "content": "a"}, {"role": "user", "content": "a"}], tokenizers)
    except ValueError:
        return False
    return True


def _template_variables(given: dict[str, Any], tokenizers: Sequence[Any]) -> dict[str, Any]:
    """The further arguments that the templates get: all but those that ask for what is done here anyway."""
    for name, fixed in _ARGUMENTS.items():
        one = given.get(name)
        is_plain = one is None or isinstance(one, (bool, str, dict))  # arrays have no single `==`
        if name in given and not (is_plain and any(one == value for value in fixed.values)):
            raise ValueError(f"`{name}` must {fixed.rule}, but is {given[name]!r}. {fixed.advice}")
    sanitizes = given.get("sanitize_control_tokens")
    if not isinstance(sanitizes, bool | None):
        raise ValueError(f"`sanitize_control_tokens` must be True or False, but is {sanitizes!r}. Leave it out.")
    for tokenizer in tokenizers if sanitizes else ():
        if "sanitize_control_tokens" not in inspect.signature(tokenizer.apply_chat_template).parameters:
            raise ValueError(
                "`sanitize_control_tokens` must be False where a tokenizer or the installed transformers does not know "
                f"it, but is {sanitizes!r}, and {_name(tokenizer)} ({type(tokenizer).__name__}) does not. Check the "
                "messages for special tokens yourself."
            )
    return {
        name: value
        for name, value in given.items()
        if name not in _ARGUMENTS and (sanitizes or name != "sanitize_control_tokens")
    }


def _templates(tokenizers: Sequence[Any], chosen: str | None) -> list[str | None]:
    """Each member's template, by name or as text; `None` for its default."""
    own = [_template(tokenizer) for tokenizer in tokenizers]
    main, *others = ([*templates] if isinstance(templates, dict) else None for templates in own)  # names of templates
    is_name = main is not None and chosen in main
    if chosen is not None and not is_name and not (isinstance(chosen, str) and ("{{" in chosen or "{%" in chosen)):
        known = "has one template without a name" if main is None else f"has {sorted(main)}"
        raise ValueError(
            "`chat_template` must be a template or the name of one of the main tokenizer's, but is "
            f"{chosen!r}, and {_name(tokenizers[0])} {known}. Choose one of these, or leave it out for each member's "
            "default."
        )
    picked = [chosen, *(chosen if is_name and names and chosen in names else None for names in others)]
    if not any(template or templates for template, templates in zip(picked, own, strict=True)):
        raise ValueError(
            f"`tokenizers[0]` must have a chat template, or another member's must, but {_name(tokenizers[0])} has none "
            "(base models have none). Set its `chat_template`, or pass a text."
        )
    return picked


def _check_plain(tokenizer: Any, index: int, conversations: Sequence[list[Any]], variables: Mapping[str, Any]) -> None:
    """
    Say, once per tokenizer, that its model reads chats in the plain rendering.

    Raises:
        ValueError: the chat has something that this rendering cannot hold.
    """
    given = [f"`{name}`" for name in ("tools", "documents") if variables[name]]
    given += [
        f"a message of type {part.get('type')!r}" if isinstance(part, Mapping) else f"the part {part!r} of a message"
        for chat in conversations
        for message in chat
        for part in (message["content"] if isinstance(message.get("content"), list) else [])
        if not isinstance(part, Mapping) or part.get("type") != "text"
    ]
    if given:
        raise ValueError(
            f"`tokenizers[{index}]` must have a chat template for {given[0]}, but {_name(tokenizer)} has none. Set its "
            "`chat_template`, or leave that out."
        )
    logger.warning_once(
        f"The tokenizer of member {index} ({_name(tokenizer)}) has no chat template: that model reads chats as plain "
        "text, each message behind a line like '### User:'. Where answers go on with turns that it makes up, stop them "
        "at '\\n### User:' (`stop_strings`, or --stop in a shell). Where it was trained on another format, set its "
        "`chat_template`."
    )


def _template(tokenizer: Any) -> Any:
    """A tokenizer's chat template, or its templates by name; `None` where it has none."""
    return getattr(fast_interface(tokenizer), "chat_template", None)


def loses_template(tokenizer: Any, prompt: Sequence[int], other: Any, other_prompt: Sequence[int]) -> bool:
    """
    Whether `prompt` looks like a chat that the template of `tokenizer` made, and `other_prompt`, in which the member of
    `other` reads the same text, is not what that tokenizer's own template makes of a chat.
    """
    if not _template(tokenizer) or not _template(other):
        return False
    return _is_rendered(tokenizer, prompt) and not _is_rendered(other, other_prompt)


def is_same_text(tokenizer: Any, prompt: Sequence[int], other: Any, other_prompt: Sequence[int]) -> bool:
    """Whether two prompts say the same, special tokens included that one of the tokenizers reads as characters."""
    return _bare_text(tokenizer, prompt) == _bare_text(other, other_prompt)


def _bare_text(tokenizer: Any, prompt: Sequence[int]) -> str:
    """The text of a prompt without white space, which tokenizers put around special tokens, and without the token that
    begins a sequence."""
    text = _whole_text(tokenizer, prompt).removeprefix(tokenizer.bos_token or "")
    return "".join(text.split())


def _whole_text(tokenizer: Any, prompt: Sequence[int]) -> str:
    """The text of a prompt, special tokens included."""
    return str(tokenizer.decode(list(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ordinary_marks(tokenizer: Any) -> set[str | None]:
    """The special tokens of any text, chat or not."""
    return {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}


def _special_marks(tokenizer: Any) -> list[str]:
    """The special tokens that a chat template writes, those of any text left out."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()} - _ordinary_marks(tokenizer)
    return [token for token in added if token.strip() and token in str(tokenizer.chat_template)]


def _is_rendered(tokenizer: Any, prompt: Sequence[int]) -> bool:
    tokenizer = fast_interface(tokenizer)
    ordinary = _ordinary_marks(tokenizer)
    marks = _special_marks(tokenizer)
    try:  # what follows a user's message; templates without special tokens have nothing else to be known by
        probe = [{"role": "user", "content": _PROBE}]
        rendered = tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
        marks.append(rendered.partition(_PROBE)[2].strip())
    except Exception:  # a template may refuse a bare user message in any way it likes: then nothing more is known
        pass
    text = _whole_text(tokenizer, prompt)
    return any(len(mark) > 2 and mark not in ordinary and mark in text for mark in marks)


def _listed(name: str, given: Any) -> list[Any] | None:
    """Tools or documents as a list. Raises `ValueError` where they are none."""
    is_array = hasattr(given, "dtype")
    if given is not None and (isinstance(given, (str, bytes, Mapping)) or is_array or not hasattr(given, "__iter__")):
        raise ValueError(f"`{name}` must be a list, but is {given!r}. Put them in a list, or leave it out.")
    return None if given is None else list(given)


def _conversations(messages: Sequence[Any]) -> list[list[Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(
            f"`messages` must be a list of messages or a list of such lists, but is {messages!r}. "
            'A message is {"role": ..., "content": ...}.'
        )
    batch = [messages] if isinstance(messages[0], Mapping) else messages
    for row, conversation in enumerate(batch):
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, (str, bytes))
        if not is_list or not conversation or not all(map(_is_message, conversation)):
            raise ValueError(
                f"`messages` must be messages with a `role`, but has {conversation!r} as conversation {row}. "
                'A message is {"role": ..., "content": ...}.'
            )
    return [list(conversation) for conversation in batch]


def _is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and isinstance(given.get("role"), str)


def answer_place(
    chat: Sequence[Mapping[str, Any]], opens: bool | None = None, continues: bool | str | None = None
) -> tuple[bool, bool | str]:
    """Whether an answer is opened behind a chat, and whether the text of its last message is continued, as the
    arguments of [`chat_inputs`] say."""
    if continues is None:
        continues = not opens and chat[-1]["role"] == "assistant"
    return (not continues if opens is None else opens), continues


def _render(
    tokenizer: Any,
    index: int,
    chat: list[Any],
    opens: bool | None,
    continues: bool | str | None,
    options: dict[str, Any],
) -> list[int]:
    opens, continues = answer_place(chat, opens, continues)
    options = {**options, "add_generation_prompt": opens, "continue_final_message": continues}
    rule = (
        f"The messages must suit every member's chat template, but that of `tokenizers[{index}]` ({_name(tokenizer)}) "
        "refuses them"
    )
    with _refusing(rule, "Change the messages, or that member's `chat_template`."):
        if options.get("chat_template") is PLAIN_TEMPLATE:
            text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
            return vocabulary_of(tokenizer).encode_prompt(text)
        rendered = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **options)
    return list(rendered["input_ids"])


@contextmanager
def _refusing(rule: str, advice: str) -> Iterator[None]:
    """Within this context what a template says no with is a `ValueError` of the rule, the reason and what to do."""
    try:
        yield
    except ImportError:
        raise  # the template engine is missing: its message says what to install
    except Exception as error:  # a template says no with whatever exception it likes
        raise ValueError(f"{rule}: {error}. {advice}") from error


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
