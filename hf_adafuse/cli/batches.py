"""What `hf-adafuse run` loads to answer questions: the ensemble that answers, and the processes that share the job."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..call.answering import Answer, answer_each
from ..ensemble import AdaFuseEnsemble
from ..rounds.plain_json import with_nulls
from .config_flags import adafuse_config
from .members import ModelPair
from .questions import Question
from .text_flags import sampling_options


class Answerer:
    """
    The ensemble of a batch job.

    Args:
        args (`Namespace`): the arguments of the command.
        members (`list[tuple]`): each member's model and tokenizer, the main model's first.

    Raises:
        ValueError: the members do not go together, or the settings do not suit them.
    """

    def __init__(self, args: argparse.Namespace, members: Sequence[ModelPair]) -> None:
        self._args = args
        config = adafuse_config(args, members[0][0])
        self._samples = bool(config.do_sample)
        self._ensemble = AdaFuseEnsemble(members, config)
        if args.chat:
            self._ensemble.encode(["?"], chat=True)  # a missing template is found before the first prompt

    def answer(self, questions: Sequence[Question], on_record: Callable[[dict[str, Any]], bool]) -> bool:
        """
        Answer questions, and make a record of each. Where a batch fails, its questions are asked in smaller batches,
        down to one alone. So a question that cannot be answered takes no other with it. Its record has an `error`, and
        the text that came before.

        Args:
            questions (`list[Question]`): the questions, each with a prompt.
            on_record (`Callable`): told each record as soon as it is made. Returns whether to stop.

        Returns:
            `bool`: whether `on_record` said to stop.
        """

        def tell(question: Question, rounds: Any) -> None:
            if self._args.html is not None:
                page = rounds.to_html(f"Answer {question.line}")
                (Path(self._args.html) / f"{question.line}.html").write_text(page, encoding="utf-8")
            on_record(self._record(question, Answer.of(rounds, self._args.stop)))

        failed = answer_each(questions, self._ask, tell)
        return any(on_record(self._record(question, Answer.of(error))) for question, error in failed)

    def _record(self, question: Question, answer: Answer) -> dict[str, Any]:
        record: dict[str, Any] = {
            "line": question.line,
            "input": question.record,
            "prompt": question.prompt,
            "text": answer.text,
        }
        if answer.error is not None:
            return {**record, "finish_reason": answer.finish_reason, "error": answer.reason}
        record |= {
            "words": answer.num_words,
            "finish_reason": answer.finish_reason,
            "confidence": _rounded(answer.confidence),
        }
        if self._args.rounds:
            record["rounds"] = with_nulls([span.to_dict() for span in answer.rounds])
        return record

    def _ask(self, questions: Sequence[Question], tell: Callable[[int, Any], None]) -> None:
        """Answer some questions, and tell the row and the rounds of each. A sampled answer follows from the seed, the
        prompt, and how many lines before had the same prompt."""
        if not self._samples:
            self._generate(questions, tell)
            return
        seed = self._args.seed or 0
        for repeat in sorted({question.repeat for question in questions}):
            torch.manual_seed(random.Random(f"{seed} {repeat}").getrandbits(63) if repeat else seed)
            rows = [row for row, question in enumerate(questions) if question.repeat == repeat]
            some = [questions[row] for row in rows]
            self._generate(some, lambda row, rounds, rows=rows: tell(rows[row], rounds))  # type: ignore[misc]

    def _generate(self, questions: Sequence[Question], tell: Callable[[int, Any], None]) -> None:
        args = self._args
        self._ensemble.rounds(
            [question.prompt or "" for question in questions],
            chat=args.chat,
            structured=args.structured,
            **sampling_options(args),
            max_new_tokens=args.max_new_tokens,
            stop_strings=args.stop,
            max_batch_size=args.batch_size,
            on_answer=tell,
        )


def _rounded(confidence: float | None) -> float | None:
    """A confidence to three digits. Further digits depend on which prompts shared a pass."""
    return None if confidence is None else round(confidence, 3)


@dataclass(frozen=True)
class Processes:
    """
    The processes that share a job.

    Attributes:
        index (`int`): this process's number. The main process has 0.
        count (`int`): how many processes there are.
        state (`PartialState`, *optional*): accelerate's view of them; `None` for a single process.
    """

    index: int = 0
    count: int = 1
    state: Any = None

    @classmethod
    def find(cls) -> Processes:
        """The processes that torchrun has started, joined through accelerate; without torchrun, this one."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return cls()
        from accelerate import PartialState  # type: ignore[import-untyped]

        # A process that is done waits for the slowest one, however long that takes.
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=365))
        return cls(state.process_index, state.num_processes, state)

    def wait(self) -> None:
        """Wait until all processes have come to this call."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def leave(self) -> None:
        """Leave the group of the processes."""
        if self.state is not None:
            self.state.destroy_process_group()
