"""Tiny models and tokenizers of every kind, made here: no downloads. Peaked enough that margins straddle tau.

The models are random. Two things make them behave: a large `initializer_range`, so that the context matters and greedy
text does not loop at once, and a scaled output layer, so that about half of the margins lie above 0.7. End-of-sequence
rows of the output layer are scaled once more, so that texts end now and then.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CORPUS = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the sunshine.",
    "There was a big tree in the park, and there was a cat on the tree. The cat was happy!",
    "The capital of France is Paris; the capital of Peru is Lima.\n\nQuestion: what is 3.14 times 2? Answer: 6.28",
    "Él comió piñata über den Straßen. 今天天气很好。 don't you think so? I'm sure she's there.",
    "def f(x):\n    return x + 1\n\nThe treaty of Versailles was a treaty. It was there that it was signed.",
] * 4


def _wrap(backend: Tokenizer, **special) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, padding_side="left", **special
    )


def _with_bos(backend: Tokenizer, bos: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
    )


def byte_level():
    """GPT-2's kind: no BOS, no unknown token, two end-of-sequence ids, and an added token that is text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|eot|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return _wrap(backend, eos_token="<|end|>", pad_token="<|pad|>")


def trailing_space():
    """Byte-level tokens that carry the space at their end."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\S+\s*|\s+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, eos_token="</s>", pad_token="<pad>")


def sentencepiece():
    """Llama 2's kind: byte fallback, no pre-tokenizer (so tokens of several words), BOS."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    ascii_only = [line.encode("ascii", "ignore").decode().replace("\n", " ") for line in CORPUS]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special[:3], show_progress=False)
    backend.train_from_iterator(ascii_only, trainer)
    # The byte tokens are ordinary entries of the vocabulary: rebuild the model with them in front.
    state = json.loads(backend.to_str())
    learned = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)[3:]
    state["model"]["vocab"] = {token: index for index, token in enumerate([*special, *learned])}
    backend = Tokenizer.from_str(json.dumps(state))
    _with_bos(backend, "<s>")
    return _wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def unigram():
    """SentencePiece's Unigram with Metaspace: an unknown token, no bytes."""
    text = " ".join(CORPUS).replace("\n", " ")
    words = Counter("▁" + word for word in text.split())
    parts = Counter(word[i : i + n] for word in words for n in (2, 3) for i in range(len(word) - n + 1))
    pieces = [*sorted({*text.replace(" ", "▁")} - {"天", "Q"}), *[p for p, _ in parts.most_common(80)]]
    pieces += [word for word, _ in words.most_common(40) if word not in pieces]
    # A piece's score grows with its length, so that long ones win; no two are equal.
    scored = [(piece, -8.0 + len(piece) - index / 1000) for index, piece in enumerate(pieces)]
    backend = Tokenizer(models.Unigram([("<unk>", -20.0), ("</s>", -20.0), ("<pad>", -20.0), *scored], unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>", "<pad>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _wrap(backend, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def characters():
    """One token a character; others are unknown."""
    seen = sorted({char for line in CORPUS for char in line if ord(char) < 256})
    vocab = {token: index for index, token in enumerate(["[UNK]", "[BOS]", "[EOS]", *seen])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["[UNK]", "[BOS]", "[EOS]"])
    _with_bos(backend, "[BOS]")
    return _wrap(backend, bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", pad_token="[EOS]")


def wordpiece():
    """BERT's kind, lower-casing: no newline, no capitals, an unknown token."""
    text = re.findall(r"\w+|[^\w\s]", " ".join(CORPUS).lower())
    chars = sorted({char for word in text for char in word if char.isascii()})
    words = [word for word, _ in Counter(text).most_common(60)]
    ends = [word[i : i + 3] for word in sorted(set(text)) for i in range(1, len(word) - 2, 3)]
    vocab = [*chars, *words, *(f"##{part}" for part in [*chars, *ends]), "[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(vocab))}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _wrap(backend, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]")


TOKENIZERS = {
    maker.__name__: functools.cache(maker)
    for maker in (byte_level, trailing_space, sentencepiece, unigram, characters, wordpiece)
}


def eos_ids(tokenizer) -> list[int]:
    extra = tokenizer.convert_tokens_to_ids("<|eot|>") if "<|eot|>" in tokenizer.get_vocab() else None
    return [tokenizer.eos_token_id] if extra is None else [tokenizer.eos_token_id, extra]


_SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
    initializer_range=0.4,
    tie_word_embeddings=False,
)


def _config(architecture: str, vocab_size: int, max_positions: int):
    small = _SMALL | dict(vocab_size=vocab_size, max_position_embeddings=max_positions)
    grouped = small | dict(num_key_value_heads=2, head_dim=8)
    if architecture == "llama":
        return LlamaForCausalLM, LlamaConfig(**grouped)
    if architecture == "mistral":
        return MistralForCausalLM, MistralConfig(**grouped, sliding_window=7)
    if architecture == "qwen3":
        return Qwen3ForCausalLM, Qwen3Config(**grouped)
    if architecture == "gpt_neox":
        return GPTNeoXForCausalLM, GPTNeoXConfig(**small)
    if architecture == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**grouped, sliding_window=6, layer_types=layers, query_pre_attn_scalar=8)
        return Gemma3ForCausalLM, config
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=max_positions, vocab_size=vocab_size, initializer_range=0.4,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel, config


ARCHITECTURES = ("llama", "mistral", "qwen3", "gpt2", "gpt_neox", "gemma3")


@functools.lru_cache(maxsize=64)
def tiny_model(
    architecture: str = "llama",
    tokenizer: str = "byte_level",
    seed: int = 0,
    peak: float = 3.0,
    max_positions: int = 512,
    attention: str = "sdpa",
):
    """A random model for a tokenizer of `TOKENIZERS`. Do not change it: it is shared between tests."""
    tok = TOKENIZERS[tokenizer]()
    torch.manual_seed(seed)
    cls, config = _config(architecture, len(tok), max_positions)
    config._attn_implementation = attention
    config.bos_token_id, config.pad_token_id, config.eos_token_id = tok.bos_token_id, tok.pad_token_id, eos_ids(tok)
    model = cls(config).eval()
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape) * peak * 0.5)
        head[eos_ids(tok)] *= 1.4
    model.generation_config.eos_token_id = eos_ids(tok)
    return model
