"""Stopping an ordinary `generate()` at the end of a word, or at an uncertain one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import StoppingCriteria

from .config import AdaFuseConfig
from .decoding.scoring import margin
from .decoding.word_splitter import WordSplitter, word_starts
from .logits_process import check_prompt_length
from .members.node_logprobs import best_tokens
from .members.vocabulary import vocabulary_of


class _WordReader:
    """Rows of new ids as words, `max_words` of each."""

    def __init__(self, tokenizer: Any, prompt_length: int, config: AdaFuseConfig, eos_token_id: Any) -> None:
        self.prompt_length = check_prompt_length(prompt_length)
        self.max_words = config.max_words
        self.splitter = WordSplitter(config.max_word_tokens, config.word_boundary)
        self.vocabulary = vocabulary_of(tokenizer)
        given = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        self.eos_ids = frozenset([] if given is None else torch.as_tensor(given, device="cpu").flatten().tolist())

    def read(self, input_ids: torch.Tensor) -> list[tuple[list[int], list[int]]]:
        """Per row, its new ids and where its words start (`word_starts`): the last start ends the complete words."""
        rows = map(self._until_end, input_ids[:, self.prompt_length :].tolist())
        return [(row, self._starts(row)) for row in rows]

    def _until_end(self, ids: list[int]) -> list[int]:
        # What comes after the first end of sequence is padding.
        return ids[: next((index for index, token in enumerate(ids, start=1) if token in self.eos_ids), len(ids))]

    def _starts(self, ids: list[int]) -> list[int]:
        pieces = [None if token in self.eos_ids else self.vocabulary.piece(token) for token in ids]
        return word_starts(pieces, self.splitter)[: self.max_words + 1]


class WordBoundaryCriteria(StoppingCriteria):
    """
    [`StoppingCriteria`] that stops a row when `max_words` words are complete, or the sequence ends.

    A word is optional leading whitespace and then a maximal run of non-whitespace, so that its end often shows only in
    the token after it. That token is then in the row: `word_ids` gives the words without it. An end-of-sequence token
    is a word of its own. With `max_words=1`, a row stops at the last token of these:

    - [" Par", "is", " is"]: the word is " Paris"
    - ["\\n\\n", "The", "\\n"]: the word is "\\n\\nThe"
    - [" Paris", "</s>"]: the word is " Paris"
    - ["</s>"]: the word is the end of the sequence
    - ["there was a "]: the word is all of it, since a token is never cut; its own last space closes it
    - [" ab", "ab", "ab"] with `max_word_tokens=3`: long enough

    and goes on after these:

    - [" Par", "is"]: the word may go on
    - [" Paris", "."]: it does go on
    - [" "], ["\\n\\n"]: nothing visible yet
    - [" ab", "ab", "\\xe2"] with `max_word_tokens=3`: never cut inside a UTF-8 character

    Each row is judged by its own new ids alone, up to its first end-of-sequence id. Once stopped it stays stopped.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        prompt_length (`int`): tokens in each row before the first new one, padding included: `input_ids.shape[1]`.
        max_words (`int`, *optional*, defaults to 1): how many words to complete.
        max_word_tokens (`int`, *optional*, defaults to 32): a word also ends at this many tokens.
        word_boundary (`str`, *optional*, defaults to `"whitespace"`): or `"unicode"`, the segmentation of UAX #29.
        eos_token_id (`int` or `list[int]`, *optional*): the end-of-sequence ids; the tokenizer's when not given. Pass
            `model.generation_config.eos_token_id` where a model has several.

    Raises:
        ValueError: an argument is out of its range.
        ImportError: `word_boundary="unicode"` without the library that segments.

    Examples:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from hf_adafuse import WordBoundaryCriteria
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B-Base")
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B-Base")
    >>> inputs = tokenizer(["The capital of France is"], return_tensors="pt")
    >>> two_words = WordBoundaryCriteria(tokenizer, inputs.input_ids.shape[1], max_words=2)
    >>> ids = model.generate(**inputs, stopping_criteria=[two_words], do_sample=False, max_new_tokens=64)
    >>> words = two_words.words(ids)
    ```
    """

    is_function_of_ids = True

    def __init__(
        self,
        tokenizer: Any,
        prompt_length: int,
        max_words: int = 1,
        max_word_tokens: int = 32,
        word_boundary: str = "whitespace",
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        config = AdaFuseConfig(max_words=max_words, max_word_tokens=max_word_tokens, word_boundary=word_boundary)
        self._reader = _WordReader(tokenizer, prompt_length, config, eos_token_id)

    def __call__(self, input_ids: torch.Tensor, scores: Any = None, **kwargs: Any) -> torch.Tensor:
        """
        Which rows of `input_ids` (`torch.LongTensor` of shape `(batch_size, sequence_length)`) stop, as a
        `torch.BoolTensor` of shape `(batch_size,)`. `scores` are not used.
        """
        reader = self._reader
        rows = reader.read(input_ids)
        stopped = [len(starts) > reader.max_words or not reader.eos_ids.isdisjoint(ids) for ids, starts in rows]
        return torch.tensor(stopped, dtype=torch.bool, device=input_ids.device)

    def word_ids(self, input_ids: torch.Tensor) -> list[list[int]]:
        """
        Per row, the ids of its complete words, `max_words` at most: no look-ahead token, no padding. The last is an
        end-of-sequence id where the end of the sequence is one of the words.
        """
        return [ids[: starts[-1]] for ids, starts in self._reader.read(input_ids)]

    def words(self, input_ids: torch.Tensor) -> list[list[str]]:
        """Per row, the text of these words, leading whitespace and all; the end of the sequence has none."""
        text, eos_ids = self._reader.vocabulary.text, self._reader.eos_ids
        return [
            [text(ids[a:b]) for a, b in pairwise(starts) if ids[a] not in eos_ids]
            for ids, starts in self._reader.read(input_ids)
        ]


class MarginCriteria(StoppingCriteria):
    """
    [`StoppingCriteria`] that stops a row at its first uncertain word (AdaFuse, arXiv 2601.06022, section 3.2): when the
    token just chosen begins a word, and p(1) - p(2) of the distribution it was chosen from is below the threshold.

    The first token of the uncertain word is then in the row; `confident_ids` gives what came before it. With
    `margin_threshold=0.7`, a row stops at the last token of these (margins in brackets):

    - [" Paris" (0.1)]
    - [" Par" (0.9), "is" (0.1), " is" (0.6)]: "is" begins no word, its margin does not count
    - [" Paris" (0.9), "</s>" (0.2)]: the end of the sequence is a word

    and goes on after these:

    - [" Par" (0.7), "is" (0.1)]
    - [" Paris" (0.9), " is" (0.6)] with `max_words=1`: the second word is not judged

    It reads `scores`: pass `return_dict_in_generate=True, output_scores=True` to `generate()`. The margin is that of
    the processed scores: when sampling, of the warped distribution. Not for beam search, which reorders its rows. Each
    row is judged alone, up to its first end-of-sequence id. Once stopped it stays stopped.

    Args:
        tokenizer, prompt_length, max_word_tokens, word_boundary, eos_token_id: as in [`WordBoundaryCriteria`].
        margin_threshold (`float`, *optional*, defaults to 0.7): tau. 0 never stops, a value above 1 always does.
        max_words (`int`, *optional*): words after this many are not judged. Beside a [`WordBoundaryCriteria`] give both
            the same, since the look-ahead token begins a word outside the span. All are judged when not given.

    Raises:
        ValueError, ImportError: as there, and when called without `scores`, or with other than one per new token.

    Examples:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from hf_adafuse import BranchLogitsProcessor, MarginCriteria, WordBoundaryCriteria
    >>> tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B-Base")
    >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B-Base")
    >>> prompt = tokenizer("The capital of France", return_tensors="pt").input_ids

    >>> # 1. Greedy words while they are confident, three at most
    >>> eos = model.generation_config.eos_token_id
    >>> boundary = WordBoundaryCriteria(tokenizer, prompt.shape[1], max_words=3, eos_token_id=eos)
    >>> confidence = MarginCriteria(tokenizer, prompt.shape[1], 0.7, max_words=3, eos_token_id=eos)
    >>> out = model.generate(
    ...     prompt, stopping_criteria=[boundary, confidence], do_sample=False, max_new_tokens=128,
    ...     return_dict_in_generate=True, output_scores=True,
    ... )
    >>> span = confidence.confident_ids(out.sequences, out.scores)[0]
    >>> is_uncertain = confidence(out.sequences, out.scores)[0]
    >>> # 2. At an uncertain word, three branches, each to the end of that word
    >>> start = prompt.new_tensor([prompt[0].tolist() + span] * 3)
    >>> branches = BranchLogitsProcessor(start.shape[1], [0, 1, 2])
    >>> one_word = WordBoundaryCriteria(tokenizer, start.shape[1], eos_token_id=eos)
    >>> ids = model.generate(
    ...     start, logits_processor=[branches], stopping_criteria=[one_word], do_sample=False, max_new_tokens=64,
    ... )
    >>> candidates = [span + word for word in one_word.word_ids(ids)] if is_uncertain else [span]
    ```
    """

    is_function_of_ids = True

    def __init__(
        self,
        tokenizer: Any,
        prompt_length: int,
        margin_threshold: float = 0.7,
        max_words: int | None = None,
        max_word_tokens: int = 32,
        word_boundary: str = "whitespace",
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        self.margin_threshold = margin_threshold
        max_words = sys.maxsize if max_words is None else max_words
        config = AdaFuseConfig(margin_threshold, max_words, 1, max_word_tokens, word_boundary)
        self._reader = _WordReader(tokenizer, prompt_length, config, eos_token_id)

    def __call__(self, input_ids: torch.Tensor, scores: Sequence[torch.Tensor] | None, **kwargs: Any) -> torch.Tensor:
        """
        Which rows of `input_ids` (`torch.LongTensor` of shape `(batch_size, sequence_length)`) stop, as a
        `torch.BoolTensor` of shape `(batch_size,)`. `scores` holds, per new token, the logits or log-probabilities it
        was chosen by, each of shape `(batch_size, vocab_size)`.
        """
        uncertain = [is_uncertain for _, is_uncertain in self._selector(input_ids, scores)]
        return torch.tensor(uncertain, dtype=torch.bool, device=input_ids.device)

    def confident_ids(self, input_ids: torch.Tensor, scores: Sequence[torch.Tensor] | None) -> list[list[int]]:
        """Per row, the ids of its complete words before the first uncertain one, `max_words` at most."""
        return [ids for ids, _ in self._selector(input_ids, scores)]

    def _selector(self, input_ids: torch.Tensor, scores: Sequence[torch.Tensor] | None) -> list[tuple[list[int], bool]]:
        """Per row: its confident words, and whether an uncertain one follows them."""
        scores = self._check_scores(scores, input_ids.shape[1])
        judged = []
        for row, (ids, starts) in enumerate(self._reader.read(input_ids)):
            begun = (start for start in starts[: self._reader.max_words] if start < len(ids))
            uncertain = next((start for start in begun if self._is_uncertain(scores[start][row])), None)
            judged.append((ids[: starts[-1] if uncertain is None else uncertain], uncertain is not None))
        return judged

    def _is_uncertain(self, scores: torch.Tensor) -> bool:
        scores = scores.float()  # as a member reads them
        values, _ = best_tokens(scores[None], 2)
        return margin((values[0] - scores.logsumexp(-1)).tolist()) < self.margin_threshold

    def _check_scores(self, scores: Sequence[torch.Tensor] | None, length: int) -> Sequence[torch.Tensor]:
        if scores is None:
            raise ValueError(
                "`scores` must be a tuple of one tensor per new token, but is None. Pass "
                "`return_dict_in_generate=True, output_scores=True` to generate()."
            )
        if len(scores) != max(length - self._reader.prompt_length, 0):
            raise ValueError(
                f"`prompt_length` must be {length - len(scores)} for {length} ids and {len(scores)} `scores`, but is "
                f"{self._reader.prompt_length}. Use the width of the ids given to generate(), padding included."
            )
        return scores
