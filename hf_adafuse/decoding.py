"""The loop of algorithm.md: propose, pool, score, commit. Knows members and the prompts' text; nothing of `generate()`.

Members act in turn, cheapest first: each scores what is on the table, then proposes, so that where it agrees with
another its tokens are already there, computed. At the end the earlier members score what came after them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .config import AdaFuseConfig
from .kv_cache import KeysValues
from .member import Member, MemberError
from .outputs import AdaFuseRound, cut_words
from .pool import Candidate, Pool
from .token_nodes import Node

State = tuple[list[int], KeysValues | None]  # a member's ids of a prompt, and their keys where its backend keeps them
StopCheck = Callable[["Prompt"], bool]


class AdaFuseDecodingError(RuntimeError):
    """
    A member failed in the middle of decoding: its forward pass raised, ran out of memory or gave NaN.

    Attributes:
        member (`str`): its name.
        round (`int`): the round, from 1; 0 while reading the prompts.
        texts (`list[str]`): the text committed so far, per prompt.
        sequences (`list[list[int]]`): the main model's ids so far, per prompt, the prompt's included.
    """

    def __init__(
        self, member: str, reason: str, round_number: int, texts: list[str], sequences: list[list[int]]
    ) -> None:
        super().__init__(member, reason, round_number, texts, sequences)
        self.member, self.round, self.texts, self.sequences = member, round_number, texts, sequences
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.member} failed in round {self.round}: {self.reason}. "
            f"The text committed so far is in the error's `texts`: {self.texts!r}"
        )

    @classmethod
    def of(cls, error: MemberError, round_number: int, prompts: list[Prompt]) -> AdaFuseDecodingError:
        texts, sequences = [prompt.text for prompt in prompts], [prompt.ids for prompt in prompts]
        return cls(error.member.name, str(error), round_number, texts, sequences)


@dataclass
class Prompt:
    """One row of the batch: the main model's ids as the caller sees them (padding included), and what became of it."""

    index: int
    ids: list[int]
    rounds: list[AdaFuseRound] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)  # per member
    is_finished: bool = False

    @property
    def text(self) -> str:
        return "".join(committed.text for committed in self.rounds)


