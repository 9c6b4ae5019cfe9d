"""Random regular expressions and JSON schemas, and what follows them: for tests of structured output."""

from __future__ import annotations

import functools
import json
import random
import re

import torch
import xgrammar
from transformers.convert_slow_tokenizer import bytes_to_unicode

# What all the tests' tokenizers can write.
LETTERS = "abcdehinoprst"


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """Of what Python's `re` and the library read alike, over characters that every tokenizer has."""
    kind = rng.choice(["text", "class", "choice", "times", "series", "series"]) if depth else "text"
    if kind == "text":
        return "".join(rng.choice([*LETTERS, " ", "\\."]) for _ in range(rng.randint(1, 3)))
    if kind == "class":
        return rng.choice(["[a-e]", "[^a-e]", "[nopr]", "\\d", "[a-z ]"] if rng.random() < 0.5 else ["[a-t]"])
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    if kind == "choice":
        return f"({'|'.join(parts)})"
    if kind == "times":
        return f"({parts[0]}){rng.choice(['?', '*', '+', '{2}', '{1,3}', '{2,}'])}"
    return "".join(f"({part})" if rng.random() < 0.3 else part for part in parts)


def random_schema(rng: random.Random, depth: int = 2) -> dict:
    """Small, so that random models come to the end of a text."""
    leaves = ["boolean", "null", "integer", "string", "pattern", "enum", "const"]
    kind = rng.choice(
        ["object", "object", "array"] if depth == 2 else [*leaves, "object", "array"] if depth else leaves
    )
    if kind == "object":
        names = rng.sample(["a", "it", "name", "is on"], rng.randint(1, 2))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = names if rng.random() < 0.7 else names[:1]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, 0), "minItems": least, "maxItems": least + 1}
    return {
        "integer": {"type": "integer", "minimum": rng.randint(-20, 0), "maximum": rng.randint(1, 300)},
        "string": {"type": "string", "maxLength": rng.randint(1, 4)},
        "pattern": {"type": "string", "pattern": f"^{random_regex(rng, 0)}[a-c]{{1,2}}$"},
        "enum": {"enum": rng.sample(["yes", "no", "é", 1, -2.5, None, [1], {"a": 0}], 3)},
        "const": {"const": rng.choice(["on", 0, False])},
    }.get(kind, {"type": kind})


def is_valid(value: object, schema: dict) -> bool:
    """Whether a value follows one of these schemas."""
    if "enum" in schema or "const" in schema:
        same = schema.get("enum", [schema.get("const")])
        return any(json.dumps(value) == json.dumps(one) for one in same)
    if schema["type"] == "object":
        names = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(names)
            and all(is_valid(value[name], names[name]) for name in value)
        )
    if schema["type"] == "array":
        is_fitting = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_fitting and all(is_valid(item, schema["items"]) for item in value)
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        is_short = isinstance(value, str) and len(value) <= schema.get("maxLength", 99)
        return is_short and re.fullmatch(schema.get("pattern", ".*"), value, flags=re.DOTALL) is not None
    return value is None if schema["type"] == "null" else type(value) is bool


def follows(text: str, structured: dict) -> bool:
    """Whether the whole text does."""
    if "regex" in structured:
        return re.fullmatch(structured["regex"], text) is not None
    try:
        return is_valid(json.loads(text), structured["json_schema"])
    except json.JSONDecodeError:
        return False


@functools.lru_cache(maxsize=64)
def _compiled(pieces: tuple[bytes, ...], eos: tuple[int, ...], text: str):
    kind, value = json.loads(text)[0]
    if kind == "json_schema":  # no control character is in JSON of one line
        pieces = tuple(b"" if any(byte < 32 for byte in piece) else piece for piece in pieces)
    info = xgrammar.TokenizerInfo(list(pieces), vocab_size=len(pieces), stop_token_ids=list(eos))
    compiler = xgrammar.GrammarCompiler(info)
    if kind == "regex":
        return compiler.compile_regex(value)
    return compiler.compile_json_schema(json.dumps(value), any_whitespace=False)


def may_begin(text: str, structured: dict) -> bool:
    """Whether the text, which was cut, can go on to one that follows."""
    single = tuple(bytes([byte]) for byte in range(256))
    matcher = xgrammar.GrammarMatcher(_compiled((*single, b""), (256,), json.dumps([*structured.items()])))
    return matcher.accept_string(text)


@functools.cache
def _real_pieces(tokenizer) -> tuple[bytes, ...]:
    """The bytes of each token of a large vocabulary, at once, by its notation: of bytes, or SentencePiece's."""
    special = set(tokenizer.all_special_ids)
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if "ByteLevel" in str(tokenizer.backend_tokenizer.decoder):
        table = {char: byte for byte, char in bytes_to_unicode().items()}
        texts = [bytes(table[char] for char in name) for name in names]
    else:
        texts = [
            bytes([int(name[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", name) else name.replace("▁", " ").encode()
            for name in names
        ]
    return tuple(b"" if token in special else text for token, text in enumerate(texts))


def pure(member, prompt: list[int], structured: dict):
    """The grammar as a function of a member's ids: from the prompt on, token by token; the oracle's own pieces."""
    size = member.model.config.vocab_size
    if size > 10_000:
        pieces = _real_pieces(member.tokenizer)
    else:
        known = set(member.tokenizer.get_vocab().values())
        pieces = tuple(member.token_bytes(token) if token in known else b"" for token in range(size))
    compiled = _compiled(pieces, tuple(member.eos), json.dumps([*structured.items()]))

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = xgrammar.GrammarMatcher(compiled)
        for token in ids[0, len(prompt) :].tolist():
            if not matcher.is_terminated() and not matcher.accept_token(token):
                return scores
        if matcher.is_terminated():
            return scores
        bitmask = xgrammar.allocate_token_bitmask(1, size)
        matcher.fill_next_token_bitmask(bitmask)
        bits = (bitmask[0, torch.arange(size) // 32] >> (torch.arange(size) % 32)) & 1
        return scores.masked_fill(bits[None] == 0, -torch.inf)

    return process
