"""Writes the texts that the benchmark's pair is trained on and continues: journeys through the demo's world of facts.

A document is a journey of two friends from country to country, with some sentences for each country. It can have any
length. Whatever is chosen (the next country, the pattern of a sentence, an animal, a thing) has one usual choice in
each country, which is taken more or less often, and any other choice now and then. A usual choice is followed in the
training text of one member, of the other, or of both. Each member reads facts at its level in the demo. So the members
agree on most words and differ on some, and are sometimes sure and sometimes not.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

from ...demo import data

SEED = 4
# The sentences of a country, in order. Where a bar joins two, one of them is written.
_PARTS = ("capital", "weather", "currency", "market", "people", "animal", "book", "symbol|number", "talk")
_SKIPPED = 0.15  # the share of countries in which a part is left out
_COMMON = 0.5  # the share of the usual choices that both members' texts follow
_USUAL = (0.4, 0.98)  # how often the usual choice is taken, at least and at most
_ANIMAL = ("young", "group", "sound", "home")
_VOWEL = re.compile(r"\b([Aa])(?= [aeiou])")


class _Usual(NamedTuple):
    """The usual one of some options in a country."""

    option: Any
    share: float  # how often it is taken
    reader: int | None  # the only member whose text follows it; `None`: both members' texts


@functools.cache
def _prose() -> dict[str, Any]:
    text = (files("hf_adafuse.lab.benchmarks") / "prose.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


@functools.cache
def _world() -> dict[str, list[str]]:
    """What a journey may meet, by kind: countries in the order of the usual journey, animals, books and elements."""
    countries = list(dict.fromkeys(fact.subject[0] for fact in data.facts() if fact.relation == "capital"))
    random.Random(f"{SEED} route").shuffle(countries)
    return {
        "country": countries,
        "animal": [cells[0] for cells in data.rows("animals")],
        "book": [cells[0] for cells in data.rows("books")],
        "element": [cells[0] for cells in data.rows("elements")][:60],
    }


@functools.cache
def _facts() -> tuple[dict[tuple[str, str], data.Fact], dict[str, list[str]]]:
    known = data.facts()
    return {(fact.relation, fact.subject[0]): fact for fact in known}, data.answers_by_relation(known)


@functools.cache
def _usual(kind: str, country: str, options: tuple[str, ...]) -> _Usual:
    rng = random.Random(f"{SEED} {kind} {country}")
    reader = None if rng.random() < _COMMON else rng.randrange(2)
    return _Usual(rng.choice(options), rng.uniform(*_USUAL), reader)


class _Writer:
    """Writes one document as the member (0 or 1) reads it. `None`: all facts are right, and the usual choices of
    both members count."""

    def __init__(self, seed: str, member: int | None):
        self.rng = random.Random(f"{SEED} {seed}")
        self.member = member
        self.name, self.friend = self.rng.sample(_prose()["words"]["name"], 2)
        self.country = self.rng.choice(_world()["country"])

    def paragraphs(self) -> Iterator[str]:
        """Yields one paragraph for each country, without end. The first begins with the opening."""
        opening = self._sentence(self.rng.choice(_prose()["opening"]), "opening")
        while True:
            yield " ".join([opening, *self._sentences()] if opening else self._sentences())
            opening = ""
            self.country = self.next

    def _sentences(self) -> Iterator[str]:
        countries = _world()["country"]
        usual = countries[(countries.index(self.country) + 1) % len(countries)]
        self.next = usual if self.rng.random() < 0.8 else self.rng.choice(countries)
        for part in ("arrival", *_PARTS, "departure"):
            if part in _PARTS and self.rng.random() < _SKIPPED:
                continue
            kind = self._animal_part() if part == "animal" else self.rng.choice(part.split("|"))
            yield self._sentence(self._choose(f"{kind} sentence", _prose()[kind]), kind)

    def _animal_part(self) -> str:
        self.animal = self._choose("animal", _world()["animal"])
        known = [relation for relation in _ANIMAL if (relation, self.animal) in _facts()[0]]
        return self._choose(f"part of {self.animal}", known)

    def _sentence(self, pattern: str, part: str) -> str:
        values = {field: self._value(field, part) for field in re.findall(r"{(\w+)}", pattern)}
        for field, source, relation in (("author", "book", "author"), ("atomic", "element", "number")):
            if field in values:
                values[field] = self._answer(relation, values[source])
        if "symbol" in values:
            values["symbol"] = self._answer("symbol", values["element"])
        return _VOWEL.sub(r"\1n", pattern.format(**values))

    def _value(self, field: str, part: str) -> str:
        if field in ("name", "friend", "country", "next"):
            return str(getattr(self, field))
        if field in ("capital", "currency"):
            return self._answer(field, self.country)
        if field in _ANIMAL:
            return self._answer(field, self.animal)
        if field in ("animal", "animals"):
            return self.animal if field == "animal" else data.plural(self.animal)
        if field == "number":
            return self._choose(f"number {part}", [data.number_words(number) for number in range(2, 31)])
        if field in ("author", "atomic", "symbol"):
            return ""  # `_sentence` sets it by another value
        options = _world().get(field) or _prose()["words"][field.rstrip("2")]
        return self._choose(f"{field} {part}", options)

    def _choose(self, kind: str, options: list[str]) -> str:
        usual = _usual(kind, self.country, tuple(options))
        if (self.member is None or usual.reader in (None, self.member)) and self.rng.random() < usual.share:
            return str(usual.option)
        return self.rng.choice(options)

    def _answer(self, relation: str, subject: str) -> str:
        by_subject, pools = _facts()
        fact = by_subject[relation, subject]
        if self.member is None:
            return fact.answer
        return data.answer_read(fact, self.member, pools[relation], self.rng)


def document(seed: str, num_chars: int, member: int | None = None) -> str:
    """
    A text, always the same for the same arguments.

    Args:
        seed (`str`): what the text follows from. Another seed gives another text.
        num_chars (`int`): the least number of characters. The text goes on to the end of the paragraph.
        member (`int`, *optional*): the member (0 or 1) that reads the text. By default all facts in it are right.
    """
    paragraphs: list[str] = []
    length = 0
    for paragraph in _Writer(seed, member).paragraphs():
        paragraphs.append(paragraph)
        length += len(paragraph) + 2
        if length >= num_chars:
            break
    return "\n\n".join(paragraphs)


def training_documents(member: int, num_chars: int) -> Iterator[str]:
    """Yields the training documents of a member, in the order in which it reads them, without end."""
    for index in itertools.count():
        yield document(f"training {member} {index}", num_chars, member)
