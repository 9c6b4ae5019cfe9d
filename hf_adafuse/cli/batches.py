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

from ..decoding.progress import AdaFuseDecodingError
from ..generation import enable_adafuse
from ..host_internals import execution_device
from ..members.chat import chat_inputs, pad_left
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
        self._tokenizers = [tokenizer for _, tokenizer in members]
        if args.chat:
            chat_inputs(_chat("?"), self._tokenizers)  # templates that are missing are found before the first prompt
        model = members[0][0]
        config = adafuse_config(args, model)
        self._samples = bool(config.do_sample)
        self._model = enable_adafuse(
            model,
            assistant_models=[assistant for assistant, _ in members[1:]],
            assistant_tokenizers=self._tokenizers[1:],
            tokenizer=self._tokenizers[0],
            adafuse_config=config,
        )
        self._device = execution_device(model)

    def answer(self, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
        """
        The records of a batch, in order. Where the batch fails, each question is asked alone, so that one that cannot
        be answered takes no other with it; its record has an `error`, and the text until there.
        """
        try:
            rounds = self._rounds(questions)
        except (AdaFuseDecodingError, ValueError) as error:
            if len(questions) > 1:
                for question in questions:
                    yield from self.answer([question])
            else:
                text = error.texts[0] if isinstance(error, AdaFuseDecodingError) and error.texts else ""
                yield {**_record(questions[0], text), "error": reason_of(error)}
            return
        for question, committed in zip(questions, rounds, strict=True):
            record = _record(question, "".join(span.text for span in committed))
            record["words"] = sum(len(span.words) for span in committed)
            record["ended"] = bool(committed) and committed[-1].ends
            if self._args.rounds:
                record["rounds"] = with_nulls([span.to_dict() for span in committed])
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
        tokenizer = self._tokenizers[0]
        if self._args.chat:
            inputs = chat_inputs([_chat(prompt) for prompt in prompts], self._tokenizers)
        else:
            inputs = pad_left([tokenizer(prompt)["input_ids"] for prompt in prompts], tokenizer)
        padding = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None]
        output = self._model.generate(
            **inputs.to(self._device),
            max_new_tokens=self._args.max_new_tokens,
            stop_strings=self._args.stop,
            do_sample=False,
            structured=self._args.structured,
            return_dict_in_generate=True,
            pad_token_id=padding[0] if padding else None,
        )
        return list(output.rounds)


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _record(question: Question, text: str) -> dict[str, Any]:
    return {"line": question.line, "input": question.record, "prompt": question.prompt, "text": text}


def reason_of(error: Exception) -> str:
    """Why a question could not be answered, for its record."""
    if isinstance(error, AdaFuseDecodingError):
        return f"{error.member} failed in round {error.round}: {error.reason}"
    return str(error) or type(error).__name__


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
