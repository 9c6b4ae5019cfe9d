"""Questions to answers, batch by batch, and the processes that share them. Knows models; writes no file."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ..call.answering import Answer, ask_each
from ..ensemble import AdaFuseEnsemble
from .arguments import adafuse_config
from .members import Pair
from .plain_json import with_nulls
from .questions import Question


class Answerer:
    """
    The ensemble of a batch job.

    Args:
        args (`Namespace`): of the command.
        members (`list`): each a model and its tokenizer, the main one first.

    Raises:
        ValueError: the members do not go together, or not with the settings.
    """

    def __init__(self, args: argparse.Namespace, members: Sequence[Pair]) -> None:
        self._args = args
        config = adafuse_config(args, members[0][0])
        self._samples = bool(config.do_sample)
        self._ensemble = AdaFuseEnsemble(members, config)
        if args.chat:
            self._ensemble.encode(["?"], chat=True)  # templates that are missing are found before the first prompt

    def answer(self, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
        """
        The records of a batch, in order. Where the batch fails, each question is asked alone, so that one that cannot
        be answered takes no other with it; its record has an `error`, and the text until there.
        """
        for question, made in zip(questions, ask_each(questions, self._rounds), strict=True):
            answer = Answer.of(made)
            record = {
                "line": question.line, "input": question.record, "prompt": question.prompt, "text": answer.text,
            }  # fmt: skip
            if answer.error is not None:
                yield {**record, "error": answer.reason}
                continue
            record |= {"words": answer.words, "ended": answer.ended}
            if self._args.rounds:
                record["rounds"] = with_nulls([span.to_dict() for span in answer.rounds])
            yield record

    def _rounds(self, questions: Sequence[Question]) -> list[Any]:
        """The rounds of each. A sampled answer follows from the seed, the prompt and how often that has come before."""
        prompts = {question.line: question.prompt or "" for question in questions}
        if not self._samples:
            return self._generate([*prompts.values()])
        seed = self._args.seed or 0
        rounds: dict[int, Any] = {}
        for repeat in sorted({question.repeat for question in questions}):
            some = [question.line for question in questions if question.repeat == repeat]
            torch.manual_seed(random.Random(f"{seed} {repeat}").getrandbits(63) if repeat else seed)
            rounds.update(zip(some, self._generate([prompts[line] for line in some]), strict=True))
        return [rounds[line] for line in prompts]

    def _generate(self, prompts: list[str]) -> list[Any]:
        args = self._args
        length = {"max_new_tokens": args.max_new_tokens, "stop_strings": args.stop}
        return self._ensemble.rounds(prompts, chat=args.chat, structured=args.structured, do_sample=False, **length)


@dataclass(frozen=True)
class Processes:
    """The processes that share a job: this one's number, and how many there are."""

    index: int = 0
    count: int = 1
    state: Any = None  # accelerate's

    @classmethod
    def find(cls) -> Processes:
        """Those that torchrun has started, joined through accelerate; one where it has not."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        from accelerate import PartialState  # type: ignore[import-untyped]

        # A process that is done waits for the slowest.
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=365))
        return cls(state.process_index, state.num_processes, state)

    def wait(self) -> None:
        """Until all are here."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def leave(self) -> None:
        """Part from the others."""
        if self.state is not None:
            self.state.destroy_process_group()
