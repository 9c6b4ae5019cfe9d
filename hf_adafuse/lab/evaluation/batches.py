"""In which batches the harness's requests are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .model_arguments import generation_options


def told_apart(requests: Sequence[Any], do_sample: bool | None, max_gen_toks: int) -> list[tuple[Any, ...]]:
    """The arguments of requests for texts; a text that is drawn several times has the number of each draw, too."""
    draws: Counter[str] = Counter()
    apart = []
    for request in requests:
        asks = generation_options(request.args[1], max_gen_toks)[0]["do_sample"]
        number = draws[repr(request.args)]
        if asks if do_sample is None else do_sample:
            draws[repr(request.args)] += 1
        apart.append((*request.args, number) if number else request.args)
    return apart


def batches(
    arguments: Sequence[Any], group_of: Callable[[int], str], is_known: Callable[[Any], bool], size: int
) -> list[list[Any]]:
    """
    What is not known yet, each once, the longest first: too little memory shows at once.

    Args:
        arguments (`list[tuple]`): of the requests.
        group_of (`Callable`): what those of one batch have in common, by their number.
        is_known (`Callable`): whether there is a response already.
        size (`int`): of a batch.
    """
    groups: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(arguments):
        if not is_known(one):
            groups.setdefault(group_of(number), {})[repr(one)] = one
    found = []
    for group in groups.values():
        ordered = sorted(group.values(), key=lambda one: -sum(map(len, one[:2])))
        found += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return found
