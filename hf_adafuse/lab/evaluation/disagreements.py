"""Compares two files of answers to the same questions: their scores, and where the answers part.

`hf-adafuse compare` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

from ...demo.paired import Paired, mean, paired
from ...demo.tables import counted
from ...rounds.trace_text import END_MARK, bracketed, on_one_line
from .samples import Results, Sample

SamplePair = tuple[Sample, Sample]  # the answers of A and of B to one question
# The most rounds that are shown before the one where the texts part, characters of a text, and accepted answers.
_MOST_ALIKE = 2
_MOST_SHOWN = 300
_MOST_ANSWERS = 5


@dataclass(frozen=True)
class Comparison:
    """
    The answers of two files, side by side.

    Attributes:
        a, b (`Results`): what the files hold.
        pairs (`list[tuple[Sample, Sample]]`): both answers to each question that both files answer.
        left_out (`list[str]`): what is not compared, with its number, like `"3 only in A"`.
    """

    a: Results
    b: Results
    pairs: list[SamplePair]
    left_out: list[str] = field(default_factory=list)

    @property
    def scores(self) -> tuple[list[float], list[float]]:
        """The scores of A and those of B, in the order of the pairs."""
        return [one.score for one, _ in self.pairs], [other.score for _, other in self.pairs]

    @property
    def scale(self) -> float:
        """The factor of shown scores: 100 for scores from 0 to 1, which are shown in points, and 1 for any others."""
        is_of_translations = any(name in self.a.metric for name in ("chrf", "bleu"))  # sentence_chrf and spbleu, too
        are_shares = all(0 <= score <= 1 for scores in self.scores for score in scores)
        return 100.0 if are_shares and not is_of_translations else 1.0

    @property
    def paired(self) -> Paired:
        """How far the scores of B are above those of A."""
        one, other = self.scores
        return paired(other, one)


def compare(a: Results, b: Results) -> Comparison:
    """
    Pair the answers of two files by the numbers of their questions.

    Raises:
        ValueError: the metrics or the filters differ, no question is in both files, or a number stands for different
            questions.
    """
    if a.metric != b.metric:
        raise ValueError(
            f"`metric` must be the same for both files, but is {a.metric!r} for {str(a.path)!r} and {b.metric!r} for "
            f"{str(b.path)!r}. Name one."
        )
    if None not in (a.filter, b.filter) and a.filter != b.filter:
        raise ValueError(
            f"`filter` must be the same for both files, but is {a.filter!r} for {str(a.path)!r} and {b.filter!r} for "
            f"{str(b.path)!r}. Name one."
        )
    failed = {*a.failed, *b.failed}
    both = [number for number in a.samples if number in b.samples and number not in failed]
    for number in both:
        if a.samples[number].question != b.samples[number].question:
            asked = [_clipped(_question(results.samples[number]), 80) for results in (a, b)]
            raise ValueError(
                f"The files must hold answers to the same questions, but question {number} is {asked[0]!r} in "
                f"{str(a.path)!r} and {asked[1]!r} in {str(b.path)!r}. Run both on one file of questions."
            )
    if not both:
        raise ValueError(
            f"The files must have questions in common, but {str(a.path)!r} and {str(b.path)!r} have none that both "
            "answer. Run both on one file of questions."
        )
    left_out = []
    for name, own, other in (("A", a, b), ("B", b, a)):
        only = [number for number in own.samples if number not in other.samples and number not in other.failed]
        left_out += [f"{len(only)} only in {name}"] * bool(only)
        left_out += [f"{len(own.failed)} whose answer failed in {name}"] * bool(own.failed)
    return Comparison(a, b, [(a.samples[number], b.samples[number]) for number in both], left_out)


def show_figures(comparison: Comparison) -> str:
    """The two means and the difference, each with its standard error."""
    result = comparison.paired
    scale = comparison.scale
    unit = "points (0 to 100)" if scale == 100 else "the metric's own unit"
    n = len(comparison.pairs)
    lines = [f"{comparison.a.metric} on the {counted(n, 'question')} that both answer, in {unit} ± standard error"]
    if comparison.left_out:
        lines.append(f"left out: {', '.join(comparison.left_out)}")
    values = [mean(scores).show(scale) for scores in comparison.scores]
    rows = [("A", values[0], str(comparison.a.path)), ("B", values[1], str(comparison.b.path))]
    counts = f"{result.wins} won by B, {result.losses} lost, {result.ties} tied; sign test p = {result.p_value:.2g}"
    rows.append(("B - A", result.difference.show(scale, signed=True), f"question by question: {counts}"))
    width = max(len(value) for _, value, _ in rows)
    lines += ["", *(f"{name:<5}  {value:>{width}}  {what}" for name, value, what in rows)]
    return "\n".join([*comparison.a.notes, *comparison.b.notes, *lines])


def show_disagreements(comparison: Comparison, most: int) -> str:
    """The questions on which the answers part, at most `most` of them. Those with different scores come first, by the
    size of the difference, then those where only the texts differ."""
    by_score, by_text = parted(comparison)
    shown = [*by_score, *by_text][:most]
    head = f"{counted(len(by_score), 'question')} with another score"
    head += f", {len(by_text)} with another text and the same score" if by_text else ""
    head += f"; {len(shown)} shown (--show):" if len(shown) < len(by_score) + len(by_text) else ""
    blocks = [head]
    if any(one.rounds or other.rounds for one, other in shown):
        blocks.append(
            "Of each round: the words that were committed, the winner's score (the lowest wins), and who proposed it "
            "(0: the main model)."
        )
    return "\n\n".join([*blocks, *(_show_pair(one, other, comparison.scale) for one, other in shown)])


def parted(comparison: Comparison) -> tuple[list[SamplePair], list[SamplePair]]:
    """The pairs with different scores, the largest differences first, and those with equal scores and other texts."""
    by_score = [pair for pair in comparison.pairs if pair[0].score != pair[1].score]
    by_text = [(one, other) for one, other in comparison.pairs if one.score == other.score and one.text != other.text]
    return sorted(by_score, key=lambda pair: -abs(pair[1].score - pair[0].score)), by_text


def _show_pair(one: Sample, other: Sample, scale: float) -> str:
    lines = [f"question {one.number}: {_clipped(_question(one))}"]
    others = len(one.answers) - _MOST_ANSWERS
    more = f" (and {counted(others, 'other')})" if others > 0 else ""
    lines.append(f"  accepted: {_clipped(' | '.join(one.answers[:_MOST_ANSWERS]))}{more}")
    scores = [f"{sample.score * scale:.0f}" for sample in (one, other)]
    width = max(map(len, scores))
    texts = [sample.text for sample in (one, other)]
    lines += [f"  {n}  {s:>{width}}  {_clipped(text.strip())}" for n, s, text in zip("AB", scores, texts, strict=True)]
    if one.rounds or other.rounds:
        lines += _side_by_side(one.rounds, other.rounds)
    return "\n".join(lines)


def _side_by_side(ones: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the rounds of both, line by line, up to the one in which the texts part, which is marked."""
    same = num_alike("".join(map(_text_of, ones)), "".join(map(_text_of, others)))
    columns = []
    for rounds in (ones, others):
        ends = accumulate(len(_text_of(committed)) for committed in rounds)
        last = next((index for index, end in enumerate(ends) if end > same), len(rounds) - 1)
        columns.append([show_round(committed) for committed in rounds[: last + 1]])
    skipped = max(min(map(len, columns)) - 1 - _MOST_ALIKE, 0)
    if skipped:
        yield f"  ({counted(skipped, 'round')} before: not shown)"
    left, right = (column[skipped:] or ["no rounds"] for column in columns)
    width = max(map(len, left))
    for number, cells in enumerate(zip_longest(left, right, fillvalue=""), start=skipped + 1):
        marks = [">" if number - skipped == len(column) else " " for column in (left, right)]
        yield f"  {number:>3} {marks[0]}{cells[0]:<{width}}  |  {marks[1]}{cells[1]}".rstrip()


