"""Compares the choices of `best_rated` with those that LLM-PeerReview has published.

python tests/check_ratings.py FILE

FILE is JSON: `tasks` by name, each with `scores` of shape (questions, answering models, rating models), `selected`, the
published choice per question, and `correct` of shape (questions, answering models). No test runs it: the ratings are
not in this repository.
"""

# ruff: noqa: T201

from __future__ import annotations

import json
import sys
from pathlib import Path

from hf_adafuse.decoding.strategies.peer_review import best_rated

# A rating is a mean over six prompts, and is written with three decimals: means this close may be equal.
ROUNDING = 1e-3


def main(name: str) -> None:
    for task, values in json.loads(Path(name).read_text(encoding="utf-8"))["tasks"].items():
        counts = {"same": 0, "tie": 0, "other": 0}
        num_right = 0
        for scores, selected, correct in zip(values["scores"], values["selected"], values["correct"], strict=True):
            means = [sum(row) / len(row) for row in scores]
            chosen = best_rated(scores)
            assert means[chosen] >= max(means) - 1e-6
            is_tie = chosen != selected and means[selected] >= max(means) - ROUNDING
            counts["same" if chosen == selected else "tie" if is_tie else "other"] += 1
            num_right += correct[chosen]
        print(f"{task}: {counts}, right {100 * num_right / len(values['selected']):.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
