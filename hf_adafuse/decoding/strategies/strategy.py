"""What a decoding method is: how members propose, and what is committed.

An instance serves one prompt of one call, so that what it learns is of that prompt. Its arguments are the method's
options, as `adafuse_config={"method": name, ...}` has them; `config` is given to it when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

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


class Strategy:
    """
    What every method is told, and asked before it decodes.

    Attributes:
        round_kind (`str`): how its rounds go: `"span"`, `"token"` or `"verified"`; see `hf_adafuse.decoding.round`.
        config (`AdaFuseConfig`): of the call.
        uses (`tuple[str]`): the fields of `AdaFuseConfig` that the method uses beside those that all methods use. A
            call that changes another field is refused.
        prompt_text (`str`): what the main model's prompt says, special tokens removed.
        criterion (`str`), highest_wins (`bool`): the quantity by which it finds a winner, and which value of it wins;
            what the trace shows.
        samples (`str`, *optional*): what `do_sample=True` does: `"words"` are the members' by lot; `"drafts"`: what
            members propose is drawn, by proposers that are [`DraftedText`]. `None`: it is refused.
        needs_prompt_facts (`bool`): whether `prompt_facts` are needed.
        rated_by (`Rubric`, *optional*): by what the members rate whole answers before `choose` is called, for
            `ScoredSpan.ratings`; `None`: they do not.
        prompt_facts (`PromptFacts`, *optional*): what the prompt says to each member, set before `choose` is called.
    """

    round_kind: ClassVar[str]
    config = AdaFuseConfig()  # without an annotation: these are no options
    uses: ClassVar[tuple[str, ...]] = ()
    prompt_text = ""
    needs_logits = False
    needs_tokens = False
    is_whole = False
    criterion = "fused NLL"
    highest_wins = False
    samples: ClassVar[str | None] = None
    needs_prompt_facts = False
    prompt_facts = _NO_FACTS
    rated_by = _NOT_RATED

    def prepare(self, device: torch.device) -> None:
        """
        Load what the method needs beside the members, once per process. Asked before any member has read anything.

        Args:
            device (`torch.device`): of the main model's inputs.

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
            vocabularies (`list[Vocabulary]`): theirs, the main model's first.

        Raises:
            ValueError: it cannot combine them.
        """

    def counts(self, rounds: Sequence[AdaFuseRound]) -> dict[str, int]:
        """What `stats` tells of this method alone, from the rounds of all prompts of a call; by default nothing."""
        return {}


@dataclass
class SpanStrategy(Strategy):
    """
    A method in whose rounds every member proposes a text, every member scores every text, and one is committed.

    What a member proposes is proposed whole: the call's stopping criteria, `max_time` too, are asked of what is
    committed (methods with whole answers ask them of each answer).

    By itself it proposes `num_words` greedy words and takes the candidate of the lowest mean NLL. A method of your own
    overrides what it does otherwise, is given a name by [`register_strategy`] and used by that name.

    Args:
        num_words (`int`, *optional*, defaults to 1): the words of a span.

    Attributes:
        needs_logits (`bool`), needs_tokens (`bool`): whether `ScoredSpan.logits`, `ScoredSpan.tokens` are needed.
        is_whole (`bool`): whether a span is a whole answer.
    """

    round_kind = "span"
    uses: ClassVar[tuple[str, ...]] = ("nll_normalization",)
    num_words: int = 1

    def __post_init__(self) -> None:
        check_number("num_words", self.num_words, 1, is_integer=True)

    def make_proposer(self, member_index: int, members: Sequence[Member], rule: WordSplitter) -> Proposer:
        """How a member proposes: [`Proposer`] or a subclass of it."""
        return Proposer(member_index, members[member_index], self.greedy_settings(self.num_words), rule)

    def propose_alone(self, main: Proposer, root: Node) -> Requests[Proposal | None]:
        """
        What is committed after `root` without asking the other members, who read it later; `None`, the default: they
        are asked.

        Args:
            main (`Proposer`): the main model's.
            root (`Node`): the end of the text.
        """
        yield from ()
        return None

    def units(self, words: Sequence[str]) -> list[str]:
        """What `choose` compares of a text of these words, `ScoredSpan.words`: by default the words themselves."""
        return list(words)

    def choose(self, candidates: Sequence[ScoredSpan], weights: Sequence[float], main_index: int | None) -> Choice:
        """
        Which candidate is committed.

        Args:
            candidates (`list[ScoredSpan]`): in the order in which ties are broken; some may not be possible
                (`is_possible`), and must not win.
            weights (`list[float]`): of the members, the main model first; positive.
            main_index (`int`, *optional*): the index of what the main model proposes.
        """
        nlls = self.nlls(candidates, len(weights))
        return lowest(candidates, nlls, [fused_score(of_one, weights) for of_one in nlls])

    def fuse(self, texts: Sequence[str]) -> str | None:
        """
        Of methods with whole answers: one that is committed in the place of these; `None`: the winner is committed.

        Args:
            texts (`list[str]`): what could be committed, the winner first, then by score.
        """
        return None

    def draft_method(self) -> SpanStrategy | None:
        """The method by which the members write an answer together, that stands beside their own; `None`: they do
        not. For whole answers."""
        return None

    def nlls(self, candidates: Sequence[ScoredSpan], num_members: int) -> list[list[float | None]]:
        """Per candidate and member, its mean NLL; `None` where there is nothing to score."""
        members = range(num_members)
        return [[mean_nll(span, member, self.config) for member in members] for span in candidates]

    def greedy_settings(self, num_words: int = 1) -> AdaFuseConfig:
        """The settings of a member that proposes so many greedy words."""
        return replace(
            AdaFuseConfig(commitment="fixed", num_branches=1, max_words=num_words),
            max_word_tokens=self.config.max_word_tokens,
            word_boundary=self.config.word_boundary,
        )


def lowest(candidates: Sequence[ScoredSpan], nlls: list[list[float | None]], scores: Sequence[float]) -> Choice:
    """The possible candidate of the lowest score; the first of equals."""
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
    if not is_number or not least <= value <= most or math.isinf(value):
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ValueError(f"`{name}` must be {kind} {bounds}, but is {value!r}. Leave it out for the default.")


def check_switch(name: str, value: Any) -> None:
    """
    Raises:
        ValueError: an option is not true or false.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, but is {value!r}. Leave it out for the default.")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """
    Raises:
        ValueError: an option is not one of these.
    """
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, but is {value!r}. Choose one of these.")
