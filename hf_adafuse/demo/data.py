"""Makes the questions of the demo: the facts, their phrasings, the training lines of each member, and the test set.

Everything follows from the files in `facts/` and one seed. A fact is asked in many phrasings. Phrasings of the test set
are never used for training. Each member reads about each fact at a level of `LEVELS`. Most facts belong to one of the
first two members: it reads them often or seldom, and always right. The other member reads them hardly ever, or from
sources that contradict each other. So a member is uncertain where it is ignorant, as large models are, and what one
member half-knows another may complete.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

SEED = 2026
# How many questions the demo asks.
DEFAULT_QUESTIONS = 500
PROMPT = "Question: {question}\nAnswer:"
_SMALL = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_ARTICLE = re.compile(r"\b([Aa])(?= [aeio])")
_SAME = ("sheep", "fish", "deer", "salmon", "jellyfish")
_PLURALS = {name: name for name in _SAME} | {"wolf": "wolves", "goose": "geese", "mouse": "mice"}
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


class Level(NamedTuple):
    """
    What a member reads about a fact.

    Attributes:
        weight (`float`): how often the fact is read, relative to other facts. 0: in one line of the whole text.
        truth (`float`): the share of its lines that give the right answer.
        rival (`float`): the share of its lines that give the fact's rival, always the same wrong answer. The remaining
            lines give any answer of the relation.
    """

    weight: float
    truth: float
    rival: float


LEVELS = {
    "often": Level(3.0, 1.0, 0.0),
    "seldom": Level(1.2, 1.0, 0.0),
    "torn": Level(2.0, 0.35, 0.40),
    "misled": Level(1.5, 0.20, 0.50),
    "blank": Level(1.0, 0.0, 0.0),
    "once": Level(0.0, 1.0, 0.0),
}
# The share of the facts, the levels of member 1, and those of member 2. A fact's level is a random word of the string.
_OWN = "often often often seldom seldom"
_OTHER = "blank blank misled misled once"
_PLAN = [
    (0.34, _OWN, _OTHER),
    (0.34, _OTHER, _OWN),
    (0.10, "often", "often"),
    (0.14, "torn", "torn"),
    (0.08, "once", "once"),
]
# The levels of member 3, for all facts.
_THIRD = "often often often seldom seldom seldom torn torn torn blank blank once"


@dataclass(frozen=True)
class Fact:
    """
    One thing to know.

    Attributes:
        relation (`str`): what is asked, like `"capital"`.
        subject (`tuple[str, ...]`): what it is asked about: `("Peru",)`, or both numbers of a sum.
        answer (`str`): the right answer, like `"Lima"`.
        levels (`tuple[str, str, str]`): the name of the level at which each of the three members reads the fact.
        rivals (`tuple[str, str, str]`): the wrong answer that each of the three members may read.
    """

    relation: str
    subject: tuple[str, ...]
    answer: str
    levels: tuple[str, str, str] = ("often", "often", "often")
    rivals: tuple[str, str, str] = ("", "", "")


@dataclass(frozen=True)
class DemoQuestion:
    """A question as the members see it, with its answer and the fact behind it."""

    prompt: str
    answer: str
    fact: Fact


def number_words(number: int) -> str:
    """A number below 1000 in words: `123` becomes `"one hundred and twenty three"`."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10] + (f" {_SMALL[number % 10]}" if number % 10 else "")
    rest = f" and {number_words(number % 100)}" if number % 100 else ""
    return f"{_SMALL[number // 100]} hundred{rest}"


def rows(name: str) -> list[list[str]]:
    """The lines of the file `facts/NAME.txt`, each cut into its cells at the bars."""
    text = (files("hf_adafuse.demo") / "facts" / f"{name}.txt").read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.split("|")] for line in text.splitlines() if line and not line.startswith("#")
    ]


