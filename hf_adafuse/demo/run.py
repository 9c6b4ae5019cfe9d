"""What `hf-adafuse demo` shows: one question round by round, then a table of methods."""

from __future__ import annotations

import json as json_format
import sys
from typing import Any, TextIO

from .. import AdaFuseConfig
from ..rounds.plain_json import with_nulls
from . import NAMES, data, load_members
from .job_progress import Progress
from .methods import NUM_ALONE, Method, ModelPair, Result, answer, difference, fuse, is_right, methods
from .tables import aligned, counted
from .threads import threads

# The number of questions among which the example is chosen.
_EXAMPLES = 64
_HEADING = ("method", "members", "accuracy", "words/round", "1 / 2 / 3 words", "passes/word", "seconds")


def run_demo(
    questions: int | None = data.DEFAULT_QUESTIONS,
    json: bool = False,
    stream: TextIO | None = None,
    num_members: int = 3,
    folder: Any = None,
) -> dict[str, Any]:
    """
    Run the demo.

    Args:
        questions (`int`, *optional*, defaults to 500): how many questions of the test set are asked. `None`: all 974.
        json (`bool`, *optional*, defaults to `False`): whether to write one JSON object instead of text.
        stream (`TextIO`, *optional*): where to write. By default standard output.
        num_members (`int`, *optional*, defaults to 3): the number of members, 2 or 3.
        folder (`str` or `Path`, *optional*): the folder that holds the members. By default the package's own.

    Returns:
        `dict`: what `json=True` writes: `questions`, `asked`, `example` and `results`.

    Raises:
        ValueError: `questions` is below 1 or above 974, `num_members` is not 2 or 3, or `folder` does not hold members.
    """
    stream = stream or sys.stdout
    if num_members not in (2, 3):
        raise ValueError(f"`num_members` must be 2 or 3, but is {num_members!r}. One member is no ensemble.")
    asked = data.held_out()
    if questions is not None and not 1 <= questions <= len(asked):
        raise ValueError(
            f"`questions` must be from 1 to {len(asked)}, but is {questions!r}. Leave it out for the default."
        )
    asked = asked[:questions]
    members = load_members(num_members, folder)
    # Matrices this small are as fast on one thread, and far faster where other programs want the cores.
    with threads(1):
        example = choose_example(members, data.held_out(_EXAMPLES))
        if not json:
            stream.write(show_example(example) + "\n")
            stream.flush()
        results = measure(members, asked)
    report: dict[str, Any] = with_nulls(
        {
            "questions": len(asked),
            "asked": [{"prompt": q.prompt, "answer": q.answer, "levels": q.fact.levels} for q in asked],
            "example": example,
            "results": [result.to_dict() for result in results],
        }
    )
    if json:
        stream.write(json_format.dumps(report, ensure_ascii=False, allow_nan=False))
    else:
        stream.write(show_table(results) + "\n\n" + show_differences(results, asked))
    stream.write("\n")
    return report


def measure(members: list[ModelPair], asked: list[data.DemoQuestion]) -> list[Result]:
    """Have every method answer every question, with progress on standard error."""
    lines = methods(len(members))
    bar = Progress(len(lines) * len(asked), "questions")
    results = []
    for method in lines:
        bar.note(method.name)
        results.append(answer(method, members, asked, on_batch=bar.add))
    bar.close()
    return results


def choose_example(members: list[ModelPair], asked: list[data.DemoQuestion]) -> dict[str, Any]:
    """
    One question with the answers of the first two members and the rounds of AdaFuse. It is the question that shows
    most: AdaFuse is right, the fewest members are right alone, and then the most rounds were run.
    """
    alone = [answer(Method("", (index,), "greedy"), members, asked, num_alone=0).answers for index in (0, 1)]
    output = fuse(members[:2], [question.prompt for question in asked], AdaFuseConfig())
    texts = ["".join(committed.text for committed in rounds) for rounds in output.rounds]

    def worth(row: int) -> tuple[bool, int, int]:
        num_wrong = sum(not is_right(answers[row], asked[row]) for answers in alone)
        return is_right(texts[row], asked[row]), num_wrong, len(output.rounds[row])

    row = max(range(len(asked)), key=worth)
    return {
        "chosen_among": len(asked),
        "prompt": asked[row].prompt,
        "answer": asked[row].answer,
        "alone": [answers[row] for answers in alone],
        "adafuse": texts[row],
        "rounds": [committed.to_dict() for committed in output.rounds[row]],
    }


