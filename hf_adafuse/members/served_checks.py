"""Checks a server before its first answer is used: its tokens against the tokenizer here, and its log-probabilities of
one text, asked in several shapes, against each other.
"""

from __future__ import annotations

import secrets
import warnings

from ..servers.api import Fingerprint
from ..servers.queries import Query, ServerError, difference
from ..servers.served_model import ServedModel
from .vocabulary import Vocabulary

_PROBES = ("The quick brown fox jumps over the lazy dog.", " In 1492, Columbus sailed", "\n\tif x[0] == 'é':  # 3.14")
# After 30 idle seconds the server may have restarted unnoticed.
_LONG_IDLE_SECONDS = 30.0
# Of more tokens than a block of most servers' caches has, less where the context is smaller; nothing in it repeats, so
# that what comes next is uncertain, and differs between models.
_TEXT = (
    " My grandmother kept bees behind the old railway station, where trains to Lisbon had stopped until 1954. On "
    "warm evenings she would sit among the hives with a radio, some bread and a letter that nobody was allowed to "
    "read. The mayor once offered her a clock for six jars of honey; she laughed, and gave him two, because his "
    "brother had fixed our roof. Later, when snow covered the valley, a stranger from Peru knocked at the door "
    "and asked whether anyone here still knew how to repair a violin. We looked at each other. Nobody spoke, "
    "although three of us could have. In the kitchen the kettle began to sing, a dog barked twice, and my uncle, "
    "who never lied, said that he had only ever played drums. That was how everything started: with wax, cold "
    "hands"
)
_MOST_TOKENS = 160
_NUM_BEGINNINGS = 12
_NUM_STEPS = 4
# Nats by which a server that comes back may differ from itself, however large `most_difference` is: another model
# differs by more from it.
_MOST_OF_ONE_MODEL = 1.0


def check_served(model: ServedModel, name: str, vocabulary: Vocabulary) -> None:
    """
    Compare a server's tokens and numbers before it is used: once for each server, and again when it has been away or
    may have been.

    Raises:
        ValueError: the server's tokenizer is another, it does not answer, or it serves another model than before.
    """
    api = model.api
    if api.connection.idle_seconds > _LONG_IDLE_SECONDS:
        api.connection.count_absence()
    if api.known is not None and not api.was_away:
        return
    num_absences = api.connection.num_absences
    try:
        _compare_tokens(model, name, vocabulary)
        if api.known is not None:
            api.check_same()
            return
        known, found = _compare_shapes(model, vocabulary)
    except ServerError as error:
        raise ValueError(
            f"{name} must answer{'' if api.known is None else ' as before'}, but does not: {error}. Start the server, "
            "make a new ServedModel of it, or leave the member out."
        ) from error
    if found > model.most_difference:
        warnings.warn(
            f"{name} differs from itself by up to {found:.2g} nats, asked in two shapes: texts may differ from those "
            f"of the same model here. Its `most_difference` is {model.most_difference:g}; raise it to go on without "
            "this.",
            UserWarning,
            stacklevel=2,
        )
    api.trust(known, num_absences)


def _compare_tokens(model: ServedModel, name: str, vocabulary: Vocabulary) -> None:
    for text in _PROBES:
        ours = list(vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"])
        # Nothing in an answer says to which text it is: one that differs is asked for again.
        for _ in range(3):
            theirs = model.api.tokenize(text)
            if theirs is None:
                _warn_of_unknown_tokens(name)
                return
            if theirs == ours:
                break
        else:
            raise ValueError(
                f"The tokenizer of {name} must be the server's, but for {text!r} the server has the ids {theirs}, and "
                f"the tokenizer {ours}. Pass the served model's own tokenizer."
            )


def _warn_of_unknown_tokens(name: str) -> None:
    warnings.warn(
        f"{name} does not say how it tokenizes: whether the tokenizer here is its own is not known. If not, its "
        "texts make no sense.",
        UserWarning,
        stacklevel=2,
    )


def _compare_shapes(model: ServedModel, vocabulary: Vocabulary) -> tuple[Fingerprint, float]:
    """A text that the server has never read, whole; then its last beginnings, each a prompt of its own, in one request,
    one by one, and by a greedy walk: without the server's cache, with it, and in other batches. The nats by which the
    answers differ at most are found too."""
    ids = vocabulary.encode_prompt(secrets.token_hex(8) + _TEXT)[: min(_MOST_TOKENS, model.room(0) - _NUM_STEPS)]
    if len(ids) < 2:
        raise ServerError(f"its context must be of more than {_NUM_STEPS + 1} tokens, but has {model.room(0)}")
    ends = range(max(1, len(ids) - _NUM_BEGINNINGS), len(ids))
    queries = [Query(tuple(ids[:end]), (ids[end],)) for end in ends]
    new = model.api.ask(queries[-1:], 2)[0][0]
    first = [steps[0] for steps in model.api.ask(queries, 2)]
    again = [model.api.ask([query], 2)[0][0] for query in (queries[0], queries[-1])]
    (walk,) = model.api.ask([Query(tuple(ids), (ids[0],), _NUM_STEPS)], 2)
    went_on = [*ids, *(step.chosen for step in walk)]
    beginnings = [Query(tuple(went_on[: len(ids) + number]), (ids[0],)) for number in range(len(walk))]
    alone = [steps[0] for steps in model.api.ask(beginnings, 2)]
    pairs = [(new, first[-1]), *zip((first[0], first[-1]), again, strict=True), *zip(walk, alone, strict=True)]
    found = max(
        difference(one.log_probs[token], other.log_probs[token])
        for one, other in pairs
        for token in {*one.log_probs}.intersection(other.log_probs)
    )
    # Another model finds other tokens likely.
    likeliest = [Query(query.ids, step.top[:1]) for query, step in zip(queries, first, strict=True)]
    log_probs = [step.log_probs[step.top[0]] for step in first]
    return Fingerprint(likeliest, log_probs, max(min(2 * model.most_difference, _MOST_OF_ONE_MODEL), 2 * found)), found