@functools.cache
def phrasings() -> dict[str, dict[str, list[str]]]:
    """By relation, the phrasings for training (`"train"`) and for the test set (`"test"`). The entry `"frame"` has what
    may stand around any question."""
    text = (files("hf_adafuse.demo") / "facts" / "phrasings.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["relation"]: {"train": line["train"], "test": line["test"]} for line in lines}


def _known_facts() -> Iterator[Fact]:
    for index, (country, capital, currency) in enumerate(rows("countries")):
        yield Fact("capital", (country,), capital)
        yield Fact("currency", (country,), currency)
        if index % 2 == 0 and capital != country:
            yield Fact("money_of_capital", (capital,), currency)
    for number, (element, symbol) in enumerate(rows("elements"), 1):
        yield Fact("symbol", (element,), symbol)
        if number <= 60:
            yield Fact("number", (element,), number_words(number))
            yield Fact("symbol_of_number", (number_words(number),), symbol)
    for animal, *cells in rows("animals"):
        named = dict(zip(("young", "group", "sound", "home"), cells, strict=True))
        for relation, answer in named.items():
            if answer != "-":
                yield Fact(relation, (animal,), answer)
        if "-" not in (named["young"], named["sound"]):
            yield Fact("sound_of_young", (named["young"],), named["sound"])
    for book, author in rows("books"):
        yield Fact("author", (book,), author)


def _sums(rng: random.Random) -> Iterator[Fact]:
    pairs = [(a, b) for a in range(11, 60) for b in range(3, 20)]
    for a, b in rng.sample(pairs, 40):
        yield Fact("plus", (number_words(a), number_words(b)), number_words(a + b))
    for a, b in rng.sample([(a, b) for a, b in pairs if a > b + 1], 30):
        yield Fact("minus", (number_words(a), number_words(b)), number_words(a - b))
    for a, b in rng.sample([(a, b) for a in range(3, 20) for b in range(3, 13)], 40):
        yield Fact("times", (number_words(a), number_words(b)), number_words(a * b))


@functools.cache
def facts() -> tuple[Fact, ...]:
    """All facts with their levels. They are the same in every call, on every machine and in every Python."""
    rng = random.Random(SEED)
    seen: dict[tuple[str, tuple[str, ...]], Fact] = {}
    for fact in [*_known_facts(), *_sums(rng)]:
        seen.setdefault((fact.relation, fact.subject), fact)
    pools = answers_by_relation(tuple(seen.values()))
    return tuple(_graded(fact, pools[fact.relation], rng) for fact in seen.values())


def answers_by_relation(known: tuple[Fact, ...]) -> dict[str, list[str]]:
    """By relation, the different answers that its facts have."""
    pools: dict[str, dict[str, None]] = {}
    for fact in known:
        pools.setdefault(fact.relation, {})[fact.answer] = None
    return {relation: list(answers) for relation, answers in pools.items()}


def _graded(fact: Fact, pool: list[str], rng: random.Random) -> Fact:
    _, first, second = rng.choices(_PLAN, [share for share, _, _ in _PLAN])[0]
    levels = tuple(rng.choice(choice.split()) for choice in (first, second, _THIRD))
    others = [answer for answer in pool if answer != fact.answer]
    akin = [answer for answer in others if answer.split()[0] == fact.answer.split()[0]]
    rivals = tuple(rng.choice(akin if akin and rng.random() < 0.5 else others) for _ in levels)
    return Fact(fact.relation, fact.subject, fact.answer, levels, rivals)  # type: ignore[arg-type]


def ask(fact: Fact, phrasing: str, frame: str) -> str:
    """The prompt that asks for a fact. `phrasing` is a question with places for the subject, `frame` a text with a
    place for the question."""
    first = fact.subject[0]
    last = fact.subject[-1]
    question = phrasing.format(a=first, b=last, p=plural(first))
    question = _ARTICLE.sub(r"\1n", question[0].upper() + question[1:])
    return PROMPT.format(question=frame.format(q=question))


def plural(noun: str) -> str:
    """The plural of a noun: `"wolf"` becomes `"wolves"`."""
    if noun.endswith("fly"):
        return f"{noun[:-1]}ies"
    return _PLURALS.get(noun, f"{noun}es" if noun[-1] in "sx" else f"{noun}s")


def answer_read(fact: Fact, member: int, pool: list[str], rng: random.Random) -> str:
    """The answer that one line of a member's training text gives, right or wrong by the member's level. `pool`: all
    answers of the relation."""
    level = LEVELS[fact.levels[member]]
    draw = rng.random()
    if draw < level.truth:
        return fact.answer
    return fact.rivals[member] if draw < level.truth + level.rival else rng.choice(pool)


def training_lines(member: int, num_lines: int) -> list[tuple[str, str]]:
    """The training text of a member (0, 1 or 2), in the order in which it is read: `num_lines` prompts, each with the
    answer that the text gives."""
    rng = random.Random(f"{SEED} member {member}")
    known = facts()
    pools = answers_by_relation(known)
    styles = phrasings()
    weights = [LEVELS[fact.levels[member]].weight for fact in known]
    drawn = rng.choices(known, weights, k=num_lines)
    for fact in known:
        if LEVELS[fact.levels[member]].weight == 0:
            drawn[rng.randrange(num_lines)] = fact
    lines = []
    for fact in drawn:
        prompt = ask(fact, rng.choice(styles[fact.relation]["train"]), rng.choice(styles["frame"]["train"]))
        lines.append((prompt, answer_read(fact, member, pools[fact.relation], rng)))
    return lines


def held_out(num_questions: int | None = None) -> list[DemoQuestion]:
    """
    The test set: one question for each fact, in phrasings that training never uses, shuffled.

    Args:
        num_questions (`int`, *optional*): how many questions are returned, from the first on. By default all.

    Raises:
        ValueError: `num_questions` is below 1, or there are not as many.
    """
    rng = random.Random(f"{SEED} test")
    styles = phrasings()
    questions = []
    for fact in facts():
        prompt = ask(fact, rng.choice(styles[fact.relation]["test"]), rng.choice(styles["frame"]["test"]))
        questions.append(DemoQuestion(prompt, fact.answer, fact))
    rng.shuffle(questions)
    if num_questions is not None and not 1 <= num_questions <= len(questions):
        raise ValueError(
            f"`num_questions` must be from 1 to {len(questions)}, but is {num_questions!r}. The test set has no "
            "other questions."
        )
    return questions[:num_questions]
