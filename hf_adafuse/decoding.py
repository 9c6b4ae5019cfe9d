"""The loop of algorithm.md: propose, pool, score, commit. Knows members and the prompts' text; nothing of `generate()`.

Members act in turn, cheapest first: each scores what is on the table, then proposes, so that where it agrees with
another its tokens are already there, computed. At the end the earlier members score what came after them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from .config import AdaFuseConfig
from .look_ahead import MAX_ROUNDS, WinRecord, pays
from .member import Member, MemberError
from .outputs import AdaFuseRound, cut_words
from .pool import Candidate, Pool
from .progress import AdaFuseDecodingError, Prompt
from .proposals import Proposals, Walk
from .token_nodes import Node

T = TypeVar("T")
StopCheck = Callable[[Prompt], bool]
# The share of the waiting prompts below which a member gives way: the best of several values, by passes counted.
_STAY = 0.4
Span = tuple[list[int], bool]
# One prompt's rounds, as far as they get until they need nodes of member k read: it yields `(k, nodes)`.
Loop = Generator[tuple[int, list[Node]], None, T]


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
        max_length (`int`, *optional*): how many ids a prompt has at the end, if nothing stops it before.
        keep_logits (`bool`): keep the scores and logits of each committed token.
        keep_cache (`bool`): keep the main model's keys and values of each prompt.
    """

    members: list[Member]
    prompts: list[Prompt]
    config: AdaFuseConfig
    should_stop: StopCheck
    on_commit: Callable[[list[int]], None] = lambda ids: None
    max_length: int | None = None
    keep_logits: bool = False
    keep_cache: bool = False

    def __post_init__(self) -> None:
        self._record = WinRecord()  # of whoever goes first

    def run(self) -> None:
        """
        Every prompt runs its own rounds. What prompts need of the same member at the same time goes through it in one
        pass; those that finish leave the batch.
        """
        loops = {prompt.index: self._decode(prompt) for prompt in self.prompts}
        waiting: list[dict[int, list[Node]]] = [{} for _ in self.members]
        ready, k = list(loops), 0
        while True:
            for row in ready:
                if (need := next(loops[row], None)) is not None:
                    waiting[need[0]][row] = need[1]
            self._leave({row for row in ready if self.prompts[row].is_finished})
            k = _next_member(waiting, k)
            if not waiting[k]:
                return
            try:
                self.members[k].read(waiting[k])
            except MemberError as error:
                number = max(len(self.prompts[row].rounds) for row in waiting[k]) + 1
                raise AdaFuseDecodingError.of(error, number, self.prompts) from error.__cause__
            ready = [row for row, nodes in waiting[k].items() if all(node.reading is not None for node in nodes)]
            waiting[k] = {row: nodes for row, nodes in waiting[k].items() if row not in ready}

    def _decode(self, prompt: Prompt) -> Loop[None]:
        """The rounds of one prompt."""
        row, members = prompt.index, self.members
        first, *others = sorted(range(len(members)), key=lambda k: members[k].cost(row))
        while self._has_room(prompt):
            pool = Pool([member.vocabulary for member in members])
            asked: list[int] = []
            drafts = [pool.encode(first, text) for k in others if (text := members[k].foreseen(row))]
            best = yield from _ask(first, members[first].take_turn(row, [], drafts), asked)
            pool.add(first, best)
            ahead = (yield from self._propose_ahead(first, prompt, pool, best, asked)) if others else []
            for k in others:
                drafts = [[token for text in texts for token in pool.encode(k, text)] for texts in ahead]
                turn = members[k].take_turn(row, self._table(k, row, pool), drafts)
                pool.add(k, (yield from _ask(k, turn)))
            self._drop_unfit(row, pool)
            log_probs = []
            for k, member in enumerate(members):
                spans = self._spans(k, pool)
                scored = yield from _ask(k, member.score(row, list(spans.values())))
                log_probs.append(dict(zip(spans, scored, strict=True)))
            winner = pool.settle(self.config, log_probs) or (yield from self._last_resort(row, pool))
            if winner is not None:
                self._record.add(best.margins[-1], winner is pool.best_of(first))
                self._commit(prompt, pool, winner)

    def _propose_ahead(
        self, k: int, prompt: Prompt, pool: Pool, proposals: Proposals, asked: list[int]
    ) -> Loop[list[list[str]]]:
        """
        Member k proposes the next rounds as if its best candidates had won, where that is likely to pay; returns what
        it proposed, each as the texts of all rounds up to it. Not after a turn without a pass: it is ahead already.
        Not where its tree, and with it the cache, would grow too large. Not in a batch: there its tokens ride.
        """
        member, chains, texts, ids = self.members[k], list[list[str]](), list[str](), list[int]()
        saved = sum(other.times.mean(2) for other in self.members if other is not member)
        turn_cost, odds, length = sum(map(member.times.mean, asked)), 1.0, len(prompt.ids)
        is_alone = sum(not other.is_finished for other in self.prompts) == 1
        for _ in range(MAX_ROUNDS if asked and is_alone else 0):
            best = proposals.spans[0]
            odds *= self._record.odds(proposals.margins[-1]) if proposals.margins else 0.0
            length += len(pool.encode(0, best.text))
            is_last = best.ends or not best.ids or (self.max_length is not None and length >= self.max_length)
            if is_last or member.slack(prompt.index) < sum(asked) or not pays(odds, turn_cost, saved):
                break
            ids, texts = ids + list(best.ids), [*texts, best.text]
            proposals = yield from _ask(k, member.propose_after(prompt.index, ids))
            chains += [[*texts, span.text] for span in proposals.spans]
        return chains

    def _table(self, k: int, row: int, pool: Pool) -> list[Span]:
        """What member k can score before its own turn."""
        return [
            (pool.ids(k, candidate), candidate.ends)
            for candidate in pool.ranked()
            if pool.can_commit(candidate) and self._fits(k, row, pool, candidate)
        ]

    def _spans(self, k: int, pool: Pool) -> dict[int, Span]:
        """By rank, all that stays in the pool, in member k's tokens."""
        return {
            rank: (pool.ids(k, candidate), candidate.ends)
            for rank, candidate in enumerate(pool.ranked())
            if candidate.dropped is None
        }

    def _drop_unfit(self, row: int, pool: Pool) -> None:
        """Candidates that could not reach the caller, or that do not fit into a member's context, leave the pool."""
        for candidate in pool.ranked():
            unfit = [m for k, m in enumerate(self.members) if not self._fits(k, row, pool, candidate)]
            if not pool.can_commit(candidate):
                candidate.dropped = f"the tokenizer of {self.members[0].name} cannot represent it"
            elif unfit:
                candidate.dropped = f"it outgrows {unfit[0].limit} of {unfit[0].name}"

    def _fits(self, k: int, row: int, pool: Pool, candidate: Candidate) -> bool:
        return self.members[k].fits(row, pool.ids(k, candidate))

    def _last_resort(self, row: int, pool: Pool) -> Loop[Candidate | None]:
        """Every candidate is forbidden: the main model's greedy word, or `None`, and the end, if it does not fit."""
        word = yield from _ask(0, self.members[0].propose_word(row))
        winner = Candidate(word.text, word.words, word.ends, {0: list(word.ids)}, (0, 0), [0])
        unfit = [k for k in range(len(self.members)) if not self._fits(k, row, pool, winner)]
        if unfit:
            self._stop_at_context(row, unfit)
            return None
        return winner

    def _commit(self, prompt: Prompt, pool: Pool, winner: Candidate) -> None:
        """Append the winner to the prefix of every member, as far as no stopping criterion fires."""
        main, row, ranked = self.members[0], prompt.index, pool.ranked()
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
                winner=ranked.index(winner) if winner in ranked else None,
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
                # Copies: each is a row of a tensor of the whole pass.
                prompt.scores.append(node.reading.scores.clone())
                prompt.logits.append(node.logits.clone())  # type: ignore[union-attr]
            if self.should_stop(prompt):
                prompt.is_finished = True
                return taken
        return len(tokens)

    def _has_room(self, prompt: Prompt) -> bool:
        """Whether the prompt goes on; one that has filled a member's context is finished here."""
        full = [k for k, m in enumerate(self.members) if not prompt.is_finished and not m.has_room(prompt.index)]
        if full:
            self._stop_at_context(prompt.index, full)
        return not prompt.is_finished

    def _stop_at_context(self, row: int, full: list[int]) -> None:
        member = self.members[full[0]]
        self.prompts[row].is_finished = True
        warnings.warn(
            f"Generation of prompt {row} stopped early: the text outgrows {member.limit} of {member.name} "
            f"({member.max_length} tokens). What was generated is kept.",
            UserWarning,
            stacklevel=2,
        )

    def _leave(self, finished: set[int]) -> None:
        """Finished prompts leave the batch."""
        for member in self.members:
            if self.keep_cache:
                for row in sorted(finished):
                    self.prompts[row].states.append((member.tree.rows[row].ids, member.tree.keys_values(row)))
            member.tree.drop(finished)


def _next_member(waiting: list[dict[int, list[Node]]], current: int) -> int:
    """Whose pass is next: the same member's while many prompts wait for it, else the one's that most wait for."""
    if len(waiting[current]) > _STAY * sum(map(len, waiting)):
        return current
    return max(range(len(waiting)), key=lambda k: len(waiting[k]))


def _ask(k: int, walk: Walk[T], asked: list[int] | None = None) -> Loop[T]:
    """A member's walk, its needs marked with the member's number. `asked` is told how many nodes each need has."""
    try:
        nodes = next(walk)
        while True:
            if asked is not None:
                asked.append(len(nodes))
            yield k, nodes
            nodes = next(walk)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
