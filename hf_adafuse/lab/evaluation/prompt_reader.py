"""`PromptReader`: a model that answers nothing, and keeps the prompts that lm-evaluation-harness asks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM

from .contexts import chat_context


class PromptReader(LM):
    """
    A model that keeps the prompts which it is asked.

    Attributes:
        prompts (`dict[str, list[str]]`): each task's prompts in order, by its name. Chats are as `contexts` makes them.
        rounds (`dict`): empty: no answer has rounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, list[str]] = {}
        self.rounds: dict[tuple[str, int], Any] = {}

    @property
    def tokenizer_name(self) -> str:
        """Empty: the harness asks for it where it makes chats, to tell caches apart, and none is used."""
        return ""

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Keep the prompts of requests. Returns an empty answer to each."""
        for request in requests:
            self.prompts.setdefault(request.task_name, []).append(request.args[0])
        return [""] * len(requests)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as a string, as `AdaFuseLM` makes it."""
        return chat_context(chat_history, add_generation_prompt)