@dataclass
class Decoder:
    """
    Decodes a batch of prompts with an ensemble.

    Args:
        members (`list[Member]`): the main model first; all have read their prompts.
        prompts (`list[Prompt]`)
        config (`AdaFuseConfig`)
        should_stop (`Callable`): asked after each new token of a prompt.
        on_commit (`Callable`): told the new ids of a prompt after each round.
        keep_logits (`bool`): keep the scores and logits of each committed token.
        keep_cache (`bool`): keep the main model's keys and values of each prompt.
    """

    members: list[Member]
    prompts: list[Prompt]
    config: AdaFuseConfig
    should_stop: StopCheck
    on_commit: Callable[[list[int]], None] = lambda ids: None
    keep_logits: bool = False
    keep_cache: bool = False

    def run(self) -> None:
        """Rounds until every prompt is finished. Prompts finish one by one and cost nothing from there on."""
        turns = sorted(range(len(self.members)), key=lambda k: self.members[k].cost)
        number = 0
        while rows := self._rows_with_room():
            number += 1
            try:
                pools = {row: Pool([member.vocabulary for member in self.members]) for row in rows}
                for k in turns:
                    self._propose(k, pools)
                for row, pool in pools.items():
                    self._drop_unfit(row, pool)
                log_probs = [self._score(k, pools) for k in range(len(self.members))]
                for row, pool in pools.items():
                    self._commit(row, pool, [scored[row] for scored in log_probs])
            except MemberError as error:
                raise AdaFuseDecodingError.of(error, number, self.prompts) from error.__cause__

    def _propose(self, k: int, pools: dict[int, Pool]) -> None:
        """Member k scores what is on the table, then proposes."""
        table = {
            row: [self._span(k, pool, c) for c in pool.ranked() if pool.can_commit(c) and self._fits(k, row, pool, c)]
            for row, pool in pools.items()
        }
        for row, proposals in self.members[k].take_turn(table).items():
            pools[row].add(k, proposals)

    def _score(self, k: int, pools: dict[int, Pool]) -> dict[int, dict[int, list[float]]]:
        """Per row: the log-probabilities under member k of every candidate that stays in the pool, by rank."""
        kept = {
            row: {rank: candidate for rank, candidate in enumerate(pool.ranked()) if candidate.dropped is None}
            for row, pool in pools.items()
        }
        spans = {row: [self._span(k, pools[row], candidate) for candidate in kept[row].values()] for row in pools}
        scored = self.members[k].score(spans)
        return {row: dict(zip(kept[row], scored[row], strict=True)) for row in pools}

    def _drop_unfit(self, row: int, pool: Pool) -> None:
        """Candidates that could not reach the caller, or that do not fit into a member's context, leave the pool."""
        for candidate in pool.ranked():
            unfit = [m.name for k, m in enumerate(self.members) if not self._fits(k, row, pool, candidate)]
            if not pool.can_commit(candidate):
                candidate.dropped = f"the tokenizer of {self.members[0].name} cannot represent it"
            elif unfit:
                candidate.dropped = f"it outgrows the context of {unfit[0]}"

    def _span(self, k: int, pool: Pool, candidate: Candidate) -> tuple[list[int], bool]:
        return pool.ids(k, candidate), candidate.ends

    def _fits(self, k: int, row: int, pool: Pool, candidate: Candidate) -> bool:
        return self.members[k].fits(row, pool.ids(k, candidate))

    def _commit(self, row: int, pool: Pool, log_probs: list[dict[int, list[float]]]) -> None:
        """Append the winner to the prefix of every member, as far as no stopping criterion fires."""
        winner = pool.settle(self.config, log_probs)
        rank = None if winner is None else pool.ranked().index(winner)
        if winner is None:
            word = self.members[0].propose_word(row)
            winner = Candidate(word.text, word.words, word.ends, {0: list(word.ids)}, (0, 0), [0])
            if not all(self._fits(k, row, pool, winner) for k in range(len(self.members))):
                self._stop_at_context(
                    row, [k for k in range(len(self.members)) if not self._fits(k, row, pool, winner)]
                )
                return
        main, prompt = self.members[0], self.prompts[row]
        ids = pool.ids(0, winner)
        nodes = [main.root(row), *main.nodes(row, ids)]
        tokens = ids + ([main.best_eos(nodes[-1])] if winner.ends else [])
        num_taken = self._append(prompt, tokens, nodes)
        is_whole = num_taken == len(tokens)
        text = winner.text if num_taken >= len(ids) else main.vocabulary.text(ids[:num_taken])
        prompt.rounds.append(
            AdaFuseRound(
                text=text,
                words=cut_words(list(winner.words), text),
                ends=winner.ends and is_whole,
                proposer=min(winner.proposers),
                winner=rank,
                candidates=pool.trace(),
                margins=pool.margins,
                num_tokens=num_taken,
                is_whole=is_whole,
            )
        )
        for k in sorted(winner.proposers):
            self.members[k].num_wins += 1
        for k, member in enumerate(self.members):
            if k == 0:
                member.commit(row, ids[:num_taken])
            elif is_whole:
                member.commit(row, pool.ids(k, winner))
        prompt.is_finished = prompt.is_finished or (winner.ends and is_whole)
        self.on_commit(tokens[:num_taken])

    def _append(self, prompt: Prompt, tokens: list[int], nodes: list[Node]) -> int:
        """Take the tokens one by one until a criterion fires; returns how many were taken."""
        for taken, (token, node) in enumerate(zip(tokens, nodes, strict=False), start=1):
            prompt.ids.append(token)
            if self.keep_logits:
                prompt.scores.append(node.reading.scores)
                prompt.logits.append(node.logits)  # type: ignore[arg-type]
            if self.should_stop(prompt):
                prompt.is_finished = True
                return taken
        return len(tokens)

    def _rows_with_room(self) -> list[int]:
        """The unfinished prompts; one that has filled a member's context is finished here."""
        for prompt in self.prompts:
            full = [k for k, m in enumerate(self.members) if not prompt.is_finished and not m.has_room(prompt.index)]
            if full:
                self._stop_at_context(prompt.index, full)
        self._tidy()
        return [prompt.index for prompt in self.prompts if not prompt.is_finished]

    def _stop_at_context(self, row: int, full: list[int]) -> None:
        member = self.members[full[0]]
        self.prompts[row].is_finished = True
        warnings.warn(
            f"Generation of prompt {row} stopped early: the text outgrows the context of {member.name} "
            f"({member.max_length} tokens). What was generated is kept.",
            UserWarning,
            stacklevel=2,
        )

    def _tidy(self) -> None:
        """Finished prompts leave the batch; the caches close their holes."""
        finished = {prompt.index for prompt in self.prompts if prompt.is_finished}
        for member in self.members:
            if self.keep_cache:
                for row in finished.intersection(member.tree.active):
                    self.prompts[row].states.append((member.tree.rows[row].ids, member.tree.keys_values(row)))
            member.tree.drop(finished)
            if member.tree.active:
                member.tree.compact()
