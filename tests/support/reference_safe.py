"""The slow oracle of SAFE, straight from the paper's section 3. No cache, no batch, no tree; shares no code with the
package.
"""

from __future__ import annotations

import math

from support.reference import TIE
from support.reference_rules import best_eos
from support.reference_tokens import GaC, UniTE, cut_character, end_value, follow, pieces, write


class Fused:
    """The fused distribution at one place, and which text of it is taken."""

    retokenizes = True

    def __init__(self, ensemble="unite", top_k=None, threshold=None, sharpening="prefix", sharpening_threshold=0.1):
        self.base = UniTE(top_k or 10) if ensemble == "unite" else GaC(threshold)
        self.how, self.least, self.is_gac = sharpening, sharpening_threshold, ensemble == "gac"

    def best(self, members, contexts, weights):
        """Its bytes and the main model's ids; `None` where the main model can say nothing."""
        found = [(math.exp(-score), data, ids) for score, data, ids in self.base.choose(members, contexts, weights)]
        if self.is_gac:  # sharpening looks at the 64 likeliest texts
            masses = {}
            for k, weight in enumerate(weights):
                for data, p in self.table(k, members, contexts).items():
                    masses[data] = masses.get(data, 0.0) + weight * p
            masses.pop(b"", None)
            likeliest = sorted(masses, key=masses.get, reverse=True)[:64]
            found = [one for one in found if one[1] in likeliest]
        if not found:
            return None, False
        values = [p for p, *_ in found]
        is_smooth = self.how != "none" and max(values) < 0.5
        if is_smooth:
            values = self.sharpened(found, members, contexts, weights)
            if max(values) == 0:
                values, is_smooth = [p for p, *_ in found], False
        scores = [-math.log(value) if value > 0 else math.inf for value in values]
        return next(one[1:] for one, score in zip(found, scores) if score <= min(scores) + TIE), is_smooth

    def sharpened(self, found, members, contexts, weights):
        if self.how == "geometric":
            tables = [self.table(k, members, contexts) for k in range(len(members))]
            return [geometric_mean([table.get(data, 0.0) for table in tables], weights) for _, data, _ in found]
        values = []
        for p, data, ids in found:
            if data is not None and p > self.least and len(ids) == 1 and pieces(members[0])[ids[0]] == data:
                longer = [q for q, text, _ in found if text not in (None, data) and text.startswith(data)]
                p += sum(longer)
            values.append(p)
        return values

    def table(self, k, members, contexts):
        """The probability that one member gives each text, as the fusion sees it."""
        m = members[k]
        if not self.is_gac:
            alone = [1.0 if j == k else 0.0 for j in range(len(members))]
            return {data: math.exp(-score) for score, data, _ in self.base.choose(members, contexts, alone)}
        masses = {}
        for token, p in enumerate(m.log_probs(contexts[k]).double().exp().tolist()):
            data = None if token in m.eos else pieces(m)[token]
            masses[data] = masses.get(data, 0.0) + p
        return masses


def geometric_mean(values, weights):
    if min(values) == 0:
        return 0.0
    return math.exp(sum(w * math.log(value) for w, value in zip(weights, values)) / sum(weights))


def boundaries(m, text, ids):
    """By number of bytes of the text that some of the ids write exactly, how many of them."""
    found, written = {0: 0}, b""
    for count, token in enumerate(ids, start=1):
        written += pieces(m)[token]
        if not text.startswith(written):
            break
        found.setdefault(len(written), count)
    return found


def decode_by_safe(members, prompts, config, max_new_tokens):
    """New main-model ids of one prompt (`prompts`: per member, its ids), and how many tokens were fused, were fused
    after sharpening, and are not the main model's."""
    options = dict(config.method_options)
    num_drafted, least = options.pop("num_tokens", 5), options.pop("acceptance_threshold", 0.5)
    fused = Fused(**options)
    weights = config.model_weights or [1.0] * len(members)
    main, others = members[0], range(1, len(members))
    settled, tails, new, counts = [list(ids) for ids in prompts], [b""] * len(members), [], [0, 0, 0]

    def own_ids(k, drafted):
        """The draft in the tokens of a verifier, behind what of the text it reads anew."""
        if members[k].tokenizer is main.tokenizer:
            return drafted
        text = tails[k] + b"".join(main.token_bytes(t) for t in drafted)
        ids = write(members[k], text)
        return ids if ids is not None else write(members[k], cut_character(text)[0]) or []

    def fits(k, drafted):
        m = members[k]
        return m.max_length is None or len(settled[k]) + len(own_ids(k, drafted)) <= m.max_length

    while len(new) < max_new_tokens:
        written = [write(m, tail) or [] if tail else [] for m, tail in zip(members, tails)]
        lengths = [len(base) + len(ids) for base, ids in zip(settled, written)]
        if any(m.max_length is not None and length >= m.max_length for m, length in zip(members, lengths)):
            break
        drafted, ends = [], False
        while len(drafted) < min(num_drafted, max_new_tokens - len(new)) and not ends and fits(0, [*drafted, 0]):
            token = main.best(settled[0] + drafted, 1)[0][0]
            ends = token in main.eos
            drafted += [] if ends else [token]
        while len(drafted) > 1 and not all(fits(k, drafted) for k in others):
            drafted, ends = drafted[:-1], False
        kept = None  # how many tokens are kept, where the next one is fused
        for at, token in enumerate([*drafted, None] if ends else drafted):
            said = b"".join(main.token_bytes(t) for t in drafted[:at])
            contexts, own = [settled[0] + drafted[:at]], [token]
            for k in others:
                m, ids = members[k], own_ids(k, drafted)
                if m.tokenizer is main.tokenizer:
                    place = at
                else:
                    whole = tails[k] + b"".join(main.token_bytes(t) for t in drafted)
                    place = boundaries(m, whole, ids).get(len(tails[k] + said))
                if place is None or not fits(k, drafted) or (place == len(ids)) != (token is None):
                    break
                contexts.append(settled[k] + ids[:place])
                own.append(None if token is None else ids[place])
            if len(contexts) < len(members) or len(members) == 1:
                continue
            if token is not None and not main.token_bytes(token):
                continue
            if not fused.base.asks(main, contexts[0]):
                continue
            values, agree = [], []
            for m, ids, t in zip(members, contexts, own):
                values.append(end_value(m, ids) if t is None else m.log_probs(ids)[t].item())
                agree.append(m.best(ids, 1)[0][0] in (m.eos if t is None else [t]))
            mean = sum(w * math.exp(value) for w, value in zip(weights, values)) / sum(weights)
            if not all(agree[1:]) and not mean > least:
                kept = at
                break
        taken = drafted if kept is None else drafted[:kept]
        for token in taken:
            follow(members, settled, tails, [token], fused, config)
        new += taken
        if kept is None:
            if ends:
                return [*new, best_eos(main, settled[0])], counts
            continue
        counts[0] += 1
        found, is_sharpened = fused.best(members, contexts, weights)
        counts[1] += is_sharpened
        token = main.best(settled[0], 1)[0][0]
        data, ids = found or ((None, []) if token in main.eos else (b"", [token]))
        first = None if token in main.eos else pieces(main)[token]
        counts[2] += bool(found) and data != first
        if data is None:
            return [*new, best_eos(main, settled[0])], counts
        follow(members, settled, tails, ids, fused, config)
        new += ids
    return new[:max_new_tokens], counts
