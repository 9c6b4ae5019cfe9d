"""The log-likelihood of given answers under every member of a plan. Called by [`AdaFuseEnsemble.score`]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..confidence.answer_score import AnswerScore
from ..decoding.batch_slots import BatchSlots
from ..decoding.long_spans import long_log_probs
from ..decoding.member_weights import MemberWeights
from ..decoding.pool import Candidate, Pool
from ..decoding.progress import AdaFuseDecodingError, Prompt
from ..decoding.requests import Requests, run_on_each_member
from ..decoding.scheduler import Scheduler, nothing_likely
from ..decoding.selector import confidences_of
from ..decoding.word_splitter import WordSplitter
from ..members.member import MemberError, Span
from ..members.templates import is_unicode
from .plan import CallPlan
from .run import make_members, make_prompts, prompt_evidence, sharing_prefixes

Answers = list[list[str]]


def read_answers(answers: Any, num_prompts: int, ends: bool) -> Answers:
    """
    The answers to each prompt, checked.

    Args:
        answers (`list`): per prompt a list of texts. A single prompt may have the list of its texts alone.
        num_prompts (`int`): the number of prompts.
        ends (`bool`): whether the end of the text is scored after each; then a text may be empty.

    Raises:
        ValueError: they are not that.
    """
    rows = [answers] if num_prompts == 1 and _are_texts(answers) else answers
    if not isinstance(rows, (list, tuple)) or not all(_are_texts(row) for row in rows):
        raise ValueError(
            f"`answers` must be one list of texts per prompt, each of at least one, but is {answers!r}. Give every "
            "prompt its own list, also of one answer."
        )
    if len(rows) != num_prompts:
        raise ValueError(
            f"`answers` must be one list of texts per prompt, but is {len(rows)} for {num_prompts} prompts. Pair them."
        )
    for row, texts in enumerate(rows):
        for text in texts:
            if not text and not ends:
                raise ValueError(
                    f"`answers[{row}]` must be texts that are not empty, but holds ''. Leave it out, or pass "
                    "`ends=True` to score that the text ends at once."
                )
            if not is_unicode(text):
                raise ValueError(f"`answers[{row}]` must be text in UTF-8, but holds {text!r}. Repair or drop it.")
    return [list(row) for row in rows]


def score_call(
    plan: CallPlan,
    answers: Answers,
    ends: bool,
    on_scores: Callable[[int, list[AnswerScore]], None] | None = None,
) -> list[list[AnswerScore]]:
    """
    Score the answers to the prompts of a plan. Logits processors, stopping criteria and sampling play no part in it.

    Args:
        plan (`CallPlan`): the plan of the call.
        answers (`list[list[str]]`): per prompt, as of [`read_answers`].
        ends (`bool`): whether the end of the text after each answer is scored too.
        on_scores (`Callable`, *optional*): told the row of each prompt and its scores when all members have read it.

    Returns:
        per prompt and answer, its score.

    Raises:
        ValueError: an answer that does not fit into a member's context behind its prompt.
        AdaFuseDecodingError: a member failed.
    """
    plan = replace(plan, members=[replace(member, processors=[]) for member in plan.members])
    with sharing_prefixes(plan):
        return _Scores(plan, answers, ends, on_scores).run()


class _Scores:
    """The scores of one call, as they come."""

    def __init__(
        self, plan: CallPlan, answers: Answers, ends: bool, on_scores: Callable[[int, list[AnswerScore]], None] | None
    ) -> None:
        self._plan = plan
        self._answers = answers
        self._on_scores = on_scores
        self._prompts = make_prompts(plan)
        self._members = make_members(plan)
        self._vocabularies = [member.vocabulary for member in self._members]
        splitter = WordSplitter(plan.config.max_word_tokens, plan.config.word_boundary)
        self._pools = [Pool(self._vocabularies) for _ in answers]
        self._candidates = [
            [pool.add_text(text, tuple(splitter.split(text)) if text else (), ends) for text in texts]
            for pool, texts in zip(self._pools, answers, strict=True)
        ]
        self._check_lengths()
        self._found: list[list[AnswerScore]] = [[] for _ in answers]
        self._slots = BatchSlots(self._members, self._prompts, plan.max_batch_size, self._tell, False)

    def run(self) -> list[list[AnswerScore]]:
        """All of them."""
        likely = [nothing_likely] * len(self._members)
        scheduler = Scheduler(self._members, likely, self._refill)
        try:
            scheduler.run(self._refill())
        except MemberError as error:
            raise AdaFuseDecodingError.of(error, 0, self._prompts) from error.__cause__
        return self._found

    def _check_lengths(self) -> None:
        """
        Raises:
            ValueError: an answer does not fit into a member's context behind its prompt.
        """
        for row, candidates in enumerate(self._candidates):
            for number, candidate in enumerate(candidates):
                for k, (member, planned) in enumerate(zip(self._members, self._plan.members, strict=True)):
                    length = len(planned.prompts[row]) + len(self._pools[row].encode_for(k, candidate))
                    if member.max_length is not None and length > member.max_length:
                        raise ValueError(
                            f"`answers[{row}][{number}]` must fit behind its prompt into {member.limit} of "
                            f"{member.name}, {member.max_length} tokens, but both are {length}. Shorten one of them."
                        )

    def _refill(self, advanced: Iterable[int] = ()) -> Mapping[int, Requests[None]]:
        """As of [`Decoder`]: prompts whose answers are scored leave, and waiting ones take their slots."""
        self._slots.leave(advanced)
        return {prompt.index: self._scoring(prompt) for prompt in self._slots.fill()}

    def _scoring(self, prompt: Prompt) -> Requests[None]:
        """Every member reads all answers to a prompt."""
        candidates = list(dict.fromkeys(self._candidates[prompt.index]))
        parts = [self._reading(k, prompt, candidates) for k in range(len(self._members))]
        found = yield from run_on_each_member(parts, [member.device_key for member in self._members])
        evidence = [of_member[prompt.index] for of_member in prompt_evidence(self._plan, self._members)]
        weights = MemberWeights(self._plan.config, evidence, len(self._members)).weights
        scores = {
            candidate: self._score(candidate, [of_member[number] for of_member in found], weights)
            for number, candidate in enumerate(candidates)
        }
        self._found[prompt.index] = [scores[candidate] for candidate in self._candidates[prompt.index]]
        prompt.finish("stop")

    def _reading(
        self, member_index: int, prompt: Prompt, candidates: Sequence[Candidate]
    ) -> Requests[list[list[float]]]:
        """Per candidate, the log-probabilities of a member's ids of it, and of the end: in one pass, unless that would
        hold too many logits."""
        member, pool = self._members[member_index], self._pools[prompt.index]
        spans = [Span(pool.encode_for(member_index, candidate), candidate.ends) for candidate in candidates]
        log_probs = yield from long_log_probs(member_index, member, prompt.index, spans)
        return log_probs

    def _score(self, candidate: Candidate, log_probs: list[list[float]], weights: Sequence[float]) -> AnswerScore:
        """The score of an answer, given its log-probabilities under each member."""
        return AnswerScore(
            text=candidate.text,
            ends=candidate.ends,
            log_probs=log_probs,
            num_bytes=len(candidate.text.encode()) + candidate.ends,
            words=list(candidate.words),
            confidences=confidences_of(candidate, log_probs, self._vocabularies, weights),
            lossy=sorted(candidate.lossy),
        )

    def _tell(self, row: int) -> None:
        if self._on_scores is not None:
            self._on_scores(row, self._found[row])


def _are_texts(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(text, str) for text in given)
