"""What a decoding method is: how members propose, and what is committed.

An instance serves one prompt of one call, so that what it learns is of that prompt. Its arguments are the method's
options, as `adafuse_config={"method": name, ...}` has them; `config` is given to it when it is made.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch

from ...confidence.answer_text import cut_at
from ...confidence.features import PromptFacts
from ...config import AdaFuseConfig
from ...members.member import Member
from ...members.rating_prompts import Rubric
from ...members.vocabulary import Vocabulary
from ...outputs import AdaFuseRound
from ...trees.nodes import Node
from ..proposer import Proposal, Proposer
from ..requests import Requests
from ..scored_spans import Choice, ScoredSpan, mean_nll
from ..scoring import first_lowest, fused_score
from ..word_splitter import WordSplitter

# The criterion of rounds in which the main model's words are committed without asking the others.
ALONE = "NLL under the main model, which is certain"
_NO_FACTS: PromptFacts | None = None
_NOT_RATED: Rubric | None = None
_NO_STOPS: Sequence[str] = ()


class RoundKind(str, Enum):
    """
    How the rounds of a method go. `RoundFactory.rounds_of` makes the round of each kind.

    - `SPAN`: every member proposes texts, every member scores every text, and one is committed ([`SpanRound`]).
    - `TOKEN`: every member gives its distribution of the next token, and one text is committed ([`TokenRound`]).
    - `VERIFIED`: the main model drafts tokens, the others verify them, and where they disagree a token is fused
      ([`VerifiedRound`]).
    """

    SPAN = "span"
    TOKEN = "token"
    VERIFIED = "verified"


class SampledPart(str, Enum):
    """
    What a method draws at random in a call with `do_sample=True`.

    - `WORDS`: each word of the text, from the mixture of the members' distributions ([`SampledRound`]).
    - `DRAFTS`: what each member proposes. The method chooses among the drafts as without sampling. Its proposers must
      be subclasses of [`DraftedText`].
    """

    WORDS = "words"
    DRAFTS = "drafts"


class Strategy:
    """
    What every method is told, and asked before it decodes.

    Attributes:
        round_kind (`RoundKind`): how its rounds go. [`SpanStrategy`] and [`TokenStrategy`] set it.
        config (`AdaFuseConfig`): the settings of the call.
        uses (`tuple[str]`): the fields of `AdaFuseConfig` that the method uses beside those that all methods use. A
            call that changes another field is refused.
        prompt_text (`str`): the text of the main model's prompt, without special tokens and without thoughts.
        stop_texts (`list[str]`): the texts at which the call stops. An answer that has come to one ends with it.
        criterion (`str`): the name of the quantity by which it finds a winner, for the trace: `"fused NLL"`.
        highest_wins (`bool`): whether the highest value of that quantity wins. `False`: the lowest.
        samples (`SampledPart`, *optional*): what is drawn in a call with `do_sample=True`. `None`: the method is
            deterministic, and refuses such a call.
        needs_prompt_facts (`bool`): whether the decoder shall set `prompt_facts`.
        prompt_facts (`PromptFacts`, *optional*): per member, its NLL of the prompt and the entropy of its first token.
            Set before `choose` is called, where `needs_prompt_facts`.
        rated_by (`Rubric`, *optional*): the rubric by which the members rate whole answers before `choose` is called;
            `ScoredSpan.ratings` has the ratings. `None`: the members rate nothing.
        request_options (`Collection[str]`): the options that a client of a server may set to a text, a list or a dict.
            A client may set any option to a number or a switch. Anything else could name a file, a model or a regular
            expression, which only the server chooses.
    """

    round_kind: ClassVar[RoundKind]
    config = AdaFuseConfig()  # without an annotation: these are no options
    uses: ClassVar[tuple[str, ...]] = ()
    prompt_text = ""
    stop_texts = _NO_STOPS
    needs_logits = False
    needs_tokens = False
    is_whole = False
    criterion = "fused NLL"
    highest_wins = False
    samples: ClassVar[SampledPart | None] = None
    needs_prompt_facts = False
    request_options: ClassVar[Collection[str]] = ()
    prompt_facts = _NO_FACTS
    rated_by = _NOT_RATED

    def prepare(self, device: torch.device) -> None:
        """
        Load what the method needs beside the members, once per process. Asked before any member has read anything.

        Args:
            device (`torch.device`): the device of the main model's inputs.

        Raises:
            ValueError: something does not load.
        """

    def portable_options(self) -> dict[str, Any]:
        """The method's options without names of files, for a repository that is used elsewhere."""
        return dict(self.config.method_options)

    def check_members(self, vocabularies: Sequence[Vocabulary]) -> None:
        """
        Refuse members that the method cannot combine. Asked before any of them has read anything.

        Args:
            vocabularies (`list[Vocabulary]`): one per member, the main model's first.

        Raises:
            ValueError: the method cannot combine these members.
        """

    def counts(self, rounds: Sequence[AdaFuseRound]) -> dict[str, int]:
        """
        What the method counts, by name, for the `stats` of an output. By default nothing.

        Args:
            rounds (`list[AdaFuseRound]`): the rounds of all prompts of a call.
        """
        return {}


