"""Puts the harness's requests into batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .model_arguments import generation_options


def told_apart(requests: Sequence[Any], do_sample: bool | None, max_gen_toks: int) -> list[tuple[Any, ...]]:
    """The arguments of requests for texts. Where a text is sampled several times, those of its second draw end with the
    number 1, and so on, so that each draw is a request of its own. `do_sample`: what the ensemble's settings say."""
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
    The batches of the requests that have no response yet. Equal requests are asked once. In each group the longest ones
    come first, so that too little memory shows at once.

    Args:
        arguments (`list[tuple]`): the arguments of each request.
        group_of (`Callable`): `group_of(index)` returns the group of the request at this index. A batch has requests
            of one group.
        is_known (`Callable`): `is_known(arguments)` says whether the request with these arguments has a response.
        size (`int`): the most requests in a batch.
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
