"""Whether a whole answer would end where it is: what is generated is not committed yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..members.vocabulary import Vocabulary
from .progress import Prompt


class AnswerStops:
    """
    The stopping criteria, asked of answers that grow. One for each member, whose answers grow by themselves.

    Args:
        vocabulary (`Vocabulary`): of the main model, in whose ids criteria speak.
        prompts (`list[Prompt]`)
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
        """Whether an answer ends here, by its text so far, or by the main model's own ids of it; of several that grow
        side by side that of this number."""
        return self._num_taken(prompt_index, text, ids, number) is not None

    def surely_before(self, prompt_index: int, text: str, number: int = 0) -> bool:
        """Whether an answer ends inside this beginning of it, whatever comes behind: where it ends, a word of the main
        model's tokenizer does."""
        kept = self.cut(prompt_index, text, number=number)
        return kept is not None and len(kept) < len(text) and self._vocabulary.has_boundary(text, len(kept))

    def cut(self, prompt_index: int, text: str, ids: Sequence[int] | None = None, number: int = 0) -> str | None:
        """The text of an answer up to the token at which a criterion ends it, which is what the caller gets of it;
        `None` where none does, or the token ends inside a character."""
        taken = self._num_taken(prompt_index, text, ids, number)
        if taken is None:
            return None
        ids = self._vocabulary.encode(text).ids if ids is None else list(ids)
        kept = self._vocabulary.text(ids[:taken])
        return kept if text.startswith(kept) else None

    def _num_taken(self, prompt_index: int, text: str, ids: Sequence[int] | None, number: int) -> int | None:
        """How many of the main model's ids come up to the one at which a criterion ends the answer."""
        ids = self._vocabulary.encode(text).ids if ids is None else list(ids)
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
    """A member's ids of the beginning `text` of an answer: the first of these, where a token of them ends there, else
    its tokenization of the text."""
    for length in range(len(ids), -1, -1):
        if vocabulary.text(list(ids[:length])) == text:
            return list(ids[:length])
    return vocabulary.encode(text).ids
