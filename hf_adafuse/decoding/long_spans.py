"""Reads long spans, of which nothing is kept but what was asked for: their logits would fill the memory. Called where
whole answers, given or generated, are scored, and where they are rated.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..members.member import Member, Span
from ..members.passes import unread
from ..trees.nodes import Node
from .requests import ForwardRequest, Requests

# The most numbers in the logits that are held at a time, over all prompts: 256 MB in float32. A pass reads at least
# `_LEAST_TOKENS` tokens of a prompt.
_MOST_LOGITS = 2**26
_LEAST_TOKENS = 16


def long_log_probs(
    member_index: int, member: Member, prompt_index: int, spans: Sequence[Span], keeps_logits: bool = False
) -> Requests[list[list[float]]]:
    """
    Per span, the log-probabilities (nats) of its ids, and of the end where it ends the text: in one pass, unless that
    would hold too many logits. Beginnings that spans have in common are read once.

    Args:
        member_index (`int`): of the member among those of the scheduler.
        member (`Member`), prompt_index (`int`): the member, and the prompt that the spans answer.
        spans (`list[Span]`): all that will be asked for below the prompt.
        keeps_logits (`bool`, *optional*, defaults to `False`): whether the logits are kept all the same.
    """
    yield from read_long(member_index, member, prompt_index, spans, keeps_logits=keeps_logits)
    return member.log_probs(prompt_index, spans)


def read_long(
    member_index: int,
    member: Member,
    prompt_index: int,
    spans: Sequence[Span],
    with_last_pass: Sequence[Node] = (),
    keeps_logits: bool = False,
) -> Requests[None]:
    """
    Read what the scores of spans need.

    Args:
        member_index, member, prompt_index, spans, keeps_logits: as of [`long_log_probs`].
        with_last_pass (`list[Node]`, *optional*): further nodes, which the last pass reads too.
    """
    most = max(_LEAST_TOKENS, _MOST_LOGITS // (member.vocabulary.vocab_size or 1) // max(1, member.num_active))
    # All spans have their nodes before any is read, so their scores leave the device with each pass. A pass may have
    # read likely nodes too, so what is left is asked for anew.
    while needed := member.needed_to_score(prompt_index, spans):
        is_last = len(needed) <= most
        more = [node for node in unread(with_last_pass) if node not in needed] if is_last else []
        yield ForwardRequest(member_index, [*needed[:most], *more])
        if not keeps_logits:
            member.forget_logits(prompt_index)