@dataclass
class SpanStrategy(Strategy):
    """
    A method in whose rounds every member proposes a text, every member scores every text, and one is committed.

    This class itself has members propose `num_words` greedy words, and takes the candidate of the lowest fused NLL. A
    method of your own overrides the steps that it does differently. [`register_strategy`] gives it a name, by which
    `adafuse_config={"method": name}` uses it.

    The call's stopping criteria, `max_time` too, are asked of committed text only: a proposal is always whole. Methods
    with whole answers ask them of each answer.

    Args:
        num_words (`int`, *optional*, defaults to 1): the most words of a span.

    Attributes:
        needs_logits (`bool`): whether `choose` reads `ScoredSpan.logits`.
        needs_tokens (`bool`): whether `choose` reads `ScoredSpan.tokens`.
        is_whole (`bool`): whether a span is a whole answer.
    """

    round_kind = RoundKind.SPAN
    uses: ClassVar[tuple[str, ...]] = ("nll_normalization",)
    num_words: int = 1

    def __post_init__(self) -> None:
        check_number("num_words", self.num_words, 1, is_integer=True)

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        """
        The proposer of one member.

        Args:
            member_index (`int`): the number of the member. 0 is the main model.
            members (`list[Member]`): all members.
            splitter (`WordSplitter`): says where a word ends.

        Returns:
            [`Proposer`] or a subclass of it.
        """
        return Proposer(member_index, members[member_index], self.greedy_settings(self.num_words), splitter)

    def answer_in(self, text: str) -> str:
        """A whole answer without the text at which it has stopped, as it is compared and shown."""
        return cut_at(text, self.stop_texts)

    def asked_members(self, weights: Sequence[float]) -> list[int]:
        """
        The members that propose and score in the rounds of the prompt. One that is asked alone proposes greedy words,
        without branches. The decoder also asks each member that may forbid a text, by its logits processors or because
        it has no end-of-sequence token. Where nothing that is proposed can be committed, all members are asked in that
        round. Asked before each round; the answer must not change.

        Args:
            weights (`list[float]`): how much each member counts before the text begins, the main model first.

        Returns:
            the members' numbers, at least one. By default all.
        """
        return list(range(len(weights)))

    def propose_alone(self, main: Proposer, root: Node) -> Requests[Proposal | None]:
        """
        A text of the main model that is committed without asking the other members. They read it later. It is a
        generator of requests, like the method `propose` of [`Proposer`].

        Args:
            main (`Proposer`): the main model's proposer.
            root (`Node`): the end of the text so far in the main model's tree.

        Returns:
            the text; `None`, the default: the other members are asked.
        """
        yield from ()
        return None

    def units(self, words: Sequence[str]) -> list[str]:
        """
        The units in which `choose` compares a text, `ScoredSpan.words`. By default they are its words.

        Args:
            words (`list[str]`): the words of the text. Joined, they give it.
        """
        return list(words)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        """
        Choose the candidate that is committed.

        Args:
            candidates (`list[ScoredSpan]`): the candidates, in the order in which ties are broken. One that is not
                `is_possible` must not win.
            weights (`list[float]`): how much each member counts, the main model first. They are positive, and their sum
                need not be 1.
            main_index (`int`, *optional*): the index of the main model's best proposal.

        Returns:
            [`Choice`]: the index of the winner, and the scores of all candidates.
        """
        nlls = self.nlls(candidates, len(weights))
        return lowest(candidates, nlls, [fused_score(of_one, weights) for of_one in nlls])

    def fuse(self, texts: Sequence[str]) -> str | None:
        """
        For methods with whole answers: an answer that the method writes itself, to be committed in the place of the
        winner.

        Args:
            texts (`list[str]`): the answers that could be committed, the winner first, then by score.

        Returns:
            the answer; `None`, the default: the winner is committed.
        """
        return None

    def draft_method(self) -> SpanStrategy | None:
        """For methods with whole answers: the method by which the members write one more answer together, which is
        compared with their own answers. `None`, the default: they write none."""
        return None

    def nlls(self, candidates: Sequence[ScoredSpan], num_members: int) -> list[list[float | None]]:
        """Per candidate and member, the mean NLL in the unit of `nll_normalization`; `None` where a member has nothing
        to score."""
        members = range(num_members)
        return [[mean_nll(span, member, self.config) for member in members] for span in candidates]

    def greedy_settings(self, num_words: int = 1) -> AdaFuseConfig:
        """The settings with which a [`Proposer`] proposes `num_words` greedy words."""
        return replace(
            AdaFuseConfig(commitment="fixed", num_branches=1, max_words=num_words),
            max_word_tokens=self.config.max_word_tokens,
            word_boundary=self.config.word_boundary,
        )


def lowest(candidates: Sequence[ScoredSpan], nlls: list[list[float | None]], scores: Sequence[float]) -> Choice:
    """
    The choice of the possible candidate with the lowest score. Of equal scores the first wins.

    Args:
        candidates (`list[ScoredSpan]`): the candidates.
        nlls (`list[list[float]]`): per candidate and member, its mean NLL, for the trace.
        scores (`list[float]`): per candidate, its score.
    """
    pairs = zip(candidates, scores, strict=True)
    kept = [score if candidate.is_possible else math.inf for candidate, score in pairs]
    return Choice(first_lowest(kept) if kept and min(kept) < math.inf else None, nlls, kept)


def check_number(name: str, value: Any, least: float, most: float = math.inf, *, is_integer: bool = False) -> None:
    """
    Raises:
        ValueError: an option is not a finite number from `least` to `most`.
    """
    kind = "a whole number" if is_integer else "a number"
    is_number = isinstance(value, int if is_integer else (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= min(most, sys.float_info.max):
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"`{name}` must be {kind} {bounds}, but is {value!r}. Leave it out for the default.")


def check_switch(name: str, value: Any) -> None:
    """
    Raises:
        ValueError: an option is not true or false.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False, but is {value!r}. Leave it out for the default.")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """
    Raises:
        ValueError: an option is not one of these.
    """
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, but is {value!r}. Choose one of these.")
