"""Tiny members in folders, flags of the command line that name them, and what `generate()` gives for those."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_adafuse import AdaFuseConfig, enable_adafuse

SENTENCES = [
    "Once upon a time there was a little cat.",
    "The cat sat on the tree, and the tree was big.",
    "She said: what a time to sit in a tree!",
    "abcdef was a cat, abcdef and the tree.",
]
PROMPT = "Once upon a time"
SHORT = ["--preset", "paper", "--max-new-tokens", "20", "--max-word-tokens", "6"]  # random models make long words
CONFIG = AdaFuseConfig(max_word_tokens=6)


def byte_level_tokenizer(alphabet=()):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=len(alphabet) + 90, special_tokens=["</s>"], initial_alphabet=list(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def metaspace_tokenizer():
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(vocab_size=70, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def save_member(folder: Path, tokenizer, seed: int) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)  # sharp enough for margins on both sides of the threshold
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def flags(pair, *more):
    return ["generate", "--model", pair[0], "--assistant", pair[1], *SHORT, *more]


def expected(pair, config=CONFIG, **kwargs):
    """The continuation and the rounds that `generate()` gives, decoded with nothing but the tokenizer."""
    model = enable_adafuse(AutoModelForCausalLM.from_pretrained(pair[0]))
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    kwargs = {"max_new_tokens": 20, "assistant_models": pair[1:], "return_dict_in_generate": True, **kwargs}
    output = model.generate(**inputs, tokenizer=tokenizer, adafuse_config=config, **kwargs)
    whole = tokenizer.decode(output.sequences[0], skip_special_tokens=True)
    before = tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
    assert whole.startswith(before)
    return whole[len(before) :], output.rounds[0]
