"""Random cases for the oracle: which members, settings and prompts. Everything follows from the case's number."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.confidence.features import feature_names
from hf_adafuse.transformers_compat import execution_device
from support.reference import RefMember, reference_decode
from support.reference_rules import decode_by_rule
from support.tiny import ARCHITECTURES, TOKENIZERS, eos_ids, tiny_model

PROMPTS = [
    "Once upon a time",
    "The capital of France",
    "there was a cat on the tree. The",
    "Question: what is",
    "She",
    "the cat, and there was a big tree in the park.",
    "I'm sure you think so",
]


@dataclass(repr=False)
class Case:
    """One random call: models and tokenizers (main first), settings, prompts, length, places."""

    models: list
    tokenizers: list
    config: AdaFuseConfig
    prompts: list[str]
    max_new_tokens: int
    max_batch_size: int | None = None

    def __repr__(self) -> str:
        members = [f"{type(m).__name__}/{len(t)}" for m, t in zip(self.models, self.tokenizers, strict=True)]
        length, places = self.max_new_tokens, self.max_batch_size
        return f"Case({members}, {self.config}, {self.prompts}, max_new_tokens={length}, max_batch_size={places})"

    def main_ids(self):
        """Left-padded `input_ids` and `attention_mask`."""
        rows = [self.tokenizers[0](prompt).input_ids for prompt in self.prompts]
        width = max(map(len, rows))
        pad = self.tokenizers[0].pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return rows, ids, mask

    def member_prompts(self, row: list[int]) -> list[list[int]]:
        """The prompt of each member: the same ids for the same tokenizer, else decoded and encoded."""
        main = self.tokenizers[0]
        text = main.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [row if tok is main else tok(text).input_ids for tok in self.tokenizers]

    def fast(self, **kwargs):
        """What the package gives."""
        _, ids, mask = self.main_ids()
        main = enable_adafuse(copy.copy(self.models[0]))
        device = execution_device(main)
        return main.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            tokenizer=self.tokenizers[0],
            assistant_models=self.models[1:],
            assistant_tokenizers=self.tokenizers[1:],
            adafuse_config=self.config,
            max_new_tokens=self.max_new_tokens,
            max_batch_size=self.max_batch_size,
            do_sample=False,
            return_dict_in_generate=True,
            **kwargs,
        )

    def ref_members(self, **kwargs) -> list[RefMember]:
        return [
            RefMember(model, tokenizer, eos_ids(tokenizer), **kwargs)
            for model, tokenizer in zip(self.models, self.tokenizers, strict=True)
        ]

    def slow(self):
        """What the oracle gives: per prompt, new ids and the text of each round."""
        members = self.ref_members()
        rows, _, _ = self.main_ids()
        return [reference_decode(members, self.member_prompts(row), self.config, self.max_new_tokens) for row in rows]


def context_of(model) -> int | None:
    """The most tokens that a tiny model reads: rotary positions go on for ever."""
    config = model.config
    return None if getattr(config, "rope_parameters", None) else config.max_position_embeddings


def random_config(rng: random.Random, num_members: int) -> AdaFuseConfig:
    fields = dict(
        margin_threshold=rng.choice([0.0, 0.2, 0.7, 1.1]),
        max_words=rng.randint(1, 4),
        num_branches=rng.randint(1, 5),
        max_word_tokens=rng.choice([1, 3, 6, 32]),
        word_boundary=rng.choice(["whitespace"] * 4 + ["unicode"]),
        model_weights=[rng.uniform(0.2, 2.0) for _ in range(num_members)] if rng.random() < 0.2 else None,
        nll_normalization=rng.choice(["token", "token", "byte"]),
        commitment=rng.choice(["adaptive"] * 5 + ["fixed"]),
        exploration=rng.choice(["diverse"] * 4 + ["beam"]),
    )
    if fields["commitment"] == "fixed":
        del fields["exploration"]  # nothing is explored
    return AdaFuseConfig(**fields)


def random_case(number: int) -> Case:
    """Case `number`: architectures, tokenizers and settings cycle and mix so that every pair occurs."""
    rng = random.Random(number)
    count = 1 + number % 4
    names = list(TOKENIZERS)
    models, tokenizers = [], []
    for k in range(count):
        architecture = ARCHITECTURES[(number // 4 + k * rng.randint(0, 5)) % len(ARCHITECTURES)]
        name = names[(number + k * rng.randint(0, 5)) % len(names)]
        models.append(tiny_model(architecture, name, rng.randint(0, 2), rng.choice([2.0, 4.0])))
        tokenizers.append(TOKENIZERS[name]())
    prompts = rng.sample(PROMPTS, rng.randint(1, 4))
    config, length = random_config(rng, count), rng.randint(6, 16)
    return Case(models, tokenizers, config, prompts, length, rng.choice([None, None, 1, 2, 3]))


def assert_equal(case: Case, slow=None) -> None:
    """Fast equals slow, token for token, in every row; `slow`: what `case.slow()` gave before."""
    output, slow = case.fast(), slow or case.slow()
    width = output.sequences.shape[1]
    rows, ids, _ = case.main_ids()
    for row, (expected, texts) in enumerate(slow):
        got = output.sequences[row, ids.shape[1] :].tolist()
        pad = got[len(expected) :]
        assert got[: len(expected)] == expected, f"row {row} of {case}: {got} is not {expected}"
        assert all(token == case.tokenizers[0].pad_token_id for token in pad), f"row {row} goes on: {got}, {expected}"
        spans = [committed.text for committed in output.rounds[row]]
        assert spans[:-1] == texts[: len(spans)][:-1], f"row {row}: rounds {spans} are not {texts}"
    assert width > 0


def assert_equals_the_rule(case: Case) -> None:
    """As `assert_equal`, by the oracle of all rules."""
    members, (rows, ids, _) = case.ref_members(), case.main_ids()
    sequences = case.fast().sequences
    for row, prompt in enumerate(rows):
        expected, _ = decode_by_rule(members, case.member_prompts(prompt), case.config, case.max_new_tokens)
        assert sequences[row, ids.shape[1] :][: len(expected)].tolist() == expected, f"row {row} of {case}"


def counts(output) -> list[tuple[int, int]]:
    """Per member, its forward passes and the tokens it has run."""
    return [(member["forward_passes"], member["tokens_run"]) for member in output.stats["members"]]


def random_calibration(number, num_members):
    """What a fit may give, of random numbers."""
    rng, width = random.Random(number), len(feature_names(num_members))

    def row(count, spread=1.0, centre=0.0):
        return [rng.gauss(centre, spread) for _ in range(count)]

    return {
        "version": 1,
        "num_candidates": num_members,
        "num_features": width,
        "centres": row(width),
        "prompt_spreads": [rng.uniform(0.5, 2.0) for _ in range(width)],
        "own_spreads": [rng.uniform(0.5, 2.0) for _ in range(width)],
        "own": row(width, 0.5),
        "prompt": row(width, 0.3),
        "places": row(num_members),
        "products": [row(width, 0.2) for _ in range(num_members)],
        "intercept": rng.gauss(0, 1),
    }
