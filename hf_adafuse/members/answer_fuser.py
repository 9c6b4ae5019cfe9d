"""GenFuser (LLM-Blender, arXiv 2306.02561): a sequence-to-sequence model that writes one answer from several. The
method `blender` calls it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

# As released, in tokens of the fuser: the most that it reads, the most of each answer in that, and the most it writes.
MAX_LENGTH = 1024
CANDIDATE_MAXLENGTH = 128
MAX_NEW_TOKENS = 128
NUM_BEAMS = 4
_SEPARATOR = "</s>"
_REQUEST = "Summarize candidates into a better one for the given instruction:"
_SPECIAL = re.compile(r"</s>|<extra_id_\d+>")


class AnswerFuser:
    """
    Writes an answer of several.

    Args:
        model (`PreTrainedModel`): a sequence-to-sequence model.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def __call__(self, source: str, candidates: Sequence[str]) -> str:
        """
        The answer, by beam search.

        Args:
            source (`str`): the prompt. One that leaves no room for the answers is cut at its beginning; the released
                code cuts all at the end, answers and request.
            candidates (`list[str]`): the answers, best first.
        """
        ids = torch.tensor([self._read(source, candidates)], device=self._model.device)
        written = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=NUM_BEAMS,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        return str(self._tokenizer.decode(written[0], skip_special_tokens=True))

    def _read(self, source: str, candidates: Sequence[str]) -> list[int]:
        """The ids of what it reads."""
        source = _SPECIAL.sub(" ", source)
        shortened = [self._shortened(_SPECIAL.sub(" ", candidate)) for candidate in candidates]
        ids = self._encode(fuser_input(source, shortened))
        of_source = self._encode(source)
        while len(ids) > MAX_LENGTH and of_source:
            of_source = of_source[len(ids) - MAX_LENGTH :]
            ids = self._encode(fuser_input(self._tokenizer.decode(of_source), shortened))
        return ids[:MAX_LENGTH]

    def _shortened(self, candidate: str) -> str:
        ids = self._encode(candidate)
        if len(ids) <= CANDIDATE_MAXLENGTH:
            return candidate
        return f"{self._tokenizer.decode(ids[:CANDIDATE_MAXLENGTH])}..."

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def fuser_input(source: str, candidates: Sequence[str]) -> str:
    """What GenFuser was trained to read. The prompt is its input, and no instruction stands before it."""
    shown = [f"Candidate {index}: <extra_id_{index}>:{text}" for index, text in enumerate(candidates)]
    return _SEPARATOR.join(["Instruction: ", f"Input: {source}", *shown, _REQUEST])


@functools.cache
def load_answer_fuser(name: str, device: torch.device) -> AnswerFuser:
    """
    A fuser by its name, loaded once per process.

    Args:
        name (`str`): a Hub name or a folder of a sequence-to-sequence model, such as `llm-blender/gen_fuser_3b`.
        device (`torch.device`): where it runs.

    Raises:
        ValueError: it does not load, or is no such model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="auto")
    except Exception as error:  # files can be broken in many ways
        raise ValueError(
            f"`fuser` must be None, or the Hub name or a folder of a sequence-to-sequence model, but {name!r} does not "
            f"load ({type(error).__name__}: {error}). Check the name."
        ) from error
    return AnswerFuser(model.eval().to(device), tokenizer)
