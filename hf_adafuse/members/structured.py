"""Structured output: a JSON schema, a regular expression or a grammar, compiled for each member's own tokenizer, so
that all members propose valid text. Needs xgrammar (the extra `structured`).
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.utils import logging

from .json_patterns import why_not_followed, without_line_breaks
from .schema_keywords import opened, unenforced_keywords
from .vocabulary import Vocabulary

logger = logging.get_logger(__name__)

KINDS = ("json_schema", "regex", "grammar", "structural_tag")
_WITH_SCHEMAS = ("json_schema", "structural_tag")
# The time, and the line of the library's own source, before each of its messages.
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
# JSON of one line has none of these. The library lets them into strings of a given length (its issue 800).
_CONTROLS = re.compile(rb"[\x00-\x1f]")
# What stands in such strings in a grammar's text, and what should.
_CHARACTERS, _JSON_CHARACTERS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
_COMPILERS: weakref.WeakKeyDictionary[Vocabulary, dict[Any, Any]] = weakref.WeakKeyDictionary()


class UnenforcedKeywordsError(ValueError):
    """A strict schema has keywords that its grammar does not enforce."""


def read_structured(given: Any) -> tuple[str, str] | None:
    """
    The kind and the text of what `generate(structured=...)` was given. A warning names the keywords of a JSON schema
    that the grammar does not enforce, once for each schema.

    Args:
        given (`dict`): a dict with one of these keys: `json_schema` (a dict, its text, or a pydantic model), `regex`,
            `grammar` (in GBNF notation, its start rule named `root`) or `structural_tag` (a dict or its text, of
            xgrammar's form: words in which tagged parts follow a grammar). Beside a schema or a tag it may have
            `strict` (`bool`): refuse such keywords.

    Raises:
        ValueError: it is no such dict.
        UnenforcedKeywordsError: a schema has such keywords and is `strict`.
    """
    if given is None:
        return None
    kinds = [name for name in given if name != "strict"] if isinstance(given, Mapping) else []
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise ValueError(
            f"`structured` must be a dict with one of {list(KINDS)}, but is {given!r}. Pass "
            '{"json_schema": {...}}, say.'
        )
    kind = kinds[0]
    value = given[kind]
    strict = given.get("strict", False)
    if strict not in (True, False) or ("strict" in given and kind not in _WITH_SCHEMAS):
        raise ValueError(
            f"`structured['strict']` must be True or False beside a JSON schema, but is {strict!r} beside {kind!r}. "
            "Leave it out."
        )
    if kind in _WITH_SCHEMAS and not isinstance(value, str):
        is_model = kind == "json_schema" and hasattr(value, "model_json_schema")
        value = value.model_json_schema() if is_model else value
        value = _json(value, kind) if isinstance(value, Mapping) else value
    if not isinstance(value, str):
        raise ValueError(f"`structured[{kind!r}]` must be text, but is {value!r}. Pass the {kind} itself.")
    if kind in _WITH_SCHEMAS:
        check_keywords((kind, value), strict, f"`structured[{kind!r}]`")
    return kind, value


def check_keywords(structured: tuple[str, str], strict: bool, name: str) -> None:
    """
    Warn of the keywords of a JSON schema that the grammar does not enforce, once for each schema.

    Args:
        structured (`tuple[str, str]`): a schema's or a structural tag's kind and text.
        strict (`bool`): whether to raise instead.
        name (`str`): how errors call it.

    Raises:
        UnenforcedKeywordsError: there is something, and it is not to be.
    """
    try:
        given = json.loads(structured[1])
    except ValueError:  # no JSON: compiling says so
        return
    schemas = [given] if structured[0] == "json_schema" else _schemas_of(given)
    found = dict.fromkeys(one for schema in schemas for one in unenforced_keywords(schema))
    places = ", ".join(map(str, found))
    if found and strict:
        raise UnenforcedKeywordsError(
            f"{name} must have only keywords that the grammar enforces where it is strict, but has {places}. Leave "
            "these out, or `strict`, and check the text yourself."
        )
    if found:
        logger.warning_once(
            f"The JSON schema has keywords that the grammar does not enforce: {places}. A text may violate these. "
            "Check it yourself, leave them out, or pass `strict` to refuse them."
        )


def _schemas_of(tag: Any) -> list[Any]:
    """The JSON schemas in a structural tag."""
    if isinstance(tag, Mapping) and tag.get("type") == "json_schema":
        return [tag.get("json_schema")]
    inner = tag.values() if isinstance(tag, Mapping) else tag if isinstance(tag, list) else ()
    return [schema for one in inner for schema in _schemas_of(one)]


def _json(value: Any, kind: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`structured[{kind!r}]` must be of JSON values, but {error}. Pass what `json.dumps` takes."
        ) from None


class GrammarProcessor(LogitsProcessor):
    """
    [`LogitsProcessor`] that rules out what a grammar does not allow after the prompt. One text at a time; it remembers
    what it was asked before.

    Args:
        compiled (`xgrammar.CompiledGrammar`): for the tokens of one member.
        library: the module `xgrammar`, which need not be installed where no grammar is used.
    """

    def __init__(self, compiled: Any, library: Any) -> None:
        self.compiled = compiled
        self.library = library
        self.matcher: Any = None
        self.is_lost = False

    def can_begin(self, vocab_size: int) -> bool:
        """Whether any token may come first."""
        bitmask = self._bitmask(vocab_size)
        is_limited = self.library.GrammarMatcher(self.compiled).fill_next_token_bitmask(bitmask)
        return not is_limited or bool(bitmask.any())

    def _bitmask(self, vocab_size: int) -> torch.Tensor:
        with torch.device("cpu"):  # else on torch's default device
            return self.library.allocate_token_bitmask(1, vocab_size)  # type: ignore[no-any-return]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` of shape `(1, vocab_size)` with minus infinity for tokens that the grammar does not allow."""
        xgrammar = self.library
        if self.matcher is None:
            self.matcher = xgrammar.GrammarMatcher(self.compiled)
        elif not self.is_lost and not self.matcher.is_terminated():
            # A text that this member cannot spell has been committed: it goes on unguided, the main model rules out
            # what the grammar does not allow.
            self.is_lost = not self.matcher.accept_token(int(input_ids[0, -1]))
        if self.is_lost or self.matcher.is_terminated():
            return scores
        bitmask = self._bitmask(scores.shape[-1])
        self.matcher.fill_next_token_bitmask(bitmask)
        allowed = scores.detach().to("cpu", copy=True)
        xgrammar.apply_token_bitmask_inplace(allowed, bitmask)
        return allowed.to(scores.device)


def compile_grammar(structured: tuple[str, str], vocabulary: Vocabulary, eos_ids: list[int], member: str) -> Any:
    """
    A [`GrammarProcessor`] for one member.

    Args:
        structured (`tuple[str, str]`): as of [`read_structured`].
        vocabulary (`Vocabulary`), eos_ids (`list[int]`): the member's.
        member (`str`): how errors call it.

    Raises:
        ImportError: the library is missing.
        ValueError: the grammar does not compile, the member has no end-of-sequence id, with which a text that is
            complete ends, or no token that may come first.
    """
    xgrammar = _library("`structured`")
    if not eos_ids:
        raise ValueError(
            f"`structured` must be used with members that can end a text, but {member} has no end-of-sequence id. Set "
            "`eos_token_id` in its generation config."
        )
    grammar = parse_grammar(structured)
    compiler = _compiler(vocabulary, eos_ids, structured[0] == "json_schema")
    with _compiling(f"`structured[{structured[0]!r}]`"):
        processor = GrammarProcessor(compiler.compile_grammar(grammar), xgrammar)
    if not processor.can_begin(len(vocabulary.all_pieces())):
        raise ValueError(
            f"`structured` must be used with members that can write the text, but {member} has no token that may come "
            "first. Leave the member out, or change the grammar."
        )
    return processor


def _compiler(vocabulary: Vocabulary, eos_ids: list[int], is_json: bool) -> Any:
    """What compiles for a vocabulary, made once: that may take a second."""
    xgrammar = _library("`structured`")
    compilers = _COMPILERS.setdefault(vocabulary, {})
    key = is_json, *eos_ids
    if key not in compilers:
        pieces = [b"" if is_json and _CONTROLS.search(piece) else piece for piece in vocabulary.all_pieces()]
        info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=eos_ids)
        compilers[key] = xgrammar.GrammarCompiler(info)
    return compilers[key]


