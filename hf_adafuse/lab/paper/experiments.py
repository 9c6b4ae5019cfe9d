"""`make_experiment`: the tables and figures of the AdaFuse paper (arXiv 2601.06022) as values, by their names.

```python
>>> from hf_adafuse.lab.paper.experiments import make_experiment

>>> [candidate.rule for candidate in make_experiment("fig2", num_members=2).candidates]
['1 word', '2 words', '3 words', 'adaptive']

```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..evaluation.candidates import Contestant
from .values import TASKS, Contrast, Experiment, Peers, adafuse, usable_peers

BRANCHES = (1, 2, 3, 4, 5)
THRESHOLDS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.1)
_SETS = tuple(TASKS)[:6]


def make_experiment(name: str, num_members: int, peers: Peers | None = None) -> Experiment:
    """
    A table or figure for some members.

    Args:
        name (`str`): one of `NAMES`.
        num_members (`int`): the number of members, at least 2.
        peers (`dict[str, dict]`, *optional*): the settings of the peer methods by what they are called, as of
            [`usable_peers`]. By default those of the paper.

    Raises:
        ValueError: there is no such table or figure, or there are fewer than 2 members.
    """
    if name not in _MAKERS:
        raise ValueError(f"`name` must be one of {', '.join(NAMES)}, but is {name!r}. Check the spelling.")
    if num_members < 2:
        raise ValueError(f"The members must be 2 or more, but are {num_members}. Name a further one with --assistant.")
    return _MAKERS[name](tuple(range(num_members)), usable_peers()[0] if peers is None else peers)


def _alone(members: Sequence[int]) -> list[Contestant]:
    return [Contestant((member,)) for member in members]


def _peers(members: Sequence[int], peers: Peers) -> list[Contestant]:
    return [Contestant(tuple(members), label, settings) for label, settings in peers.items()]


def _table1(members: tuple[int, ...], peers: Peers) -> Experiment:
    alone = _alone(members)
    ours = adafuse(members, "AdaFuse, B = 1", num_branches=1)
    return Experiment(
        "table1",
        "Table 1: members, peers, AdaFuse",
        "AdaFuse without branches (B = 1), beside each member alone and its peers.",
        _SETS,
        [*alone, *_peers(members, peers), ours],
        ours,
        [Contrast(f"AdaFuse - {'better' if len(alone) == 2 else 'best'} member", ours, alone)],
    )


def _table2(members: tuple[int, ...], peers: Peers) -> Experiment:
    rows = [adafuse(members[:number], f"{number} members") for number in range(2, len(members) + 1)]
    return Experiment(
        "table2",
        "Table 2: more members",
        "AdaFuse, B = 3, with the first 2, 3, ... members.",
        ("nq",),
        rows,
        rows[-1],
        [Contrast(f"{row.rule} - 2 members", row, rows[:1]) for row in rows[1:]],
    )


def _figure2(members: tuple[int, ...], peers: Peers) -> Experiment:
    rows = [_fixed(members, number) for number in (1, 2, 3)]
    adaptive = adafuse(members, "adaptive", num_branches=1)
    return Experiment(
        "fig2",
        "Figure 2: fixed and adaptive rounds",
        "Rounds of always 1, 2 or 3 greedy words, and AdaFuse (B = 1), which commits up to 3.",
        ("nq",),
        [*rows, adaptive],
        adaptive,
        [Contrast("adaptive - best fixed", adaptive, rows)],
    )


def _figure3(members: tuple[int, ...], peers: Peers) -> Experiment:
    fixed = _fixed(members, 1)
    adaptive = adafuse(members, "adaptive", num_branches=1)
    return Experiment(
        "fig3",
        "Figure 3: where one-word and adaptive rounds part",
        "Questions that rounds of one word and those of AdaFuse (B = 1) answer differently, round by round.",
        ("nq",),
        [fixed, adaptive],
        adaptive,
        [Contrast("adaptive - 1 word", adaptive, [fixed])],
    )


def _figure4(members: tuple[int, ...], peers: Peers) -> Experiment:
    rows = [adafuse(members, f"B = {number}", num_branches=number) for number in BRANCHES]
    return Experiment(
        "fig4",
        "Figure 4: branches",
        "AdaFuse by the number of branches B; without (B = 1) and with branching (B = 3) on all sets.",
        _SETS,
        rows,
        rows[2],
        [Contrast("B = 3 - B = 1", rows[2], rows[:1])],
        few=[rows[1], *rows[3:]],
        few_tasks=("nq", "triviaqa", "gsm8k", "demo"),
    )


def _figure5(members: tuple[int, ...], peers: Peers) -> Experiment:
    ours = [adafuse(members, f"AdaFuse, B = {number}", num_branches=number) for number in (1, 3)]
    return Experiment(
        "fig5",
        "Figure 5: time",
        "Wall-clock seconds of one prompt at a time, exactly 10 new tokens, beside the sum of the members' own greedy "
        "decoding of 10 tokens each.",
        ("nq",),
        [*_alone(members), *_peers(members, peers), *ours],
        ours[-1],
    )


def _figure6(members: tuple[int, ...], peers: Peers) -> Experiment:
    rows = [adafuse(members, f"tau = {tau:g}", margin_threshold=tau, num_branches=1) for tau in THRESHOLDS]
    middle = rows[THRESHOLDS.index(0.7)]
    return Experiment(
        "fig6",
        "Figure 6: the margin threshold tau",
        "AdaFuse (B = 1) by tau: 0 always commits 3 words, above 1 always one.",
        ("nq",),
        rows,
        middle,
        [Contrast(f"{row.rule} - tau = 0.7", row, [middle]) for row in rows if row is not middle],
    )


def _figure7(members: tuple[int, ...], peers: Peers) -> Experiment:
    rows = {
        kind: [adafuse(members, f"{kind}, B = {number}", num_branches=number, exploration=kind) for number in BRANCHES]
        for kind in ("diverse", "beam")
    }
    pairs = list(zip(rows["diverse"], rows["beam"], strict=True))
    return Experiment(
        "fig7",
        "Figure 7: diverse branches and beams",
        "Branches on the first token of a word (diverse), and token-level beam search cut to the word (beam).",
        ("nq",),
        [*rows["diverse"], *rows["beam"]],
        rows["diverse"][2],
        [Contrast(f"{one.rule} - beam", one, [other]) for one, other in pairs],
    )


def _fixed(members: Sequence[int], number: int) -> Contestant:
    label = f"{number} word{'s' * (number > 1)}"
    return adafuse(members, label, commitment="fixed", max_words=number, num_branches=1)


_MAKERS: dict[str, Callable[[tuple[int, ...], Peers], Experiment]] = {
    "table1": _table1,
    "table2": _table2,
    "fig2": _figure2,
    "fig3": _figure3,
    "fig4": _figure4,
    "fig5": _figure5,
    "fig6": _figure6,
    "fig7": _figure7,
}
NAMES = tuple(_MAKERS)
