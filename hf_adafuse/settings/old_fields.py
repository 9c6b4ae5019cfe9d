"""Settings in the names of earlier versions, as files and repositories hold them. `AdaFuseConfig.from_dict` reads them.

| earlier field | today |
|---|---|
| `fusion="span"` | method `adafuse` |
| `fusion="horizon"` | method `adafuse` with the option `horizon` |
| `fusion="word"` | method `words` |
| `word_mean`, `word_part` | options `mean`, `part` of method `words` |
| `empty_text="any"`, `"all"` | option `allow_blank` of method `words`, true or false |
| `length_exponent` | an option of method `adafuse`, under the same name |
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

# The earlier fields with what they could be, the default first. No option of a method has one of these names.
OLD_FIELDS = {
    "fusion": ("span", "horizon", "word"),
    "word_mean": ("arithmetic", "root", "geometric"),
    "word_part": ("whole", "distinct", "weighted"),
    "empty_text": ("any", "all"),
}


def with_new_names(values: Mapping[str, Any], method: str | None = None) -> dict[str, Any]:
    """
    Settings in today's names. One `FutureWarning` says what to write where some had earlier names.

    Args:
        values (`dict`): fields, and options beside them.
        method (`str`, *optional*): of the settings that `values` change; by default they change none.

    Raises:
        ValueError: an earlier field is out of its range, or of no use with the others.
    """
    old = {name: value for name, value in values.items() if name in OLD_FIELDS}
    new = {name: value for name, value in values.items() if name not in OLD_FIELDS}
    if not old:
        return new
    for name, value in old.items():
        if value not in OLD_FIELDS[name]:
            raise ValueError(
                f"`{name}` must be one of {list(OLD_FIELDS[name])}, but is {value!r}. It is of an earlier version: the "
                "page on options has what is used today."
            )
    found = new.get("method", method or "adafuse")
    fusion = old.get("fusion", "word" if found == "words" else "span")
    if found in ("adafuse", "words"):
        found = "words" if fusion == "word" else "adafuse"
        new |= {"method": found} if found != (method or "adafuse") or "method" in new else {}
    options = _options(old, found)
    if new.get("length_exponent") == 1 and (method is None or found != "adafuse"):
        del new["length_exponent"]  # earlier versions wrote all fields: this is the default
    written = {name: new[name] for name in ("method",) if new.get(name) == "words"} | options
    warnings.warn(
        f"`adafuse_config` has {list(old)} of an earlier version. "
        + (f"Write {json.dumps(written)} instead." if written else "Leave them out: they are the default."),
        FutureWarning,
        stacklevel=3,
    )
    return new | options


def _options(old: Mapping[str, str], method: str) -> dict[str, Any]:
    """The options of a method that earlier fields stand for."""
    if method == "words":
        options: dict[str, Any] = {"mean": old.get("word_mean"), "part": old.get("word_part")}
        options["allow_blank"] = old["empty_text"] == "any" if "empty_text" in old else None
        return {name: value for name, value in options.items() if value is not None}
    for name, value in old.items():
        default = OLD_FIELDS[name][0]
        if value != default and not (name == "fusion" and method == "adafuse"):
            raise ValueError(
                f"`{name}` must be {default!r} with method {method!r}, which does not use it, but is {value!r}. "
                "Leave it out."
            )
    return {"horizon": True} if old.get("fusion") == "horizon" else {}