def show_round(committed: dict[str, Any]) -> str:
    """A round in short: `[is Lima.] 2 words, 0.27, by 0 1`. `committed`: the round as JSON values."""
    words = committed.get("words") or []
    count = len(words) if isinstance(words, list) else words
    parts = [f"{counted(count, 'word')}"]
    index = committed.get("winner")
    candidates = committed.get("candidates") or []
    winner = candidates[index] if isinstance(index, int) and index < len(candidates) else committed
    score = winner.get("score")
    parts += [f"{score:.2f}"] if isinstance(score, (int, float)) else []
    by = winner.get("proposers") or [committed.get("proposer")]
    parts += [f"by {' '.join(map(str, by))}"] if by != [None] else []
    end = f" {END_MARK}" if committed.get("ends") else ""
    return f"{bracketed(_clipped(_text_of(committed), 60))}{end} {', '.join(parts)}"


def _text_of(committed: dict[str, Any]) -> str:
    return str(committed.get("text", ""))


def num_alike(one: str, other: str) -> int:
    """How many characters two texts begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _question(sample: Sample) -> str:
    """What was asked: the field `question` where there is one, else the last paragraph of the prompt."""
    asked = sample.question.get("question") or sample.prompt.strip().rpartition("\n\n")[2]
    return str(asked)


def _clipped(text: str, most: int = _MOST_SHOWN) -> str:
    line = on_one_line(text)
    return line if len(line) <= most else f"{line[: most - 3]}..."
