"""DeePEn: the members' distributions meet in a space relative to shared tokens, and are searched back from there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...members.distributions import Distribution, have_shared_pieces
from ...members.relative_space import relative_tables
from ...members.vocabulary import Vocabulary
from .strategy import check_number
from .token_strategy import NextToken, TokenStrategy, ranked

# Tokens of the main model that are on record and may be committed where the first ones have no text.
_MOST_TRIED = 10
# The largest `learning_rate`. At 100 a step of AdamW, whose weight decay is 0.01, takes away all of a logit. Beyond 200
# the logits grow with every step, and overflow.
_MOST_RATE = 100


@dataclass
class DeePEn(TokenStrategy):
    """
    Per token of the main model: r_k = p_k P_k, each member's distribution in the space of the anchors
    ([`relative_tables`]); r their weighted mean. From the main model's logits, `num_steps` steps of AdamW, at a rate
    that falls by a cosine to a quarter, make z' with the smallest KL(r || softmax(z') P_main), the mean over anchors;
    the token of the largest z' is committed. The others read the text since the last word began as their tokenizers
    have it whole. Where the main model would end the text, it decides alone; with `learning_rate=0` always.
    The trace has the main model's log-probabilities alone: of the others no single one goes in. With nearly all weight
    on the main model the text is nearly its own: the search takes steps of the rate, however small the loss.

    Source: the released code, read. It has no bound on the number of anchors, and drops a member that takes more than
    5 seconds from a step.

    Args:
        learning_rate (`float`, *optional*, defaults to 0.15): the size of a step of the search, at most 100.
        num_steps (`int`, *optional*, defaults to 5): the number of steps of the search.
        num_anchors (`int`, *optional*): how many tokens that all vocabularies share are anchors. `None`: all of them,
            or as many as keep each table below 1 GB.
    """

    learning_rate: float = 0.15
    num_steps: int = 5
    num_anchors: int | None = None

    is_retokenized = True

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, 0, _MOST_RATE)
        check_number("num_steps", self.num_steps, 1, is_integer=True)
        if self.num_anchors is not None:
            check_number("num_anchors", self.num_anchors, 1, is_integer=True)

    def check_members(self, vocabularies: Sequence[Vocabulary]) -> None:
        if self.learning_rate > 0 and not have_shared_pieces(vocabularies):
            raise ValueError(
                'The vocabularies must have tokens in common with method "deepen", but have none. Choose another '
                "method."
            )

    def asks(self, main: Distribution) -> bool:
        return self.learning_rate > 0 and main.logprobs.top[0] not in main.eos_ids

    def choose(self, members: Sequence[Distribution | None], weights: Sequence[float]) -> list[NextToken]:
        main = members[0]
        voting = [k for k, member in enumerate(members) if member is not None]
        assert main is not None  # it writes the text
        scores = main.logprobs.scores.float()
        if len(voting) > 1 and self.asks(main):
            scores = self._search([member for member in members if member is not None], [weights[k] for k in voting])
        log_probs = scores.double().log_softmax(-1)
        values, ids = log_probs.topk(min(_MOST_TRIED, len(log_probs)))
        ends = set(main.eos_ids)
        found = []
        for value, token in sorted(zip(values.tolist(), ids.tolist(), strict=True), key=lambda pair: pair[1]):
            data = None if token in ends else main.vocabulary.piece(token)
            if data == b"" or main.logprobs.forbids(token):
                continue  # it has no text, or must not be said
            own: list[float | None] = [None] * len(members)
            own[0] = main.log_prob(token)
            found.append(NextToken(data, [] if data is None else [token], -value, own))
        return ranked(found)

    def _search(self, members: Sequence[Distribution], weights: Sequence[float]) -> torch.Tensor:
        """z', of shape `(vocab_size,)`: scores of the main model's tokens whose distribution is close to the members'
        mean in the relative space."""
        tables = relative_tables(members, self.num_anchors)
        total = math.fsum(weights)
        device = tables[0].device
        parts = []
        for member, table, weight in zip(members, tables, weights, strict=True):
            probabilities = member.logprobs.scores.float().softmax(-1)[: len(table)]
            parts.append((weight / total) * (probabilities.to(table.device) @ table).to(device))
        target = torch.stack(parts).sum(0)
        main = members[0].logprobs.scores.float().to(device)
        with torch.inference_mode(False), torch.enable_grad():
            # A forbidden token keeps its probability of nothing.
            searched = main.detach().clone().clamp(min=torch.finfo(torch.float32).min).requires_grad_()
            optimizer = torch.optim.AdamW([searched], lr=self.learning_rate)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, self.num_steps, eta_min=self.learning_rate / 4
            )
            goal = target.detach().clone()
            table = tables[0].detach().clone() if tables[0].is_inference() else tables[0]
            for _ in range(self.num_steps):
                optimizer.zero_grad()
                reached = searched.softmax(-1)[: len(table)] @ table
                loss = torch.nn.functional.kl_div(reached.clamp(min=1e-30).log(), goal, reduction="sum") / len(goal)
                (searched.grad,) = torch.autograd.grad(loss, searched)
                optimizer.step()
                schedule.step()
        return searched.detach()
