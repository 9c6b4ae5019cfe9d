"""Says where the stopping criteria of a call end a whole answer, which is generated before any of it is committed.
Proposers of answers and [`JointAnswer`] ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..members.vocabulary import Vocabulary
from .progress import Prompt


class AnswerStops:
    """
    Asks the stopping criteria about answers while they are written. Each member has an object of its own, because each
    writes answers of its own.

    Args:
        vocabulary (`Vocabulary`): of the main model, in whose ids criteria speak.
        prompts (`list[Prompt]`): the prompts of the call.
        should_stop (`Callable`): asked after each token; a function of the ids.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompts: Sequence[Prompt], should_stop: Callable[[Prompt], str | None]
    ) -> None:
        self._vocabulary = vocabulary
        self._prompts = prompts
        self._should_stop = should_stop
        # Per prompt and answer, where it begins, and the ids after each of which it went on.
        self._asked: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def __call__(self, prompt_index: int, text: str, ids: Sequence[int] | None = None, number: int = 0) -> bool:
        """
        Whether an answer ends here.

        Args:
            prompt_index (`int`): the prompt that it answers.
            text (`str`): its text so far.
            ids (`list[int]`, *optional*): the main model's own ids of it. By default its tokenization of the text.
            number (`int`, *optional*, defaults to 0): which answer it is, where a member writes several to one prompt.
        """
        ids = self._vocabulary.encode(text).ids if ids is None else ids
        return self._num_taken(prompt_index, ids, number) is not None

    def is_over(self, prompt_index: int) -> bool:
        """Whether the call's time is over."""
        return self._should_stop(Prompt(prompt_index, list(self._prompts[prompt_index].ids), asks="time")) is not None

    def is_complete(self, prompt_index: int, text: str, ids: Sequence[int] | None = None) -> bool:
        """Whether a criterion other than the call's time ends an answer at its end. `ids`: as of a call."""
        ids = self._vocabulary.encode(text).ids if ids is None else ids
        return (
            self._should_stop(Prompt(prompt_index, [*self._prompts[prompt_index].ids, *ids], asks="text")) is not None
        )

    def length(self, text: str) -> int:
        """How many ids of the main model an answer is."""
        return len(self._vocabulary.encode(text).ids)

    def surely_before(self, prompt_index: int, text: str, number: int = 0) -> bool:
        """Whether an answer ends before the end of its text so far, whatever text follows: a word of the main model's
        tokenizer ends at the same place, so that later text does not change the tokens before it."""
        kept = self.cut(prompt_index, text, number=number)
        return kept is not None and len(kept) < len(text) and self._vocabulary.has_boundary(text, len(kept))

    def cut(self, prompt_index: int, text: str, ids: Sequence[int] | None = None, number: int = 0) -> str | None:
        """The text of an answer up to the token at which a criterion ends it, which is what the caller gets. `None`
        where no criterion ends it, or that token ends inside a character."""
        ids = self._vocabulary.encode(text).ids if ids is None else ids
        taken = self._num_taken(prompt_index, ids, number)
        if taken is None:
            return None
        kept = self._vocabulary.text(list(ids[:taken]))
        return kept if text.startswith(kept) else None

    def num_kept(self, prompt_index: int, ids: Sequence[int], number: int = 0) -> int | None:
        """How many ids of an answer the caller gets, where they are the main model's own; `None` as in `cut`."""
        taken = self._num_taken(prompt_index, ids, number)
        if taken is None:
            return None
        whole, kept = (self._vocabulary.text(list(each)) for each in (ids, ids[:taken]))
        return taken if whole.startswith(kept) else None

    def _num_taken(self, prompt_index: int, ids: Sequence[int], number: int) -> int | None:
        """How many of the main model's ids there are up to the one at which a criterion ends the answer; `None` where
        none does. Ids that have been asked about before are not asked about again."""
        ids = list(ids)
        begin = len(self._prompts[prompt_index].ids)
        known, asked = self._asked.get((prompt_index, number), (begin, []))
        asked = asked if known == begin else []
        start = next((i for i, (a, b) in enumerate(zip(ids, asked, strict=False)) if a != b), min(len(ids), len(asked)))
        answer = Prompt(prompt_index, [*self._prompts[prompt_index].ids, *ids[:start]])
        for taken, token in enumerate(ids[start:], start=start + 1):
            answer.ids.append(token)
            if self._should_stop(answer) is not None:
                return taken
        self._asked[prompt_index, number] = begin, ids
        return None


def ids_up_to(vocabulary: Vocabulary, ids: Sequence[int], text: str) -> list[int]:
    """A member's ids of the beginning `text` of an answer: the first of `ids`, where one of them ends with it, else the
    member's tokenization of `text`."""
    for length in range(len(ids), -1, -1):
        if vocabulary.text(list(ids[:length])) == text:
            return list(ids[:length])
    return vocabulary.encode(text).ids
