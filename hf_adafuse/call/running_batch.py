"""Calls of one prompt each that are decoded together: a call may come while others run, and leave before its end.

```python
with planning() as plans:
    model.generate(**inputs, **settings, max_new_tokens=16)
batch = RunningBatch(plans[0], on_rounds, on_end)
# Further plans join by `batch.add(plan)`, as long as `batch.takes(plan)`.
while batch.step():
    pass
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from ..decoding.decoder import Decoder
from ..decoding.progress import Prompt
from ..decoding.strategies.registry import make_strategy
from ..decoding.strategies.strategy import SampledPart
from ..trees.adapters import base_model, model_fingerprint
from .output import finished_rounds
from .plan import CallPlan
from .run import make_members, make_prompts, make_reviews, make_strategies, prompt_evidence, question_asked


class RunningBatch:
    """
    A batch that calls join and leave.

    Plans may differ in all that is of one prompt: its length, texts to stop at, grammar and logits processors, sampling
    (not where drafts are sampled), seed. They must have members and settings of AdaFuse in common. Each call gets the
    text that it gets alone.

    Args:
        plan (`CallPlan`): of the first call, of one prompt.
        on_rounds (`Callable`): told the number of a call, as `add` gives it, after each of its rounds.
        on_end (`Callable`): told the number of a call and its rounds, as of `on_answer`, when it has ended.
    """

    def __init__(self, plan: CallPlan, on_rounds: Callable[[int], None], on_end: Callable[[int, Any], None]) -> None:
        self._key = batch_key(plan)
        self._plans: list[CallPlan | None] = [plan]
        self._on_end = on_end
        self._prompts = make_prompts(plan)
        self._members = make_members(plan)
        strategies = make_strategies(plan)
        self._reviews = make_reviews(plan, strategies)
        self._left: set[int] = set()
        self._decoder = Decoder(
            members=self._members,
            prompts=self._prompts,
            config=plan.config,
            strategies=strategies,
            should_stop=self._should_stop,
            on_commit=lambda prompt, ids: on_rounds(prompt.index),
            prompt_evidence=prompt_evidence(plan, self._members),
            on_answer=self._end,
            reviews=self._reviews,
        )
        self._steps: Iterator[None] | None = self._decoder.steps()

    @property
    def num_calls(self) -> int:
        """How many calls have joined so far."""
        return len(self._plans)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do: no call can join any more."""
        return self._steps is None

    def takes(self, plan: CallPlan) -> bool:
        """Whether a call may join."""
        return not self.is_over and batch_key(plan) == self._key

    def add(self, plan: CallPlan) -> int:
        """A call joins; returns its number. Its prompt is read before the next pass, in which it takes part."""
        number = len(self._plans)
        # What may fail comes first: after an error the batch goes on without the call.
        (prompt,) = make_prompts(plan, number)
        (strategy,) = make_strategies(plan)
        if self._reviews is not None:
            self._reviews.add(question_asked(plan, strategy))
        for member, planned in zip(self._members, plan.members, strict=True):
            member.add_prompts(planned.prompts, planned.processors)
        self._plans.append(plan)
        self._decoder.add(prompt, strategy)
        return number

    def leave(self, number: int) -> bool:
        """End a call before its text ends. Returns `False` where it cannot leave now, because a server is reading for
        it."""
        prompt = self._prompts[number]
        if prompt.is_finished:
            return True
        is_done = self._decoder.leave_out(prompt)
        if is_done:
            self._left.add(number)
        return is_done

    def prompt(self, number: int) -> Prompt:
        """The state of a call: its ids and rounds so far."""
        return self._prompts[number]

    def step(self) -> bool:
        """
        Run one forward pass, and what comes before it. Returns whether anything is left to do.

        Raises:
            AdaFuseDecodingError: a member failed. All calls that have not ended have failed with it.
        """
        if self._steps is None:
            return False
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
        except BaseException:
            self._steps = None
            raise
        return self._steps is not None

    def _should_stop(self, prompt: Prompt) -> str | None:
        plan = self._plans[prompt.index]
        assert plan is not None
        return plan.stop_check(prompt, 0)

    def _end(self, number: int) -> None:
        """A call has ended: tell its rounds, unless it was left out, and forget it."""
        plan, prompt = self._plans[number], self._prompts[number]
        assert plan is not None
        if number not in self._left:
            self._on_end(number, finished_rounds(prompt, plan))
        # What is not needed any more: other calls may come and go for long.
        self._plans[number] = None
        prompt.rounds = []
        prompt.ids = []
        prompt.scores = []
        prompt.logits = []


def batch_key(plan: CallPlan) -> tuple[Any, ...]:
    """What plans must have in common to share a batch."""
    members = [
        (
            id(base_model(member.handle.model)),
            model_fingerprint(member.handle.model),
            id(member.handle.tokenizer),
            member.backend,
            tuple(member.eos_ids),
            member.handle.context(member.prompts),
        )
        for member in plan.members
    ]
    samples_drafts = plan.warpers is not None and make_strategy(plan.config).samples != SampledPart.WORDS
    drawn = id(plan) if samples_drafts else None
    return (*members, json.dumps(plan.config.to_dict(), sort_keys=True, default=str), drawn)
