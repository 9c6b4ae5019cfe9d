"""Tokenizers of mistral-common as this package reads tokenizers.

Where that package is installed, `AutoTokenizer` returns a `MistralCommonBackend` for folders with its files. It has no
tokenizers core, no table of added tokens and no chat template, its `get_vocab()` leaves out tokens that are a part of a
character, and it refuses `split_special_tokens`: special tokens that a text spells out are characters to it, always.
"""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

# By its name: to import the class needs mistral-common.
_BACKEND = "MistralCommonBackend"
# Variables of chat templates that mistral-common knows; others are ignored, as by a template that does not use them.
_KNOWN_VARIABLES = ("tools", "reasoning_effort")
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"})


def fast_interface(tokenizer: Any) -> Any:
    """A tokenizer with the interface of a fast one: itself, or a [`MistralTokenizer`] of mistral-common's."""
    if not any(one.__name__ == _BACKEND for one in type(tokenizer).__mro__):
        return tokenizer
    if tokenizer not in _MADE:
        _MADE[tokenizer] = MistralTokenizer(tokenizer)
    return _MADE[tokenizer]


def encode_marks(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text in which special tokens are spelled out; no beginning or end of a sequence is added."""
    tokenizer = fast_interface(tokenizer)
    if not text:
        return []
    if isinstance(tokenizer, MistralTokenizer):
        return tokenizer.encode_marks(text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class MistralTokenizer:
    """
    A tokenizer of mistral-common with what fast tokenizers have beside it. All else is the tokenizer's own.

    Args:
        backend (`MistralCommonBackend`): is not changed.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = copy.copy(backend)  # which may be let go of while this is kept
        self._core = backend.tokenizer.instruct_tokenizer.tokenizer
        self._is_bytes = type(self._core).__name__ == "Tekkenizer"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before it is made, as where it is copied
            raise AttributeError(name)
        return getattr(self._backend, name)

    def __len__(self) -> int:
        return len(self._backend)

    def __call__(self, text: Any, split_special_tokens: bool = False, **options: Any) -> Any:
        """As of the backend, for which special tokens in a text are characters, with `split_special_tokens` or not."""
        return self._backend(text, **options)

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The text of a list of ids. Those of a padded embedding, which the backend refuses, have none."""
        return str(self._backend.decode([token for token in token_ids if token < len(self)], **options))

    @property
    def decoder_types(self) -> set[str]:
        """How `convert_ids_to_tokens` writes bytes, by the name that the fast tokenizer's decoder has."""
        return {"ByteLevel"} if self._is_bytes else {"ByteFallback"}

    @property
    def all_special_ids(self) -> list[int]:
        """Those of the backend, and the unknown token, which SentencePiece does not count among them."""
        return sorted({*self._backend.all_special_ids, self._backend.unk_token_id} - {None})

    @functools.cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The special tokens by id."""
        return {token: AddedToken(self._core.id_to_piece(token), special=True) for token in self.all_special_ids}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The notation of the fast tokenizer: one character for each byte, or SentencePiece's."""
        if not isinstance(ids, int):
            return [self.convert_ids_to_tokens(one) for one in ids]
        if not self._is_bytes or ids in self.added_tokens_decoder:
            return self._core.id_to_piece(ids)
        return "".join(_CHARACTERS[byte] for byte in self._core.id_to_byte_piece(ids))

    def _convert_id_to_token(self, token: int) -> str:  # for transformers' stop strings
        return str(self.convert_ids_to_tokens(token))

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens in the notation of `convert_ids_to_tokens`."""
        return b"".join(map(self._bytes_of, tokens)).decode("utf-8", "replace")

    def _bytes_of(self, name: str) -> bytes:
        if self._is_bytes:
            return bytes(_BYTES[char] for char in name) if all(char in _BYTES for char in name) else name.encode()
        byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

    def get_vocab(self) -> dict[str, int]:
        """All ids by name."""
        return {self.convert_ids_to_tokens(token): token for token in range(len(self))}

    @functools.cached_property
    def chat_template(self) -> str:
        """A conversation as mistral-common writes it: no template, but it has the marks of one."""
        try:
            return str(self._backend.decode(self._encode_chat(_PROBE), skip_special_tokens=False))
        except Exception:  # the format of a model without conversations may be refused in any way
            return "".join(str(one) for one in self.added_tokens_decoder.values())

    def apply_chat_template(
        self,
        conversation: Any,
        tokenize: bool = True,
        return_dict: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> Any:
        """
        A conversation by mistral-common's own encoding, as ids or as the text of these.

        Raises:
            ValueError: a template is given, or something for one that mistral-common cannot honour.
        """
        if chat_template is not None:
            raise ValueError(
                "`chat_template` must be left out with a tokenizer of mistral-common, which encodes conversations "
                "itself, but is given. Load the tokenizer with `mistral_format=False`."
            )
        if variables.get("documents"):
            raise ValueError("`documents` must be left out with a tokenizer of mistral-common, but is given. Drop it.")
        if isinstance(continue_final_message, str):
            if continue_final_message != "content":
                raise ValueError(
                    '`continue_final_message` must be True or "content" with a tokenizer of mistral-common, but is '
                    f"{continue_final_message!r}. Pass one of these."
                )
            continue_final_message = True
        known = {name: variables[name] for name in _KNOWN_VARIABLES if variables.get(name) is not None}
        ids = self._encode_chat(conversation, continue_final_message=continue_final_message, **known)
        if not tokenize:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    def _encode_chat(self, conversation: Any, **options: Any) -> list[int]:
        messages = [dict(one) if isinstance(one, Mapping) else one for one in conversation]
        return list(self._backend.apply_chat_template(messages, return_dict=True, **options)["input_ids"])

    def encode_marks(self, text: str) -> list[int]:
        """As of the function of this name."""
        marks = {str(one): token for token, one in self.added_tokens_decoder.items()}
        parts = re.split("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")", text)
        ids: list[int] = []
        for part in filter(None, parts):
            ids += [marks[part]] if part in marks else self(part, add_special_tokens=False)["input_ids"]
        return ids


_CHARACTERS = bytes_to_unicode()
_BYTES = {char: byte for byte, char in _CHARACTERS.items()}
_MADE: weakref.WeakKeyDictionary[Any, MistralTokenizer] = weakref.WeakKeyDictionary()