def show_example(example: dict[str, Any]) -> str:
    """The example as text, like Figure 1 of the paper: each round's candidates, their NLL under each member, and the
    winner."""
    fused, *alone = (text.strip() == example["answer"] for text in (example["adafuse"], *example["alone"]))
    lines = [
        f"One of {counted(example['chosen_among'], 'question')}. AdaFuse's answer is {'right' if fused else 'wrong'}. "
        f"Of the members' own answers {sum(alone)} of {len(alone)} are right.",
        "",
        example["prompt"],
        "",
    ]
    lines += [f"member {k} ({NAMES[k - 1]}) alone:{text}" for k, text in enumerate(example["alone"], 1)]
    lines += ["AdaFuse as in the paper, round by round (NLL in nats per token; the lowest mean wins):", ""]
    for number, committed in enumerate(example["rounds"], 1):
        rows: list[tuple[str, ...]] = [("", "candidate", "from", "NLL 1", "NLL 2", "mean")]
        for index, candidate in enumerate(committed["candidates"]):
            text = candidate["text"] + ("<end>" if candidate["ends"] else "")
            source = " and ".join(str(member + 1) for member in candidate["proposers"])
            nlls = ["-" if nll is None else f"{nll:.2f}" for nll in candidate["nlls"]]
            mark = ">" if index == committed["winner"] else ""
            rows.append((mark, repr(text), source, *nlls, f"{candidate['score']:.2f}"))
        lines += [f"round {number}", *aligned(rows, left=3), ""]
    lines.append(f"AdaFuse:{example['adafuse']}   (the right answer: {example['answer']})")
    return "\n".join(lines) + "\n"


def show_table(results: list[Result]) -> str:
    """The table: a line for each method."""
    rows: list[tuple[str, ...]] = [_HEADING]
    for result in results:
        has_rounds = result.words_per_round is not None and result.shares is not None
        rows.append(
            (
                result.method,
                "+".join(str(index + 1) for index in result.members),
                f"{result.accuracy.show(100)} %",
                f"{result.words_per_round:.2f}" if has_rounds else "-",
                " / ".join(f"{100 * share:.0f}" for share in result.shares.values()) + " %" if has_rounds else "-",  # type: ignore[union-attr]
                "-" if result.passes_per_word is None else f"{result.passes_per_word:.2f}",
                f"{result.seconds:.1f}",
            )
        )
    names = ", ".join(f"{index + 1} {NAMES[index]}" for index in sorted({i for one in results for i in one.members}))
    number = counted(results[0].accuracy.n, "question")
    title = f"{number} in phrasings unseen in training. Members: {names}."
    return "\n".join([title, "", *aligned(rows, left=2)])


def show_differences(results: list[Result], asked: list[data.DemoQuestion]) -> str:
    """What the table cannot tell: the differences between methods, question by question, and on which questions they
    come about."""
    everything = range(len(asked))
    torn = [row for row in everything if asked[row].fact.levels[:2] == ("torn", "torn")]
    others = [row for row in everything if row not in torn]
    pair = {result.method: result for result in results if result.members == [0, 1] or len(result.members) == 1}
    fixed = [result for name, result in pair.items() if name.startswith("fixed")]
    alone = [pair["member 1 alone"], pair["member 2 alone"]]
    best_fixed, better = (max(among, key=lambda result: result.accuracy.value) for among in (fixed, alone))
    lines = ["Members 1+2, question by question, in points:"]
    branched = pair["paper, B=3"]
    recommended = pair["recommended"]
    for name, one, other in (
        ("paper, B=3 minus B=1", branched, pair["paper, B=1"]),
        ("paper, B=3 minus best fixed", branched, best_fixed),
        ("paper, B=3 minus better member", branched, better),
        ("recommended minus better member", recommended, better),
        ("recommended minus paper, B=3", recommended, branched),
    ):
        parts = [difference(one, other, rows) for rows in (everything, torn, others)]
        whole, half, rest = (part.show(100, signed=True) for part in parts)
        known = counted(len(torn), "answer")
        lines.append(f"  {name}: {whole} (the {known} that both half know: {half}; the others: {rest})")
    alone_on = counted(min(NUM_ALONE, len(asked)), "question")
    lines.append(f"passes/word: one by one on {alone_on}, so rough; the end counts as a word. seconds: in batches.")
    return "\n".join(lines)
