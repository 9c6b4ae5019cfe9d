"""Tables that map each member's vocabulary to a common space: the cosine similarities of a token to tokens that all
members have. The method `deepen` adds up distributions there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..trees.adapters import base_model
from .distributions import Distribution, shared_pieces

# The most entries of one member's table where the number of anchors is left open: 1 GB in float32.
_MOST_ENTRIES = 2**28
_MOST_TABLES = 2  # of different members, kept
_ROWS = 4096  # of a table made at a time
_SHARPNESS = 100.0


def relative_tables(members: Sequence[Distribution], num_anchors: int | None) -> list[torch.Tensor]:
    """
    Per member, P of shape `(vocab_size, num_anchors)`: row v is the softmax over the anchors a of 100 cos(E[v], E[a]),
    the rows of cosines scaled to length 1 first. E are the input embeddings, anchors the tokens that all vocabularies
    have (one at least), spread evenly over them where there are more than asked for. Made once for the same models.
    """
    embeddings = [base_model(member.model).get_input_embeddings().weight for member in members]
    key = (num_anchors, *map(_state, embeddings), *(member.vocabulary.fingerprint for member in members))
    for dead in [one for one, (_, refs) in _TABLES.items() if any(ref() is None for ref in refs)]:
        del _TABLES[dead]
    if key not in _TABLES:
        while len(_TABLES) >= _MOST_TABLES:
            del _TABLES[next(iter(_TABLES))]
        with torch.inference_mode(False), torch.no_grad():  # they are also used where gradients are asked for
            _TABLES[key] = _make(members, embeddings, num_anchors), list(map(weakref.ref, embeddings))
    return _TABLES[key][0]


_TABLES: dict[Any, tuple[list[torch.Tensor], list[Any]]] = {}


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    """What tells a weight from another, and from itself after a change: where it is, and some of its values."""
    some = weight.detach().flatten()[:: max(1, weight.numel() // 1024)]
    return id(weight), weight.data_ptr(), str(weight.device), float(some.double().sum())


def _make(
    members: Sequence[Distribution], embeddings: Sequence[torch.Tensor], num_anchors: int | None
) -> list[torch.Tensor]:
    anchors = shared_pieces([member.vocabulary for member in members])
    most = num_anchors or max(1, _MOST_ENTRIES // max(map(len, embeddings)))
    if len(anchors) > most:
        anchors = [anchors[index * len(anchors) // most] for index in range(most)]
    tables = []
    for member, weight in zip(members, embeddings, strict=True):
        ids = [member.vocabulary.token_of(piece) for piece in anchors]
        tables.append(_table(weight.detach(), torch.tensor(ids, device=weight.device)))
    return tables


def _table(weight: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    normalize = torch.nn.functional.normalize
    basis = normalize(weight[anchors].float(), dim=-1)
    parts = (weight[start : start + _ROWS].float() for start in range(0, len(weight), _ROWS))
    cosines = (normalize(part, dim=-1) @ basis.T for part in parts)
    return torch.cat([(_SHARPNESS * normalize(part, dim=-1)).softmax(-1) for part in cosines])
