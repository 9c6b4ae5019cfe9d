"""The prompt by which a member rates answers: a rubric, the question and the answers in the member's own chat template,
and the ids of the possible ratings. Used by `decoding.reviews`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .chat import rendered_turn
from .thinking import SWITCHES, closed_at_once, thinking_format, whole_text, without_thoughts
from .vocabulary import Vocabulary

_RUBRIC = (
    "You are an expert reviewer. Rate how well a response answers the question.\n"
    "1: the response does not answer the question, or its answer is certainly wrong.\n"
    "{max_score}: the answer is certainly right, and nothing that was asked for is missing.\n"
    "Between them: the more likely the answer is right, the higher the rating.\n"
    "Neither the order of the responses nor their length matters."
)
_HEAD = "{rubric}\n\nQuestion:\n{question}\n\nResponse A:\n"
_NEXT = "\n\nResponse {letter}:\n"
_REQUEST = "\n\nRate Response {letter}. Reply with one whole number from 1 to {max_score}, and with nothing else."
_LETTERS = "ABC"
_PROBE = "hf-adafuse"
# The best rating is one digit.
MOST_SCORE = 9


@dataclass(frozen=True)
class Rubric:
    """
    By what answers are rated.

    Args:
        text (`str`, *optional*): what the raters read before the question. `None`: a rubric for questions of any kind.
        max_score (`int`, *optional*, defaults to 5): the best rating; the worst is 1.
    """

    text: str | None = None
    max_score: int = 5

    def __post_init__(self) -> None:
        if self.text is not None and (not isinstance(self.text, str) or not self.text.strip()):
            raise ValueError(f"`rubric` must be a text, but is {self.text!r}. Leave it out for the default.")
        is_integer = isinstance(self.max_score, int) and not isinstance(self.max_score, bool)
        if not is_integer or not 2 <= self.max_score <= MOST_SCORE:
            raise ValueError(
                f"`max_score` must be a whole number from 2 to {MOST_SCORE}, but is {self.max_score!r}. Leave it out "
                "for the default."
            )

    def check_members(self, vocabularies: Sequence[Vocabulary]) -> None:
        """
        Raises:
            ValueError: a member's tokenizer cannot write all ratings.
        """
        for index, vocabulary in enumerate(vocabularies):
            lacking = [score for score in range(1, self.max_score + 1) if not _replies(vocabulary, score)]
            if lacking:
                name = "the main model" if index == 0 else f"assistant {index}"
                raise ValueError(
                    f"`max_score` must be a number that all members can write, with those below it, but is "
                    f"{self.max_score}, and the tokenizer of {name} cannot write {lacking}. Take a lower one, or leave "
                    "that member out."
                )


class RatingPrompts:
    """
    The prompts in which one member rates.

    A prompt is the member's chat template around one message of the user's: the rubric, the question, up to three
    responses, and which of them is to be rated. Prompts to the same question share their prefix. What
    answers say is encoded apart from it: special tokens that an answer spells out are characters.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the member's tokenizer.
        vocabulary (`Vocabulary`): what that tokenizer makes of text.
        rubric (`Rubric`): what the members are told of a good answer.

    Attributes:
        replies (`list[list[list[int]]]`): per rating from 1 on, its ids as a reply: as the tokenizer writes it with and
            without a space before it.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, rubric: Rubric) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_score = rubric.max_score
        self._rubric = _RUBRIC.format(max_score=rubric.max_score) if rubric.text is None else rubric.text.strip()
        self.replies = [_replies(vocabulary, score) for score in range(1, rubric.max_score + 1)]
        # What the template puts behind the message, as it tokenizes it there.
        request = self._request("A")
        text, has_template = rendered_turn(tokenizer, f"{_PROBE}{request}")
        if form := thinking_format(tokenizer):  # the rating comes at once
            text += closed_at_once(text, form)
        before, _, after = text.rpartition(request)
        if has_template:
            whole = vocabulary.encode_marks(text)
            start = vocabulary.encode_marks(before + request)
            is_start = whole[: len(start)] == start
            self._closing = whole[len(start) :] if is_start else vocabulary.encode_marks(after)
        else:
            self._closing = vocabulary.encode(after).ids

    def prefix(self, question: str) -> list[int]:
        """The ids up to the first answer."""
        content = _HEAD.format(rubric=self._rubric, question=question)
        text, has_template = rendered_turn(self._tokenizer, f"{content}{_PROBE}")
        before = text.rpartition(_PROBE)[0]
        return (self._vocabulary.encode_marks if has_template else self._vocabulary.encode_prompt)(before)

    def suffix(self, answers: Sequence[str], rated: int) -> list[int]:
        """
        The ids behind the prefix, up to the reply.

        Args:
            answers (`list[str]`): one to three, in the order in which they are shown.
            rated (`int`): the index of the one that is rated.
        """
        text = answers[0]
        for letter, answer in zip(_LETTERS[1:], answers[1:], strict=False):
            text += _NEXT.format(letter=letter) + answer
        return [*self._vocabulary.encode(text + self._request(_LETTERS[rated])).ids, *self._closing]

    def _request(self, letter: str) -> str:
        return _REQUEST.format(letter=letter, max_score=self._max_score)


def asked_text(tokenizer: Any, vocabulary: Vocabulary, ids: list[int]) -> str:
    """The text of a member's prompt without special tokens, and without the thoughts with which it may end: they are no
    part of what is asked, and for nobody else to read."""
    form = thinking_format(tokenizer)
    text = "" if form is None else whole_text(tokenizer, ids)
    asked = text if form is None else without_thoughts(text, form)
    return vocabulary.prompt_text(ids if asked == text else vocabulary.encode_marks(asked))


def question_of(tokenizer: Any, vocabulary: Vocabulary, text: str) -> str:
    """What a prompt without thoughts asks: the text of a single turn without what the chat template has put around it
    (`"user\\nWho wrote Faust?\\nassistant\\n"` is `"Who wrote Faust?"`), any other text as it is."""
    form = thinking_format(tokenizer)
    for thinks in (False, True):
        try:
            turn, has_template = rendered_turn(tokenizer, _PROBE, **dict.fromkeys(SWITCHES, thinks))
        except ValueError:
            return text
        turn = turn if form is None else without_thoughts(turn, form)
        shown = vocabulary.prompt_text(vocabulary.encode_marks(turn)) if has_template else turn
        before, _, after = shown.partition(_PROBE)
        is_turn = text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after)
        if (before or after) and is_turn:
            return text[len(before) : len(text) - len(after)]
    return text


def check_templates(tokenizers: Sequence[Any]) -> None:
    """
    Raises:
        ValueError: a chat template takes no message in which answers could be rated.
    """
    for tokenizer in tokenizers:
        rendered_turn(tokenizer, _PROBE)


def orders_of(num_answers: int) -> list[tuple[int, ...]]:
    """
    The orders in which answers are shown together: three neighbours on a ring, from each place on, and the same turned
    round (the flipped triples of LLM-PeerReview); of two answers both orders. Each answer stands equally often at each
    place.

    Args:
        num_answers (`int`): at least 1.
    """
    width = min(num_answers, len(_LETTERS))
    ring = [tuple((start + step) % num_answers for step in range(width)) for start in range(num_answers)]
    return list(dict.fromkeys([*ring, *(order[::-1] for order in ring)]))


def _replies(vocabulary: Vocabulary, score: int) -> list[list[int]]:
    """The ids of a rating, those that decode back to it."""
    found = [vocabulary.encode(text) for text in (str(score), f" {score}")]
    return [list(ids) for ids in dict.fromkeys(tuple(one.ids) for one in found if one.exact and one.ids)]
