"""Writes hf_adafuse/docs/reference.md from the docstrings of the public names:

    python tests/make_reference.py

`tests/test_docs.py` says when it must be run again.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import hf_adafuse
from hf_adafuse.confidence import Calibration
from hf_adafuse.transformers_compat import CACHE_NAME

PAGE = Path(__file__).parent.parent / "hf_adafuse/docs/reference.md"
HEAD = """\
# Reference

This page answers: which names can be imported from `hf_adafuse`, and what do they take and return? It is made from the
docstrings by `python tests/make_reference.py`.
"""


def reference() -> str:
    """The page."""
    names = {name: getattr(hf_adafuse, name) for name in sorted(hf_adafuse.__all__)}
    names["confidence.Calibration"] = Calibration
    index = "\n".join(f"- [`{name}`](#{_anchor(name)}): {_first_sentence(thing)}" for name, thing in names.items())
    return "\n\n".join([HEAD.rstrip(), index, *(_entry(name, thing) for name, thing in names.items())]) + "\n"


def _entry(name: str, thing: Any) -> str:
    parts = [f"## {name}", _signature(name, thing), _doc(thing)]
    if inspect.isclass(thing):
        for method, function in sorted(vars(thing).items()):
            function = getattr(function, "__func__", function)
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                parts += [f"### {name}.{method}", _signature(method, function), _doc(function)]
    return "\n\n".join(parts)


def _signature(name: str, thing: Any) -> str:
    if inspect.isclass(thing) and (issubclass(thing, tuple) or thing.__init__ is object.__init__):
        return f"```text\n{name}\n```"
    found = inspect.signature(thing)
    kept = [
        one.replace(annotation=inspect.Parameter.empty, default=_Shown.of(one.default))
        for number, one in enumerate(found.parameters.values())
        if number or one.name not in ("self", "cls")
    ]
    text = str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    text = text.replace(f"{CACHE_NAME}=", "cache=")  # the page has the names of the newest release
    return f"```text\n{name}{text}\n```"


class _Shown:
    """A default as it is written: objects without a plain value as `...`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    @classmethod
    def of(cls, value: Any) -> Any:
        if value is inspect.Parameter.empty or isinstance(value, (bool, int, float, str, tuple, type(None))):
            return value
        return cls("...")


def _doc(thing: Any) -> str:
    """The docstring, with its sections as lists."""
    lines: list[str] = []
    is_one_entry = False  # what a function returns is one entry, however many lines it takes
    for line in inspect.cleandoc(thing.__doc__ or "").splitlines():
        section = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields|Examples?):(.*)", line)
        if section:
            is_one_entry = section[1] in ("Returns", "Yields")
            lines += ["", f"**{section[1]}**{section[2]}", ""]
        elif re.match(r"    \S", line) and not line.lstrip().startswith((">>>", "```")):
            is_first = not (is_one_entry and lines[-1])
            lines.append(f"{'- ' if is_first else '  '}{line.strip()}")
        elif line.startswith("        "):
            lines.append(line[6:])
        else:
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", _without_links("\n".join(lines))).strip()


def _first_sentence(thing: Any) -> str:
    text = " ".join(inspect.cleandoc(thing.__doc__ or "").split())
    sentence = re.split(r"(?<=[.]) ", text)[0]
    return _without_links(sentence)


def _without_links(text: str) -> str:
    """Names in the form of transformers' docstrings, [`Name`] and [`~module.Name`], as plain code."""
    return re.sub(r"\[`(?:~[\w.]*\.)?([\w.]+)`\]", r"`\1`", text)


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