def parse_grammar(structured: tuple[str, str], name: str | None = None) -> Any:
    """
    The grammar, not yet compiled for a vocabulary.

    Args:
        structured (`tuple[str, str]`): as of [`read_structured`].
        name (`str`, *optional*): how errors call it.

    Raises:
        ImportError: the library is missing.
        ValueError: it does not compile.
    """
    kind, text = structured
    grammars = _library(name or "`structured`").Grammar
    with _compiling(name or f"`structured[{kind!r}]`"):
        if kind == "json_schema":
            return _grammar_of(json.loads(text), grammars)
        if kind == "structural_tag":
            return grammars.from_structural_tag(json.dumps(_inside_tags(json.loads(text), grammars)))
        return grammars.from_regex(_followed(text)) if kind == "regex" else grammars.from_ebnf(text)


def _followed(pattern: str) -> str:
    """A regular expression as the library is to read it. Raises `RuntimeError` where a text by its grammar may not
    match it."""
    if reason := why_not_followed(pattern):
        raise RuntimeError(f"it {reason}")
    return without_line_breaks(pattern)


def _grammar_of(schema: Any, grammars: Any) -> Any:
    """The grammar of a JSON schema. Its texts are as `json.dumps` writes them: endless whitespace is valid, too, and
    small models write it."""
    return grammars.from_json_schema(json.dumps(opened(schema)), any_whitespace=False)


def _inside_tags(tag: Any, grammars: Any) -> Any:
    """A structural tag whose parts follow the rules of texts without tags: JSON is as `json.dumps` writes it, where the
    tag asks for no other style, and regular expressions are read alike."""
    if isinstance(tag, list):
        return [_inside_tags(one, grammars) for one in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        if set(tag) - {"type", "json_schema", "style"} or tag.get("style", "json") != "json":
            return {**tag, "json_schema": opened(tag["json_schema"])}
        grammar = str(_grammar_of(tag["json_schema"], grammars))
        return {"type": "grammar", "grammar": grammar.replace(_CHARACTERS, _JSON_CHARACTERS)}
    if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
        return {**tag, "pattern": _followed(tag["pattern"])}
    return {name: _inside_tags(value, grammars) for name, value in tag.items()}


def _library(name: str) -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ImportError(
            f'{name} needs the package xgrammar. Install it with `pip install "hf_adafuse[structured]"`.'
        ) from error
    return xgrammar


@contextmanager
def _compiling(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the library says, in whatever way
        reason = _SOURCE_LINE.sub("", str(error).strip()).partition("\n")[0].rstrip(".")
        raise ValueError(f"{name} must be one that compiles, but does not: {reason}. Correct it.") from error
