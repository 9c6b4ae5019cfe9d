"""Scores a whole set of translations by chrF, BLEU and spBLEU, with sacrebleu (extra `eval`).

spBLEU (Goyal et al., 2022) is BLEU on the pieces of the Flores-200 tokenizer, a file that sacrebleu downloads when it
is first used. Where that fails, plain BLEU is computed instead, on the words of sacrebleu's default tokenizer (13a).
"""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...demo.paired import Mean

Pairs = Sequence[tuple[Sequence[str], str]]  # for each sentence, the accepted translations and the one to score
_Z = 1.96  # half of sacrebleu's 95 % interval, in standard errors
_BOOTSTRAPS = 300
_GROUPS = 20


def corpus_chrf(pairs: Pairs) -> float:
    """chrF of the set, from 0 to 100."""
    return _score(_chrf(), pairs)


def corpus_bleu(pairs: Pairs) -> float:
    """BLEU of the set, from 0 to 100."""
    return _score(_bleu("13a"), pairs)


def corpus_spbleu(pairs: Pairs) -> float:
    """spBLEU of the set, from 0 to 100."""
    return _score(_bleu("flores200"), pairs)


def standard_error(metric: str, pairs: Pairs) -> float:
    """The standard error of a score of the set, by sacrebleu's bootstrap: over sets drawn from it with replacement."""
    scorer = _MAKERS[metric]()
    score = scorer.corpus_score(*_streams(pairs), n_bootstrap=_BOOTSTRAPS)
    report = json.loads(score.format(width=6, signature=scorer.get_signature().format(), is_json=True))
    return float(report.get("confidence_var", 0.0)) / _Z  # left out where the score of every drawn set is 0


def corpus_score(metric: str, pairs: Pairs) -> float:
    """`chrf`, `bleu` or `spbleu` of the set, from 0 to 100."""
    return _score(_MAKERS[metric](), pairs)


def difference(metric: str, pairs: Pairs, others: Pairs) -> Mean:
    """
    How far the score of a set is above that of other translations of the same sentences.

    Args:
        metric (`str`): `"chrf"`, `"bleu"` or `"spbleu"`.
        pairs, others (`list[tuple[list[str], str]]`): both sets, with the sentences in the same order.

    Returns:
        `Mean`: the difference in points. Its standard error is by the jackknife that leaves out one of `_GROUPS` groups
        of sentences at a time, as sacrebleu only tests differences. NaN for fewer than two sentences.
    """
    n = len(pairs)
    groups = min(_GROUPS, n)

    def apart(left_out: int | None = None) -> float:
        scores = []
        for given in (pairs, others):
            kept = [pair for index, pair in enumerate(given) if left_out is None or index % groups != left_out]
            scores.append(corpus_score(metric, kept))
        return scores[0] - scores[1]

    if groups < 2:
        return Mean(apart() if n else math.nan, math.nan, n)
    parts = [apart(group) for group in range(groups)]
    middle = sum(parts) / groups
    return Mean(apart(), math.sqrt((groups - 1) / groups * sum((part - middle) ** 2 for part in parts)), n)


@functools.cache
def has_spbleu() -> bool:
    """Whether the tokenizer of spBLEU is there or can be downloaded. Warns once where it cannot."""
    try:
        if os.environ.get("HF_HUB_OFFLINE") == "1" and not _tokenizer_file().exists():
            raise OSError("the network is off (HF_HUB_OFFLINE)")
        _bleu("flores200")
    except Exception as error:  # whatever a download raises
        warnings.warn(
            f"spBLEU is left out: sacrebleu's tokenizer flores200 does not load ({type(error).__name__}: {error}). "
            "There is plain BLEU (13a) instead.",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True


def _tokenizer_file() -> Path:
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    name = os.path.basename(str(SPM_MODELS["flores200"]["url"]))
    return Path(str(SACREBLEU_DIR), "models", name)


def _score(metric: Any, pairs: Pairs) -> float:
    return float(metric.corpus_score(*_streams(pairs)).score)


def _streams(pairs: Pairs) -> tuple[list[str], list[list[str | None]]]:
    """The texts, and then a list of the first accepted translation of each, a list of the second, and so on; `None`
    where a text has fewer."""
    most = max(len(answers) for answers, _ in pairs)
    streams = [[answers[i] if i < len(answers) else None for answers, _ in pairs] for i in range(most)]
    return [text for _, text in pairs], streams


def _chrf() -> Any:
    from sacrebleu.metrics import CHRF

    return CHRF()


def _bleu(tokenize: str) -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize=tokenize)


_MAKERS: dict[str, Callable[[], Any]] = {
    "chrf": _chrf,
    "bleu": lambda: _bleu("13a"),
    "spbleu": lambda: _bleu("flores200"),
}
