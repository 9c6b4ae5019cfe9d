"""Ensembles by the names of their members, and the oracle for them: for tests of what `generate()` offers."""

from __future__ import annotations

import copy
import functools

import torch
from transformers import LogitsProcessor

from hf_adafuse import AdaFuseConfig, AdaFuseOutput
from support.cases import Case
from support.reference import reference_decode
from support.tiny import TOKENIZERS, tiny_model

PROMPTS = ("Once upon a time", "there was a cat on the tree. The")
LONG = (
    "Two foxes jump over 17 lazy dogs, again, and then he sat.",
    "My old green bus is big, but Zoe ran home before 9.",
)
TWO = ("llama/byte_level/0", "qwen3/sentencepiece/1")
PAD_IS_EOS = ("qwen3/sentencepiece/2", "gpt2/byte_level/1")
CHARACTERS = ("mistral/characters/0", "llama/byte_level/2", "gpt2/sentencepiece/0")


def ensemble(*members: str, prompts=PROMPTS, n=12, max_word_tokens=4, **config) -> Case:
    """A case of members named architecture/tokenizer/seed, main first. Words are short, so that rounds are many."""
    models, tokenizers = [], []
    for member in members:
        architecture, tokenizer, seed = member.split("/")
        models.append(tiny_model(architecture, tokenizer, int(seed)))
        tokenizers.append(TOKENIZERS[tokenizer]())
    return Case(models, tokenizers, AdaFuseConfig(max_word_tokens=max_word_tokens, **config), list(prompts), n)


def new_ids(case: Case, output: AdaFuseOutput) -> list[list[int]]:
    """Per row, its new ids; behind them there is nothing but padding."""
    width, rows = case.main_ids()[1].shape[1], []
    for sequence, rounds in zip(output.sequences.tolist(), output.rounds, strict=True):
        end = width + sum(committed.num_tokens for committed in rounds)
        assert set(sequence[end:]) <= {case.tokenizers[0].pad_token_id}
        rows.append(sequence[width:end])
    return rows


def oracle(case: Case, process=lambda row, member, prompt: None, main_eos=None) -> list[list[int]]:
    """Per row, the new ids by the oracle; `process(row, member, prompt ids)` gives a member's processor."""
    rows = []
    for index, row in enumerate(case.main_ids()[0]):
        prompts, members = case.member_prompts(row), case.ref_members()
        members[0].eos = main_eos or members[0].eos
        for k, member in enumerate(members):
            member.process = process(index, k, prompts[k])
        rows.append(reference_decode(members, prompts, case.config, case.max_new_tokens)[0])
    return rows


@functools.cache
def plain(members: tuple[str, ...]) -> list[list[int]]:
    """The oracle's new ids without any processor."""
    return oracle(ensemble(*members, n=8))


def eager_to_end(case: Case) -> Case:
    """The same members, whose end of sequence is nearly certain after anything."""
    case.models = [copy.deepcopy(model) for model in case.models]
    for model, tokenizer in zip(case.models, case.tokenizers, strict=True):
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.zeros(head.weight.shape[0]))
        head.bias.data[tokenizer.eos_token_id] = 1e3
    return case


class Forbid(LogitsProcessor):
    is_function_of_ids = True

    def __init__(self, ids):
        self.ids, self.seen = sorted(ids), []

    def __call__(self, input_ids, scores):
        self.seen += input_ids.tolist()
        scores = scores.clone()
        scores[:, self.ids] = -torch.inf
        return scores
