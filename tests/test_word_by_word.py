"""Word-by-word proposing with nothing but `generate()` and the criteria gives the candidates that the decoder gives."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from support.tiny import TOKENIZERS, eos_ids, tiny_model

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.logits_process import BranchLogitsProcessor
from hf_adafuse.stopping_criteria import MarginCriteria, WordBoundaryCriteria


@dataclass
class ByGenerate:
    """Proposes as the paper says (sections 3.2 and 3.3), by two calls of `generate()` for a whole batch of prefixes."""

    model: object
    tokenizer: object
    config: AdaFuseConfig

    def propose(self, prefixes: list[list[int]]) -> list[list[tuple[list[str], bool]]]:
        """Per prefix, its candidates: their words, and whether they end the sequence; equal ones once."""
        spans, uncertain = self._confident(prefixes)
        starts = [prefix + span for prefix, span in zip(prefixes, spans, strict=True)]
        tails = iter(self._branches([start for start, branch in zip(starts, uncertain, strict=True) if branch]))
        candidates = []
        for span, branch in zip(spans, uncertain, strict=True):
            rows = [span + tail for tail in next(tails)] if branch else [span]
            texts = [(self._text(ids), ids[-1] in self._rule["eos_token_id"]) for ids in rows]
            candidates.append(list(dict.fromkeys(texts)))
        return candidates

    def _confident(self, prefixes):
        """Greedy words while they are confident; then whether an uncertain one follows."""
        inputs, length = self._left_padded(prefixes), max(map(len, prefixes))
        words = self.config.max_words
        boundary = WordBoundaryCriteria(self.tokenizer, length, max_words=words, **self._rule)
        margin = MarginCriteria(self.tokenizer, length, self.config.margin_threshold, max_words=words, **self._rule)
        out = self._generate(
            **inputs, stopping_criteria=[boundary, margin], return_dict_in_generate=True, output_scores=True
        )
        uncertain, spans = margin(out.sequences, out.scores), margin.confident_ids(out.sequences, out.scores)
        assert (uncertain | boundary(out.sequences)).all()  # every row stopped by one of them
        complete = boundary.word_ids(out.sequences)
        assert all(uncertain[row] or complete[row] == span for row, span in enumerate(spans))
        return spans, uncertain.tolist()

    def _branches(self, starts):
        """Per start, one word for each of its `num_branches` best first tokens."""
        if not starts:
            return []
        count = self.config.num_branches
        inputs, length = self._left_padded([start for start in starts for _ in range(count)]), max(map(len, starts))
        boundary = WordBoundaryCriteria(self.tokenizer, length, **self._rule)
        branches = BranchLogitsProcessor(length, [*range(count)] * len(starts))
        words = boundary.word_ids(self._generate(**inputs, logits_processor=[branches], stopping_criteria=[boundary]))
        return [words[row : row + count] for row in range(0, len(words), count)]

    @property
    def _rule(self):
        return {"max_word_tokens": self.config.max_word_tokens, "eos_token_id": eos_ids(self.tokenizer)}

    def _generate(self, **kwargs):
        return self.model.generate(**kwargs, do_sample=False, max_new_tokens=120)

    def _left_padded(self, rows):
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": mask}

    def _text(self, ids):
        # A tokenizer's decode strips the first space of a text: read the span behind something.
        ahead = self.tokenizer("a", add_special_tokens=False).input_ids
        whole = self.tokenizer.decode([*ahead, *ids], skip_special_tokens=True)
        return whole[len(self.tokenizer.decode(ahead)) :]


def _decode(model, tokenizer, config, prompt, max_new_tokens):
    """The decoder's rounds, and the main ids that each of them started from."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = enable_adafuse(copy.copy(model)).generate(
        **inputs,
        tokenizer=tokenizer,
        adafuse_config=config,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
    )
    rounds, ids = out.rounds[0], out.sequences[0].tolist()
    ends = [inputs.input_ids.shape[1]]
    for committed in rounds:
        ends.append(ends[-1] + committed.num_tokens)
    return rounds, [ids[:end] for end in ends[:-1]]


SETTINGS = [(tau, words, branches) for tau in (0, 0.2, 0.7, 1.1) for words in (1, 2, 3) for branches in (1, 2, 3, 4)]
PROMPTS = ["there was a cat on the tree. The", "She", "The capital of France"]


@pytest.mark.parametrize(
    ("kind", "every", "length"), [("byte_level", 3, 12), ("trailing_space", 7, 20), ("sentencepiece", 7, 20)]
)
def test_generate_proposes_what_the_decoder_proposes(kind, every, length):
    tokenizer = TOKENIZERS[kind]()
    num_branched = num_late = num_ends = 0
    for number, (tau, words, branches) in list(enumerate(SETTINGS))[::every]:
        model = tiny_model(tokenizer=kind, seed=number % 5)
        config = AdaFuseConfig(margin_threshold=tau, max_words=words, num_branches=branches, max_word_tokens=8)
        rounds, prefixes = _decode(model, tokenizer, config, PROMPTS[number % 3], length)
        expected = [[(candidate.text, candidate.ends) for candidate in committed.candidates] for committed in rounds]
        assert ByGenerate(model, tokenizer, config).propose(prefixes) == expected, (number, tau, words, branches)
        num_branched += sum(len(candidates) > 1 for candidates in expected)
        num_late += sum(len(c.candidates) > 1 and len(c.margins[0]) > 1 for c in rounds)
        num_ends += sum(ends for candidates in expected for _, ends in candidates)
    # enough of each: branches, branches after confident words, ends of sequence
    assert min(num_branched / 4, num_late, num_ends) >= 1, (num_branched, num_late, num_ends)


def test_generate_proposes_for_a_batch_what_it_proposes_for_each_row():
    tokenizer, model = TOKENIZERS["byte_level"](), tiny_model(seed=3)
    propose = ByGenerate(model, tokenizer, AdaFuseConfig(num_branches=2, max_word_tokens=8)).propose
    rows = [tokenizer(prompt).input_ids for prompt in [*PROMPTS, "Question: what is", "cat"]]
    assert propose(rows) == [propose([row])[0] for row in rows]


@pytest.mark.parametrize("seed", range(4))
def test_adafuse_itself_obeys_the_criteria(seed):
    """One member without branching gives its greedy text: the criteria stop it where they stop greedy search."""
    tokenizer, model = TOKENIZERS["byte_level"](), tiny_model(seed=seed)
    inputs = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    length, eos = inputs.input_ids.shape[1], eos_ids(tokenizer)
    for criterion in (
        WordBoundaryCriteria(tokenizer, length, max_words=4, eos_token_id=eos),
        MarginCriteria(tokenizer, length, margin_threshold=0.5, eos_token_id=eos),
    ):
        arguments = dict(**inputs, stopping_criteria=[criterion], max_new_tokens=30, do_sample=False)
        arguments |= dict(return_dict_in_generate=True, output_scores=True)
        greedy = model.generate(**arguments)
        ours = enable_adafuse(copy.copy(model)).generate(
            **arguments, tokenizer=tokenizer, adafuse_config=AdaFuseConfig(num_branches=1, max_words=3)
        )
        assert ours.sequences.tolist() == greedy.sequences.tolist()
        assert criterion(ours.sequences, ours.scores).tolist() == criterion(greedy.sequences, greedy.scores).tolist()
