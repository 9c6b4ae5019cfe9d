"""`AdaFuseLM`: an ensemble, or a member alone, as the model type `adafuse` of lm-evaluation-harness.

```python
>>> import lm_eval
>>> from hf_adafuse.demo import load_pair
>>> from hf_adafuse.lab.evaluation.language_model import AdaFuseLM

>>> (model, tokenizer), (other, other_tokenizer) = load_pair()
>>> options = {"assistants": [other], "tokenizer": tokenizer, "assistant_tokenizers": [other_tokenizer]}
>>> lm = AdaFuseLM(model, **options, method="words")  # then: lm_eval.simple_evaluate(model=lm, tasks=[...])

```
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import StopStringCriteria

from ...call.answering import BATCHES_A_CALL
from ...call.arguments import EnsembleSpec
from ...confidence.answer_text import cut_at
from ...config import AdaFuseConfig
from ...ensemble import AdaFuseEnsemble
from ...members.mistral_tokenizers import fast_interface
from ...members.prompt_inputs import pad_left
from ...outputs import AdaFuseRound
from ...rounds.plain_json import with_nulls
from ...trees.shared_prefix import prefix_caching
from .batches import batches, told_apart
from .contexts import chat_context, prompt_rows
from .costs import CallOfMany, Cost, total
from .ensemble_scores import EnsembleScorer
from .model_arguments import generation_options, members_of, read_batch_size, settings_of
from .responses import Responses

Rounds = list[dict[str, Any]]  # the rounds of an answer, each as plain JSON values

# The settings with which one member writes the text of its ordinary greedy `generate()`, in rounds.
ALONE = AdaFuseConfig(commitment="fixed")


@register_model("adafuse")
class AdaFuseLM(LM):
    """
    An ensemble as the harness sees it.

    Args:
        pretrained (`PreTrainedModel` or `str`): the main model, or its name.
        assistants (`list` or `str`, *optional*): the other models or their names, as in
            `generate(assistant_models=...)`. Names may also be one text, with `+` between them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), assistant_tokenizers (`list`, *optional*): the tokenizers. By
            default they are found by the models' names.
        adafuse_config (`AdaFuseConfig`, `dict`, `str` or `bool`, *optional*): the settings, also as JSON or as the name
            of a JSON file. `False`, without assistants: the main model alone writes its own greedy text.
        batch_size (`int`, *optional*, defaults to 8): how many requests are asked at a time.
        max_gen_toks (`int`, *optional*, defaults to 256): the most new tokens of an answer, where a task does not say.
        dtype, device_map, device, trust_remote_code (*optional*): how models are loaded by their names.
        responses (`Responses`, *optional*): responses that are known already. They are not asked again.
        progress (`bool`, *optional*): whether to show a bar on standard error. By default where that is a terminal.
        label (`str`, *optional*): what stands in front of the bar.
        settings: fields of `AdaFuseConfig`, which change `adafuse_config`.

    Attributes:
        cost (`Cost`): the cost of the answers so far, including those that were known.
        rounds (`dict`): the rounds of each answer as plain JSON values, by the name of the task and the number of the
            question.

    Raises:
        ValueError: the members do not go together, or the settings cannot be honoured.
    """

    def __init__(
        self,
        pretrained: Any,
        assistants: Any = None,
        tokenizer: Any = None,
        assistant_tokenizers: Sequence[Any] | None = None,
        adafuse_config: Any = None,
        batch_size: int | str | None = None,
        max_gen_toks: int = 256,
        responses: Responses | None = None,
        progress: bool | None = None,
        label: str = "adafuse",
        dtype: str = "auto",
        device: str | None = None,
        device_map: str | None = None,
        trust_remote_code: bool = False,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        loading = (dtype, device_map or device, trust_remote_code)
        members = members_of(pretrained, assistants, tokenizer, assistant_tokenizers, loading)
        self.config = settings_of(adafuse_config, settings, members[0][0], len(members)) or ALONE
        self._ensemble = AdaFuseEnsemble(members, self.config)
        self.handles = EnsembleSpec(self._ensemble.handles, self.config).handles
        self._scorer = EnsembleScorer(self.handles, self.config)
        self._tokenizers = [handle.tokenizer for handle in self.handles]
        self._device = self.handles[0].device
        self._batch_size = read_batch_size(batch_size)
        self._max_gen_toks = max_gen_toks
        self._responses = Responses() if responses is None else responses
        self._shows = sys.stderr.isatty() if progress is None else progress
        self._label = label
        self._writable: dict[str, bool] = {}
        self.cost = Cost()
        self.rounds: dict[tuple[str | None, int | None], Rounds] = {}

    # What the harness asks

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers to requests, each without its stop text."""
        with self._bar("generate_until", len(requests), disable_tqdm) as bar, prefix_caching():
            for batch in self._batches(requests, "generate_until", bar):
                for handle in self.handles:
                    handle.tested_backend()  # the first time by a self-test, which is not a cost of the answers
                self._answer(batch, bar)
        found = [self._responses.get("generate_until", arguments) for arguments in self._told_apart(requests)]
        for request, (_, rounds, *_) in zip(requests, found, strict=True):
            self.rounds[request.task_name, request.doc_id] = rounds
        # Equal requests share one answer, which has one cost.
        answers = {id(answer): answer for answer in found}.values()
        self.cost = total([asdict(self.cost), *(cost for _, _, *costs in answers for cost in costs)])
        return [text for text, *_ in found]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihoods of continuations, and whether the ensemble would write them, as of
        [`EnsembleScorer.pairs`]."""
        found = self._score(requests, "loglikelihood", self._scorer.pairs, disable_tqdm)
        return [(value, is_greedy) for value, is_greedy in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, as of [`EnsembleScorer.texts`]."""

        def score(arguments: Sequence[Any]) -> list[float]:
            return self._scorer.texts([text for (text,) in arguments])

        return self._score(requests, "loglikelihood_rolling", score, disable_tqdm)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as a string. Each member's own template renders them later."""
        return chat_context(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The members' chat templates as one text, for the harness's records."""
        return "\n\n".join(str(fast_interface(tokenizer).chat_template or "") for tokenizer in self._tokenizers)

    @property
    def tokenizer_name(self) -> str:
        """The names of all members' tokenizers, joined by `+`."""
        return "+".join(str(tokenizer.name_or_path).replace("/", "__") for tokenizer in self._tokenizers)

    # How it is done

    def _answer(self, batch: Sequence[Any], bar: Any) -> None:
        """Answer requests of one task in one call. Each answer is kept as soon as it is there."""

        def keep(row: int, answer: tuple[Any, ...]) -> None:
            self._responses.add("generate_until", batch[row], answer)
            self.cache_hook.add_partial("generate_until", batch[row][:2], answer[0])
            bar.update(1)

        call = CallOfMany(len(batch), keep)
        call.end(self._generate([arguments[0] for arguments in batch], batch[0][1], call.tell))

    def _score(
        self, requests: Sequence[Any], kind: str, score: Callable[[Any], list[Any]], is_quiet: bool
    ) -> list[Any]:
        with self._bar(kind, len(requests), is_quiet) as bar:
            for batch in self._batches(requests, kind, bar):
                for arguments, value in zip(batch, score(batch), strict=True):
                    self._responses.add(kind, arguments, value)
                    self.cache_hook.add_partial(kind, arguments, value)
                bar.update(len(batch))
        return [self._responses.get(kind, request.args) for request in requests]

    def _told_apart(self, requests: Sequence[Any]) -> list[tuple[Any, ...]]:
        return told_apart(requests, self.config.do_sample, self._max_gen_toks)

    def _batches(self, requests: Sequence[Any], kind: str, bar: Any) -> list[list[Any]]:
        """The arguments of the requests without a response, in batches. A batch of texts is of one task."""
        is_text = kind == "generate_until"
        apart = self._told_apart(requests) if is_text else [request.args for request in requests]
        found = batches(
            apart,
            lambda number: repr((requests[number].task_name, apart[number][1])) if is_text else "",
            lambda arguments: self._responses.get(kind, arguments) is not None,
            self._batch_size * (BATCHES_A_CALL if is_text else 1),
        )
        bar.update(len(requests) - sum(map(len, found)))
        return found

    def _generate(
        self, contexts: Sequence[str], gen_kwargs: Mapping[str, Any], tell: Callable[[int, str, Rounds], None]
    ) -> int:
        """Generate answers, and tell the row, the text and the rounds of each. Returns how many forward passes all of
        them took."""
        options, until, max_new_tokens = generation_options(gen_kwargs, self._max_gen_toks)

        def on_answer(row: int, rounds: Sequence[AdaFuseRound]) -> None:
            text = cut_at("".join(committed.text for committed in rounds), until)
            tell(row, text, [with_nulls(committed.to_dict()) for committed in rounds])

        rows = list(zip(*(prompt_rows(context, self._tokenizers) for context in contexts), strict=True))
        inputs, *others = [
            pad_left([self._cut(k, ids, max_new_tokens) for ids in rows[k]], tokenizer)
            for k, tokenizer in enumerate(self._tokenizers)
        ]
        output = self._ensemble.output(
            {**inputs, "assistant_inputs": others or None},
            max_batch_size=self._batch_size,
            on_answer=on_answer,
            max_new_tokens=max_new_tokens,
            stop_strings=[stop for stop in until if self._can_write(stop)] or None,
            **options,
        )
        return sum(member["forward_passes"] for member in output.stats["members"])

    def _cut(self, member_index: int, ids: list[int], max_new_tokens: int) -> list[int]:
        """A prompt's ids for a member. Where they are too long, their beginning is cut off, as the harness does."""
        handle = self.handles[member_index]
        if handle.trained_length is None:
            return ids
        room = handle.trained_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"`max_gen_toks` must be below the context of every member, but is {max_new_tokens} with "
                f"{handle.trained_length} tokens of {handle.name}. Ask for shorter ones (--max-new-tokens)."
            )
        return ids[-room:]

    def _can_write(self, stop: str) -> bool:
        """Whether the main model's tokens can write a stop text. `generate()` refuses one that they cannot write."""
        if stop not in self._writable:
            try:
                StopStringCriteria(fast_interface(self._tokenizers[0]), [stop])
                self._writable[stop] = True
            except ValueError:
                self._writable[stop] = False
        return self._writable[stop]

    def _bar(self, kind: str, total: int, is_disabled: bool) -> Any:
        shows = self._shows and not is_disabled
        return tqdm(total=total, desc=f"{self._label}: {kind}", disable=not shows, file=sys.stderr)
