"""One tokenizer seen as text: token -> bytes, span -> ids, prompt -> ids.

Text crosses tokenizers here and nowhere else, by one rule: the ids of a span are what the tokenizer gives for it *as a
continuation*, and they must decode back to exactly that span.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import re
import threading
import weakref
from typing import Any, NamedTuple

from ..trees.model_facts import cached_while_unchanged
from .mistral_tokenizers import MistralTokenizer, encode_marks, fast_interface

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Texts before which a span is put to be encoded, so that a tokenizer treats it as a continuation and not as the start
# of a text. The first one is taken that keeps its own ids and behind which the span decodes back to itself: with
# byte-level BPE that is the empty one.
_ENCODE_PREFIXES = ("", "\n", "a", "1", ".", ")", "Z", "é")

# Words that hardly any vocabulary has as single tokens.
_LONG_WORDS = "unhappily misunderstood xqzjk extraordinarily"

# What ordinary prompts hold and some tokenizers do not keep: XGLM's makes a space of a newline and "1" of "¹", BERT's
# makes small letters of capitals and leaves out what is not in its vocabulary.
_ORDINARY_TEXTS = {
    "line breaks": "b\nc",
    "runs of spaces": "b   c",
    "capitals": "Bc",
    "accents": "bé",
    "characters like '²' and '…'": "b² c…",
}

# What a fast tokenizer's core is made of beside its model; and the text of one without any of it, and without words.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_EMPTY = {"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}
# With and without special tokens are settings of a fast tokenizer: not both at the same time, in several threads.
_ENCODING = threading.Lock()


class Encoding(NamedTuple):
    """The ids of a span, and whether they decode back to it exactly."""

    ids: list[int]
    exact: bool


class Vocabulary:
    """
    A tokenizer as AdaFuse reads it. Special tokens other than the end of sequence are invisible: their text is empty.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): copied, but for what is only read, so that the caller's is never changed.
        vocab_size (`int`, *optional*): ids from here on have no embedding and are never produced.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self.tokenizer = _copied(tokenizer)
        self.vocab_size = vocab_size
        self._decoders = _decoder_types(self.tokenizer)
        self._special_ids = {
            index for index, token in self.tokenizer.added_tokens_decoder.items() if getattr(token, "special", False)
        } | set(self.tokenizer.all_special_ids)
        self._ids = sorted(set(self.tokenizer.get_vocab().values()))  # there may be gaps
        self._known = set(self._ids) - self._special_ids
        self._byte_of_char = _bytes_to_unicode() if "ByteLevel" in self._decoders else {}
        self._pieces: dict[int, bytes] = {}
        self._encodings: dict[str, Encoding] = {}
        self._tokens: dict[bytes, int] | None = None
        self._decode_prefix_ids, self._decode_prefix_text = self._find_decode_prefix()

    def text(self, ids: list[int]) -> str:
        """The text of `ids` as a continuation, leading space and all."""
        return self._decode(self._decode_prefix_ids + list(ids))[len(self._decode_prefix_text) :]

    def piece(self, token: int) -> bytes:
        """The bytes of one token as a continuation; a part of a character where a token is one."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def is_space(self, token: int) -> bool:
        """Whether a token is white space alone."""
        return self.piece(token) != b"" and not self.piece(token).strip()

    def all_pieces(self) -> list[bytes]:
        """The bytes of every token, by id; empty for special tokens and gaps."""
        size = self.vocab_size or self._ids[-1] + 1
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        unread = [token for token in range(size) if token not in self._pieces]
        if backend is not None and "ByteLevel" not in self._decoders:
            # Many at a time: a decoder is slow to start. Those with a name of their own are read one by one.
            whole = [token for token in unread if token in self._known and not self._is_byte(token)]
            texts = backend.decode_batch(
                [[*self._decode_prefix_ids, token] for token in whole], skip_special_tokens=True
            )
            start = len(self._decode_prefix_text)
            self._pieces.update(
                (t, text[start:].encode("utf-8", "replace")) for t, text in zip(whole, texts, strict=True)
            )
        return [self.piece(token) for token in range(size)]

    def token_of(self, piece: bytes) -> int | None:
        """The first token of these bytes, one of a single byte only where there is no other; `None` where there is
        none. Vocabularies with byte fallback have letters twice, and use the byte for none of them."""
        if self._tokens is None:
            pieces = [(token, piece) for token, piece in enumerate(self.all_pieces()) if piece]
            last_first = sorted(pieces, key=lambda one: (self._is_byte(one[0]), one[0]), reverse=True)
            self._tokens = {piece: token for token, piece in last_first}
        return self._tokens.get(piece)

    def encode(self, text: str) -> Encoding:
        """`text` as a continuation. Not exact: the tokenizer has no ids that decode back to it."""
        encoding = self._encodings.get(text)
        if encoding is None:
            if len(self._encodings) > 4096:
                self._encodings.clear()
            encoding = self._encodings[text] = self._encode(text)
        return encoding

    def has_boundary(self, text: str, at: int) -> bool:
        """
        Whether a word of the tokenizer's own ends in `text` at a character, and no token goes across it. Tokenizers
        that see the whole text as one word have theirs where space begins.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        encoding = None if backend is None else backend.encode(text, add_special_tokens=False)
        if encoding is None or len(set(encoding.word_ids)) < 2:
            return text[at : at + 1].isspace() or not text[at:]
        tokens = list(zip(encoding.offsets, encoding.word_ids, strict=True))
        before = [word for (_, end), word in tokens if end <= at]
        after = [word for (start, _), word in tokens if start >= at]
        is_between = len(before) + len(after) == len(tokens)
        return is_between and (not before or not after or before[-1] != after[0])

    def prompt_text(self, ids: list[int]) -> str:
        """A prompt's text, special tokens removed."""
        return self._decode(ids)

    def encode_prompt(self, text: str) -> list[int]:
        """
        A prompt's ids, with the special tokens that the tokenizer puts before a text and without those that it puts
        behind one: `[1, 306, 2]` of a tokenizer that appends its end token 2 is `[1, 306]`. The model is to go on with
        the text, and behind an end token it would begin another one. An end token that the text itself ends with stays.
        """
        ids = self._with_special_tokens(text)
        return ids[: len(ids) - self._count_appended(text, ids)]

    def encode_marks(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are spelled out; no beginning or end of a sequence is added."""
        with _ENCODING:
            return encode_marks(self.tokenizer, text)

    def num_appended(self, text: str) -> int:
        """How many special tokens the tokenizer puts behind a text that is to go on, which [`encode_prompt`] omits."""
        return self._count_appended(text, self._with_special_tokens(text))

    @functools.cached_property
    def appended(self) -> list[int]:
        """
        The special tokens that the tokenizer puts behind a text: its end token, a separator like BERT's `[SEP]`. None
        where the last of them begins a sequence: GLM's `<sop>` stands behind the prompt, and opens what is to come.
        """
        _, behind = self._frame
        begin, *ends = (
            getattr(self.tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "sep_token_id")
        )
        return [] if behind and behind[-1] == begin and begin not in ends else behind

    @functools.cached_property
    def lost_in_prompts(self) -> list[str]:
        """What of `_ORDINARY_TEXTS` a prompt's ids do not say, so that their text is not that which was encoded."""
        return [name for name, text in _ORDINARY_TEXTS.items() if not self._keeps(text)]

    @functools.cached_property
    def marks_word_ends(self) -> bool:
        """Whether tokens say where words end and not where they begin, as those of GPT-1 (`</w>`) and CTRL (`@@`): what
        a token adds to a text depends on the token before it."""
        ids = self._tokenize(_LONG_WORDS)
        text = self.text(ids)
        pieces = b"".join(map(self.piece, ids)).decode("utf-8", "replace")
        is_same = pieces.replace(" ", "").replace("@@", "") == text.replace(" ", "")
        return is_same and pieces.count(" ") > text.count(" ")

    @property
    def unknown_id(self) -> int | None:
        """The token in whose place a text had something else; `None` where there is none, or it also begins, ends or
        pads texts."""
        tokenizer = self.tokenizer
        others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        unknown: int | None = tokenizer.unk_token_id
        return None if unknown in others else unknown

    def has_unknown(self, ids: list[int]) -> bool:
        """Whether a prompt holds the unknown token."""
        return self.unknown_id is not None and self.unknown_id in ids

    def is_same_as(self, other: Vocabulary) -> bool:
        """Whether the other tokenizer gives the same ids for every text."""
        return self._ids == other._ids and self.fingerprint == other.fingerprint

    @property
    def fingerprint(self) -> str:
        if not hasattr(self, "_fingerprint"):
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if backend is not None:
                state = backend.to_str()
            else:
                state = json.dumps([type(self.tokenizer).__name__, self.tokenizer.get_vocab()], sort_keys=True)
            self._fingerprint = hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest()
        return self._fingerprint

    @functools.cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text and behind it."""
        for text in ("a", "A", "1", "."):
            ids = self._with_special_tokens(text)
            own = self._without_special_tokens(text)
            places = [at for at in range(len(ids) - len(own) + 1) if own and ids[at : at + len(own)] == own]
            if places:
                return ids[: places[0]], ids[places[0] + len(own) :]
        return [], []

    def _count_appended(self, text: str, ids: list[int]) -> int:
        """Of a text's ids, how many at their end the tokenizer has put there."""
        if not self.appended:
            return 0
        own, (before, behind) = self._without_special_tokens(text), self._frame
        # Some tokenizers put no special token where the text has it already: then its ids begin elsewhere.
        for start in (len(before), *range(len(ids) - len(own) + 1)):
            if ids[start : start + len(own)] == own:
                num_appended: int = len(ids) - start - len(own)
                return num_appended
        return len(behind) if ids[-len(behind) :] == behind else 0

    def _keeps(self, text: str) -> bool:
        return text in self._decode(self._without_special_tokens(f"a {text}"))

    def _with_special_tokens(self, text: str) -> list[int]:
        with _ENCODING:
            return list(self.tokenizer(text)["input_ids"])

    def _without_special_tokens(self, text: str) -> list[int]:
        """The ids of a text alone; a special token that the text spells out is that token, as in a prompt."""
        with _ENCODING:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text  # type: ignore[no-any-return]

    def _tokenize(self, text: str) -> list[int]:
        # Special tokens spelled out in a member's text are characters, not commands.
        with _ENCODING:
            encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])

    def _encode(self, text: str) -> Encoding:
        lossy: list[tuple[int, list[int]]] = []
        for prefix in _ENCODE_PREFIXES:
            head = self._tokenize(prefix) if prefix else []
            ids = self._tokenize(prefix + text)
            if ids[: len(head)] != head:
                continue  # the span's first character merged with the prefix
            ids = ids[len(head) :]
            if self.vocab_size is not None and any(token >= self.vocab_size for token in ids):
                continue
            decoded = self.text(ids)
            if decoded == text:
                return Encoding(ids, True)
            lossy.append((_shared_start(decoded, text), ids))
        return Encoding(max(lossy, key=lambda item: item[0])[1] if lossy else [], False)

    def _read_piece(self, token: int) -> bytes:
        if token not in self._known:
            return b""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if "ByteLevel" in self._decoders:
            if all(char in self._byte_of_char for char in name):
                return bytes(self._byte_of_char[char] for char in name)
            return name.encode("utf-8")  # type: ignore[no-any-return]
        if self._is_byte(token):
            return bytes([int(name[3:5], 16)])
        return self.text([token]).encode("utf-8", "replace")

    def _is_byte(self, token: int) -> bool:
        """Whether a token is one byte. A tokenizer without a known decoder shows it where the byte is no character."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        is_named_so = isinstance(name, str) and _BYTE_TOKEN.fullmatch(name)
        return bool(is_named_so and ("ByteFallback" in self._decoders or "\ufffd" in self.text([token])))

    def _find_decode_prefix(self) -> tuple[list[int], str]:
        """The ids and the text of one visible token. Spans are decoded behind it, so that no decoder strips a space
        that belongs to a span."""
        usual = [token for char in "aA1." for token in reversed(self._tokenize(char))]
        for token in itertools.chain(usual, self._ids):
            text = self._decode([token])
            if text.strip() and "\ufffd" not in text and self._decode([token, token]).startswith(text):
                return [token], text
        return [], ""


def _shared_start(one: str, other: str) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@cached_while_unchanged
def vocabulary_of(tokenizer: Any, vocab_size: int | None = None) -> Vocabulary:
    """The `Vocabulary` of a tokenizer, made once for as long as the tokenizer lives, does not grow and puts the same
    special tokens around a text."""
    known = _VOCABULARIES.setdefault(tokenizer, {})
    key = (len(tokenizer), vocab_size, _special_token_settings(tokenizer))
    if key not in known:
        known[key] = Vocabulary(tokenizer, vocab_size)
    return known[key]


_VOCABULARIES: weakref.WeakKeyDictionary[Any, dict[Any, Vocabulary]] = weakref.WeakKeyDictionary()


def _special_token_settings(tokenizer: Any) -> Any:
    """What says which special tokens a tokenizer puts around a text; its user may change that at any time."""
    processor = getattr(getattr(tokenizer, "backend_tokenizer", None), "post_processor", None)
    template = None if processor is None else processor.__getstate__()
    return template, *(getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token"))


def _copied(tokenizer: Any) -> Any:
    """A copy with settings and added tokens of its own. It shares the model, with vocabulary and merges, which nobody
    changes who uses a tokenizer: for 262,144 tokens copying them takes seconds."""
    tokenizer = fast_interface(tokenizer)
    if isinstance(tokenizer, MistralTokenizer):
        return copy.copy(tokenizer)  # nothing can be added to it
    most = max(10_000, len(tokenizer.added_tokens_decoder))  # what holds more is no table of added tokens
    tables = (value for value in vars(tokenizer).values() if isinstance(value, (dict, list)) and len(value) > most)
    memo: dict[int, Any] = {id(table): table for table in tables}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if type(backend).__module__ == "tokenizers" and (own := _copied_backend(backend)) is not None:
        memo[id(backend)] = own
    return copy.deepcopy(tokenizer, memo)


def _copied_backend(backend: Any) -> Any:
    """A fast tokenizer's core with the same model; `None` where added tokens would have other ids."""
    kind = type(backend)
    parts = {name: part for name in _PARTS if (part := getattr(backend, name)) is not None}
    # Not each kind of part can be copied: that they are read from text is what all have in common.
    states = {name: json.loads(part.__getstate__()) for name, part in parts.items()}
    copies = kind.from_str(json.dumps(_EMPTY | states))
    own = kind(backend.model)
    added = backend.get_added_tokens_decoder()
    for name in parts:
        setattr(own, name, getattr(copies, name))
    own.add_tokens([token for _, token in sorted(added.items())])
    return own if own.get_added_tokens_decoder() == added else None


def _decoder_types(tokenizer: Any) -> set[str]:
    """The names of the parts of a fast tokenizer's decoder (`ByteLevel`, `ByteFallback`, ...)."""
    if isinstance(tokenizer, MistralTokenizer):
        return tokenizer.decoder_types
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in [state, *state.get("decoders", [])]}


def _bytes_to_unicode() -> dict[str, int]:
    """The byte behind each character of a byte-level token (GPT-2's printable stand-ins)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in visible}
    hidden = (byte for byte in range(256) if byte not in set(visible))
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table
