"""Requests of the harness, and ensembles of tiny models with different tokenizers to put them to."""

from __future__ import annotations

import copy

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse.lab.evaluation.language_model import AdaFuseLM

KINDS = [("llama", "byte_level"), ("gpt2", "characters"), ("gemma3", "sentencepiece"), ("qwen3", "unigram")]
PAIRS = [
    ("Once upon a time", " there was a little girl"),
    ("The capital of France is", " Paris"),
    ("Question: what is 3.14 times 2?\nAnswer:", " 6.28"),
    ("There was a cat ", "on the tree, and there was a cat on the tree."),
    ("", "Once upon a time"),
    ("She loved to play outside in the sunshine. There was a big tree in the park", "!"),
]
CONTEXTS = ["Once upon a time", "The capital of France is", "There was a big tree", "She", "I'm sure she's there. Lily"]


def request(kind, *arguments, number=0, task="task"):
    return Instance(kind, {}, arguments, 0, (task, number, 1))


def requests(kind, all_arguments, task="task"):
    return [request(kind, *arguments, number=number, task=task) for number, arguments in enumerate(all_arguments)]


def members(*kinds):
    return [(copy.copy(tiny_model(architecture, kind)), TOKENIZERS[kind]()) for architecture, kind in kinds]


def ensemble(kinds, config=None, **options):
    (main, tokenizer), *others = members(*kinds)
    return AdaFuseLM(
        main,
        [model for model, _ in others],
        tokenizer,
        [tok for _, tok in others],
        adafuse_config=config,
        progress=False,
        **options,
    )


def harness_model(architecture, kind, **options):
    """A member as the harness itself runs it."""
    return HFLM(pretrained=tiny_model(architecture, kind), tokenizer=TOKENIZERS[kind](), device="cpu", **options)
