"""Trains the three tokenizers of the demo, each of another kind, on what its member reads."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_PAD, _EOS, _UNK = _SPECIAL = ["<pad>", "<eos>", "<unk>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_MARKS = pre_tokenizers.Split(Regex(r"[?:.,\n]"), "isolated")


def byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer like GPT-2's and Llama 3's: its pieces are of bytes, with the space at their beginning."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL[:2], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def unigram(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """
    A tokenizer like SentencePiece's Unigram (T5, Gemma): of all ways to cut a word it takes the likeliest, by the
    pieces' shares in the text. The space is written as a block (U+2581), and unknown characters as bytes. The pieces
    are those that merging (BPE) finds: on a text of few patterns `UnigramTrainer` finds so few that most words begin
    with a bare block.
    """
    texts = list(texts)
    learner = _block_bpe(texts, vocab_size)
    counts = Counter(piece for encoding in learner.encode_batch(texts) for piece in encoding.tokens)
    total = counts.total()
    pieces = [(piece, 0.0) for piece in _SPECIAL]
    merged = sorted(set(learner.get_vocab()) - set(_SPECIAL), key=lambda piece: (-counts[piece], piece))
    pieces += [(piece, math.log((counts[piece] + 0.5) / total)) for piece in merged]
    pieces += [(piece, math.log(0.01 / total)) for piece in _BYTES]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), _MARKS])
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace(prepend_scheme="never")]
    )
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


def byte_fallback_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer like Llama 2's and Mistral's: its pieces are of characters, the space is written as a block (U+2581),
    and unknown characters as bytes."""
    learner = _block_bpe(texts, vocab_size)
    state = json.loads(learner.to_str())["model"]
    vocab = state["vocab"] | {piece: len(state["vocab"]) + byte for byte, piece in enumerate(_BYTES)}
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=_UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = learner.normalizer
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(_SPECIAL)
    return tokenizer


def _block_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE tokenizer of characters, whose vocabulary leaves room for 256 bytes."""
    learner = Tokenizer(models.BPE(unk_token=_UNK))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("▁", "merged_with_next"), _MARKS])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(_BYTES), special_tokens=_SPECIAL, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    return learner


def wrap(tokenizer: Tokenizer, max_length: int) -> Any:
    """The tokenizer as transformers loads it. It pads on the left, and adds no special token to a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_EOS,
        pad_token=_PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
