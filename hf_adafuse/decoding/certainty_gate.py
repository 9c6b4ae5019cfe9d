"""Words of which the main model is certain are committed without asking the others, who read them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .pool import Candidate, Pool
from .proposer import Proposals, Proposer
from .requests import ForwardRequest, Requests
from .round import Round, WrittenText
from .scoring import span_nll
from .selector import confidences_of
from .strategies.strategy import ALONE, SpanStrategy


@dataclass(eq=False)
class CertaintyGate(Round[WrittenText]):
    """
    A round of the main model alone; where it is not certain of a word, the round of all members that it wraps.

    Args:
        members (`list[Member]`): the main model first.
        proposer (`Proposer`): the main model's.
        strategies (`list[SpanStrategy]`): per prompt; they say what is certain.
        otherwise (`Round`): the round that is run where nothing is certain.
    """

    proposer: Proposer
    strategies: Sequence[SpanStrategy]
    otherwise: Round[WrittenText]

    def run(self, text: WrittenText) -> Requests[Pool]:
        pool = yield from super().run(text)
        if pool.winner is None:
            pool = yield from self.otherwise.run(text)
        return pool

    def propose(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """What the method says that the main model is certain of."""
        strategy = self.strategies[text.prompt.index]
        span = yield from strategy.propose_alone(self.proposer, text.node(0))
        if span is not None:
            pool.add(0, Proposals([span], []))
            (candidate,) = pool.ranked()
            # Members with the same tokenizer take its ids, as if they had proposed them: copies of a model stay copies.
            candidate.ids |= {k: list(span.ids) for k, one in enumerate(self.members) if one.has_main_tokenizer}

    def score(self, text: WrittenText, pool: Pool) -> Requests[None]:
        """Give the candidates their log-probabilities under the main model alone."""
        text.drop_unfit(pool)
        main, index = self.members[0], text.prompt.index
        for candidate in pool.ranked():
            if candidate.dropped is None:
                span = text.span(0, pool, candidate)
                if needed := main.needed_to_score(index, [span]):  # of the end only the most likely id is known
                    yield ForwardRequest(0, needed)
                (candidate.log_probs[0],) = main.log_probs(index, [span])

    def choose(self, text: WrittenText, pool: Pool) -> Requests[Candidate | None]:
        """The candidate, if there is one that can be committed."""
        yield from ()
        for candidate in pool.ranked():
            if candidate.dropped is None:
                log_probs = candidate.log_probs[0]
                candidate.nlls[0] = span_nll(log_probs)
                candidate.confidences = confidences_of(candidate, [log_probs], pool.vocabularies[:1], [1.0])
                candidate.score = candidate.nlls[0] or 0.0
                candidate.decided_by = [candidate.score]
                pool.criterion = ALONE
                pool.weights = [1.0, *[0.0] * (len(self.members) - 1)]
                return candidate
        return None
