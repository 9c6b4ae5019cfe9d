"""Measures an ensemble and what it is compared with: runs the contenders in turn, and collects samples.

`hf-adafuse bench` makes a [`BenchJob`] of each combination of settings. `measure` is for prompts of one's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from ...config import AdaFuseConfig
from ...decoding.strategies.registry import STRATEGIES
from ...decoding.word_splitter import split_words
from ...demo.threads import threads as computing_on
from ...kernels.autotuner import Autotuner
from . import instruments
from .contenders import Ensemble, Prompts
from .results import NAIVE, OURS, Measurement, TextResult, TimedRun
from .variants import VARIANTS

GREEDY = "greedy"
AGAINST = (GREEDY, *VARIANTS, NAIVE)
# Other methods, with their defaults. They write other texts.
METHODS = tuple(name for name in STRATEGIES if name != "adafuse")
# The default contenders. The naive implementation is not among them: it reads the whole text for each word, which takes
# minutes.
DEFAULT_AGAINST = (GREEDY, *VARIANTS)
# The most warm-up runs of a contender on a batch.
_MOST_WARM_UPS = 4


class BenchJob:
    """
    One combination to measure.

    Args:
        ensemble (`Ensemble`): the members.
        measurement (`Measurement`): gets the samples.
        texts (`list[list[str]]`): batches of prompts.
        against (`tuple[str]`, *optional*): the names of the contenders that ours is compared with, from `AGAINST` and
            `METHODS`.
        naive_texts (`int`, *optional*, defaults to 1): how many of the batches the naive implementation is run on, once
            each.

    Raises:
        ValueError: the prompts do not fit into a member's context, or a contender is unknown.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        measurement: Measurement,
        texts: list[list[str]],
        against: Sequence[str] = DEFAULT_AGAINST,
        naive_texts: int = 1,
    ) -> None:
        check_against(against)
        self.ensemble = ensemble
        self.result = measurement
        self.against = tuple(against)
        self.naive_texts = naive_texts
        self.config = AdaFuseConfig(num_branches=measurement.branches)
        self.prompts = [ensemble.prompts(batch) for batch in texts]
        ensemble.check_room(self.prompts, measurement.new_tokens)
        self._expected: list[list[list[int]]] = []  # for each batch and prompt, the main model's new ids

    def warm_up(self) -> None:
        """Run every contender, except the naive implementation, until the autotuner of the kernels tries nothing new.
        Nothing is timed. Afterwards it is known what text the ensemble writes, and so how many tokens each member has
        to write alone."""
        config, new_tokens = self.config, self.result.new_tokens
        for text, prompts in enumerate(self.prompts):
            output = _settled(
                lambda: self.ensemble.generate(prompts, config, new_tokens, return_dict_in_generate=True)  # noqa: B023
            )
            self._expected.append(self.ensemble.new_ids(output.sequences, prompts))
            self.result.texts.append(self._text_result(prompts, output))
            for name, run in self._contenders(text):
                if name not in (OURS, NAIVE):
                    _settled(run)

    def measure_once(self, repeat: int) -> None:
        """Run the contenders in turn on each batch of prompts, and keep a sample of each run. `repeat`: the number of
        this round, from 0."""
        for text in range(len(self.prompts)):
            for name, run in self._contenders(text):
                if name != NAIVE or (repeat == 0 and text < self.naive_texts):
                    self._sample(name, text, repeat, run)

    def _sample(self, name: str, text: int, repeat: int, run: Callable[[], Any]) -> None:
        meter = self.ensemble.meter
        device = self.ensemble.device
        meter.reset()
        instruments.reset_peak_memory(device)
        seconds, ids = instruments.timed(device, run)
        num_words = None
        if name in METHODS:
            texts = [self.ensemble.handles[0].vocabulary.text(row) for row in ids]
            num_words = sum(len(split_words(one)) for one in texts)
        sample = TimedRun(
            contender=name,
            text=text,
            repeat=repeat,
            seconds=seconds,
            model_seconds=list(meter.seconds),
            forwards=list(meter.forwards),
            tokens=list(meter.tokens),
            kv_peak_bytes=meter.kv_peak_bytes,
            memory_peak_bytes=instruments.peak_memory(device),
            num_words=num_words,
        )
        self.result.samples.append(sample)
        if name not in METHODS and not name.startswith(GREEDY):
            is_same = self.result.same_text.get(name, True) and ids == self._expected[text]
            self.result.same_text[name] = is_same

    def _contenders(self, text: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yields the name of each contender, and a function that runs it on the batch `text`."""
        ensemble = self.ensemble
        prompts = self.prompts[text]
        call = (prompts, self.config, self.result.new_tokens)
        yield OURS, lambda: ensemble.run(*call)
        if GREEDY in self.against:
            for k, length in enumerate(self.result.texts[text].own_tokens):
                yield f"{GREEDY} {k + 1}", lambda k=k, n=length: ensemble.run_alone(k, prompts[k], n)  # type: ignore[misc]
        for name in self.against:
            if name in METHODS:
                peer = (prompts, AdaFuseConfig(method=name), self.result.new_tokens)
                yield name, lambda peer=peer: ensemble.run(*peer)  # type: ignore[misc]
            elif name not in (GREEDY, NAIVE):
                yield name, lambda name=name: ensemble.run_variant(name, *call)  # type: ignore[misc]
        if NAIVE in self.against:
            yield NAIVE, lambda: ensemble.run_naively(*call)

    def _text_result(self, prompts: Prompts, output: Any) -> TextResult:
        texts = ["".join(committed.text for committed in rounds) for rounds in output.rounds]
        vocabularies = [handle.vocabulary for handle in self.ensemble.handles]
        ends = [bool(row and row[-1].ends) for row in output.rounds]  # the end of a text is a token of every member
        own = [
            [len(vocabulary.encode(text).ids) + end for text, end in zip(texts, ends, strict=True)]
            for vocabulary in vocabularies
        ]
        own[0] = [len(ids) for ids in self._expected[-1]]
        num_tokens = [max(1, *lengths) for lengths in own]
        rounds = [committed for row in output.rounds for committed in row]
        winners = [r.candidates[r.winner].proposers for r in rounds if r.winner is not None]
        return TextResult(
            texts=texts,
            num_words=sum(len(split_words(text)) for text in texts),
            own_tokens=num_tokens,
            own_kv_bytes=sum(
                len(texts) * instruments.kv_bytes(model, max(map(len, rows)) + new)
                for model, rows, new in zip(self.ensemble.models, prompts, num_tokens, strict=True)
            ),
            num_rounds=len(rounds),
            num_agreed=sum(len(proposers) == len(vocabularies) for proposers in winners),
            num_ended=sum(ends),
        )


def _settled(run: Callable[[], Any]) -> Any:
    """What `run` returns, once the kernels' autotuner tries nothing new in it."""
    for _ in range(_MOST_WARM_UPS):
        num_trials = Autotuner.num_trials
        output = run()
        if Autotuner.num_trials == num_trials:
            break
    return output


def check_against(against: Sequence[str]) -> None:
    """
    Refuse contenders that do not exist.

    Raises:
        ValueError: a name is neither in `AGAINST` nor in `METHODS`.
    """
    known = (*AGAINST, *METHODS)
    unknown = [name for name in against if name not in known]
    if unknown:
        raise ValueError(f"`against` must be of {list(known)}, but has {unknown}. Check the spelling.")


def measure_all(jobs: Sequence[BenchJob], repeats: int = 3, on_step: Callable[[str], None] = lambda step: None) -> None:
    """Warm up every job, then measure all of them in turn, `repeats` times. So what changes on the machine in the
    meantime changes all figures alike. `on_step` is told what begins: `repeat 1 of 3, combination 2 of 6 (41 s)`."""
    started = time.perf_counter()
    for repeat in range(-1, repeats):
        name = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {repeats}"
        for number, job in enumerate(jobs, start=1):
            on_step(f"{name}, combination {number} of {len(jobs)} ({time.perf_counter() - started:.0f} s)")
            if repeat < 0:
                job.warm_up()
            else:
                job.measure_once(repeat)


def measure(
    members: Sequence[tuple[Any, Any]],
    prompts: Sequence[str] | Sequence[Sequence[str]],
    *,
    branches: int = 1,
    new_tokens: int = 64,
    repeats: int = 3,
    against: Sequence[str] = DEFAULT_AGAINST,
    threads: int | None = None,
) -> Measurement:
    """
    Measure an ensemble on prompts of your own.

    Args:
        members (`list[tuple]`): each member's loaded model and tokenizer, the main model's first. They are not changed.
        prompts (`list[str]` or `list[list[str]]`): one batch of prompts, or several batches of equal size.
        branches (`int`, *optional*, defaults to 1): `num_branches` of the `AdaFuseConfig`.
        new_tokens (`int`, *optional*, defaults to 64): how many tokens of the main model are written.
        repeats (`int`, *optional*, defaults to 3): how many times each contender is timed, after a warm-up. The figures
            are medians.
        against (`list[str]`, *optional*): the names of contenders, from `AGAINST` and `METHODS`. By default the
            members' own `generate()`, and our own code without each of its ideas.
        threads (`int`, *optional*): the number of CPU threads. By default torch's own choice.

    Returns:
        `Measurement`: times in seconds, memory in bytes.

    Raises:
        ValueError: a model cannot be a member, prompts are no batches of equal size or do not fit into a context,
            `repeats` is below 1, or a contender is unknown.
    """
    batches = _batches_of(prompts)
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, but is {repeats}. Times are taken from repeats.")
    with nullcontext() if threads is None else computing_on(threads):
        ensemble = Ensemble(members)
        longest = max(len(row) for batch in batches for row in ensemble.prompts(batch)[0])
        result = ensemble.measurement(longest, len(batches[0]), branches, new_tokens)
        measure_all([BenchJob(ensemble, result, batches, against)], repeats)
    return result


def _batches_of(prompts: Any) -> list[list[str]]:
    """Raises `ValueError` where the prompts are neither one batch nor several of equal size."""
    is_one = not isinstance(prompts, str) and all(isinstance(prompt, str) for prompt in prompts)
    batches = [prompts] if is_one else list(prompts)
    sizes = {0 if isinstance(batch, str) else len(batch) for batch in batches}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"`prompts` must be texts, or lists of equally many texts, but is {prompts!r}. Put one text into a list."
        )
    return [list(batch) for batch in batches]
