"""How members propose in the methods `adafuse` and `words`: spans of adaptive length, with branches at an uncertain
word (arXiv 2601.06022, section 3). The two methods differ in how they compare what is proposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...members.member import Member
from ...settings.config_checks import ADAPTIVE_SPAN_FIELDS
from ...trees.nodes import Node
from ..proposer import Proposal, Proposer
from ..requests import Requests
from ..scoring import first_lowest
from ..word_splitter import WordSplitter
from .strategy import SampledPart, SpanStrategy


@dataclass
class AdaptiveSpans(SpanStrategy):
    """Proposes as the fields of [`AdaFuseConfig`] say. A subclass says in `choose` how candidates are compared."""

    samples = SampledPart.WORDS
    uses: ClassVar[tuple[str, ...]] = ADAPTIVE_SPAN_FIELDS
    num_words: int = field(default=1, init=False)

    def make_proposer(self, member_index: int, members: Sequence[Member], splitter: WordSplitter) -> Proposer:
        return Proposer(member_index, members[member_index], self.config, splitter)

    def propose_alone(self, main: Proposer, root: Node) -> Requests[Proposal | None]:
        if self.config.certainty_gate is None:
            return None
        span = yield from main.propose_certain(root, self.config.certainty_gate)
        return span


def lowest_by_margin(scores: Sequence[float], main_index: int | None, margin: float) -> int | None:
    """
    The index of the lowest score, or `main_index` unless another one is lower by more than a positive `margin` (nats);
    `None` where no score is finite.
    """
    if not scores or min(scores) == math.inf:
        return None
    best = first_lowest(scores)
    is_kept = main_index is not None and margin > 0 and scores[main_index] - scores[best] <= margin
    return main_index if is_kept else best
