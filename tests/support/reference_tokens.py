"""The slow oracles of the methods over tokens, straight from the maths. No cache, no batch, no tree; shares no code
with the package.
"""

from __future__ import annotations

import math

import torch

from support.reference import TIE, mid_character
from support.reference_rules import best_eos


def size_of(m):
    return m.model.get_input_embeddings().weight.shape[0]


def pieces(m):
    if "pieces" not in m.memory:
        special = {t for t, added in m.tokenizer.added_tokens_decoder.items() if added.special}
        known = set(m.tokenizer.get_vocab().values()) - special
        m.memory["pieces"] = [m.token_bytes(t) if t in known else b"" for t in range(size_of(m))]
    return m.memory["pieces"]


def token_of(m, data):
    """The first one, of ordinary ones before those that byte fallback has for a byte."""
    found = [token for token, piece in enumerate(pieces(m)) if data and piece == data]
    names = [m.tokenizer.convert_ids_to_tokens(token) for token in found]
    ordinary = [token for token, name in zip(found, names) if not (name.startswith("<0x") and name.endswith(">"))]
    return next(iter([*ordinary, *found]), None)


def cut_character(data):
    """The whole characters, and the beginning of one."""
    for length in (1, 2, 3):
        if mid_character(data) and len(data) >= length and data[-length] & 0xC0 != 0x80:
            return data[:-length], data[-length:]
    return data, b""


def write(m, data):
    """The ids of bytes as a continuation; `None` where the beginning of a character has no tokens."""
    if ("written", data) not in m.memory:
        whole, rest = cut_character(data)
        ids = list(m.encode(whole.decode(errors="replace"))[0]) if whole else []
        single = [token_of(m, rest[i : i + 1]) for i in range(len(rest))]
        m.memory["written", data] = None if None in single else ids + single
    return m.memory["written", data]


def top(m, ids, count):
    found = []
    for token, value in m.best(ids, None):
        if len(found) < count and (token in m.eos or pieces(m)[token]):
            found.append((None if token in m.eos else pieces(m)[token], token, value))
    return found


def end_value(m, ids):
    return torch.logsumexp(m.log_probs(ids)[m.eos], 0).item() if m.eos else -math.inf


class UniTE:
    retokenizes = True

    def __init__(self, top_k=10, zero_repeated=False):
        self.top_k, self.zero = top_k, zero_repeated

    def asks(self, m, ids):
        return True

    def choose(self, members, contexts, weights):
        tops = [[] if ids is None else top(m, ids, self.top_k) for m, ids in zip(members, contexts)]
        union = []
        for best in tops:
            union += [data for data, *_ in best if data not in union]
        tables = [None if ids is None else self.table(m, ids, t, union) for m, ids, t in zip(members, contexts, tops)]
        main, found = members[0], []
        for data in union:
            token = tables[0][data][0]
            if token is None or main.log_probs(contexts[0])[token].item() == -math.inf:
                continue
            fused = sum(w * t[data][1] for t, w in zip(tables, weights) if t is not None)
            if fused > 0:
                fused /= sum(w for t, w in zip(tables, weights) if t is not None)
                found.append((-math.log(fused), data, [] if data is None else [token]))
        return found

    def table(self, m, ids, best, union):
        logits, raw = {}, m.log_probs(ids)
        for data, token, value in best:
            if data not in logits:
                logits[data] = (token, value)
        for data in union:
            if data is None:
                logits[None] = (best_eos(m, ids) if m.eos else None, end_value(m, ids))
            elif data not in logits:
                token = token_of(m, data)
                if token is None:
                    written = write(m, data)
                    good = written and m.token_bytes(written[0]) and data.startswith(m.token_bytes(written[0]))
                    token = written[0] if good else None
                if token is None:
                    logits[data] = (None, -math.inf)
                elif self.zero and token in [other for other, _ in logits.values()]:
                    logits[data] = (token, -torch.logsumexp(m.logits(tuple(ids)), 0).item())
                else:
                    logits[data] = (token, raw[token].item())
        total = sum(math.exp(value) for _, value in logits.values())
        return {data: (token, math.exp(value) / total) for data, (token, value) in logits.items()}


class GaC:
    retokenizes = False

    def __init__(self, threshold=None):
        self.threshold = threshold

    def asks(self, m, ids):
        return self.threshold is None or math.exp(m.best(ids, 1)[0][1]) < self.threshold

    def choose(self, members, contexts, weights):
        masses, order = {None: 0.0}, [None]
        voting = [(m, ids, w) for m, ids, w in zip(members, contexts, weights) if ids is not None]
        total = sum(w for *_, w in voting)
        for m, ids, weight in voting:
            for token, value in enumerate(m.log_probs(ids).double().exp().tolist()):
                data = None if token in m.eos else pieces(m)[token]
                if data != b"":
                    if data not in masses:
                        order.append(data)
                    masses[data] = masses.get(data, 0.0) + weight * value / total
        main, ids, found = members[0], contexts[0], []
        for data in order:
            own = [token for token, piece in enumerate(pieces(main)) if piece == data and token not in main.eos]
            if data is None:
                written = [] if main.eos else None
            elif own:
                written = [max(own, key=lambda token: (main.log_probs(ids)[token].item(), -token))]
            else:
                written = write(main, data)
                if not written or b"".join(map(main.token_bytes, written)) != data:
                    written = None
            allowed = main.log_probs(ids)
            if written is not None and all(allowed[t] == -math.inf for t in written[:1] or main.eos):
                continue
            if written is not None and masses[data] > 0:
                found.append((-math.log(masses[data]), data, written))
        return found


class DeePEn:
    retokenizes = True

    def __init__(self, learning_rate=0.15, num_steps=5, num_anchors=None):
        self.rate, self.steps, self.count = learning_rate, num_steps, num_anchors

    def asks(self, m, ids):
        return self.rate > 0 and m.best(ids, 1)[0][0] not in m.eos

    def choose(self, members, contexts, weights):
        main, voting = members[0], [k for k, ids in enumerate(contexts) if ids is not None]
        scores = main.log_probs(contexts[0]) + torch.logsumexp(main.logits(tuple(contexts[0])), 0)
        if len(voting) > 1:
            scores = self.search(
                scores, [members[k] for k in voting], [contexts[k] for k in voting], [weights[k] for k in voting]
            )
        found = []
        for token, value in enumerate(scores.double().log_softmax(-1).tolist()):
            data = None if token in main.eos else pieces(main)[token]
            if data != b"" and main.log_probs(contexts[0])[token].item() > -math.inf:
                found.append((-value, data, [] if data is None else [token]))
        return found

    def search(self, scores, members, contexts, weights):
        common = []
        for piece in pieces(members[0]):
            if piece and piece not in common and all(piece in pieces(m) for m in members):
                common.append(piece)
        if self.count is not None and len(common) > self.count:
            common = [common[i * len(common) // self.count] for i in range(self.count)]
        tables = [self.relative(m, [token_of(m, piece) for piece in common]) for m in members]
        mixed = sum(
            w * (m.log_probs(ids).exp() @ table) for m, ids, w, table in zip(members, contexts, weights, tables)
        )
        goal = mixed / sum(weights)
        z = scores.detach().clone().requires_grad_()
        optimizer = torch.optim.AdamW([z], lr=self.rate)
        for step in range(self.steps):
            low = self.rate / 4
            optimizer.param_groups[0]["lr"] = low + (self.rate - low) * (1 + math.cos(math.pi * step / self.steps)) / 2
            optimizer.zero_grad()
            loss = (goal * (goal.log() - (torch.softmax(z, -1) @ tables[0]).log())).mean()
            loss.backward()
            optimizer.step()
        return z.detach()

    def relative(self, m, anchors):
        weight = m.model.get_input_embeddings().weight.detach().float()
        unit = weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosines = unit @ unit[anchors].T
        return torch.softmax(100 * cosines / cosines.norm(dim=1, keepdim=True).clamp(min=1e-12), -1)


METHODS = {"unite": UniTE, "gac": GaC, "deepen": DeePEn}


def decode_by_tokens(members, prompts, config, max_new_tokens):
    """New main-model ids of one prompt (`prompts`: per member, its ids)."""
    method = METHODS[config.method](**config.method_options)
    weights = config.model_weights or [1.0] * len(members)
    settled, tails, new = [list(ids) for ids in prompts], [b""] * len(members), []
    while len(new) < max_new_tokens:
        written = [write(m, tail) if tail else [] for m, tail in zip(members, tails)]
        contexts = [None if ids is None else base + ids for base, ids in zip(settled, written)]
        if any(m.max_length is not None and len(c or b) >= m.max_length for m, c, b in zip(members, contexts, settled)):
            break
        if not method.asks(members[0], contexts[0]):
            contexts = [contexts[0], *[None] * (len(members) - 1)]
        found = method.choose(members, contexts, weights)
        if found:
            lowest = min(score for score, *_ in found)
            _, data, ids = next(one for one in found if one[0] <= lowest + TIE)
        else:
            token = members[0].best(contexts[0], 1)[0][0]
            data, ids = (None, []) if token in members[0].eos else (b"", [token])
        if data is None:
            return [*new, best_eos(members[0], contexts[0])]
        new += ids
        follow(members, settled, tails, ids, method, config)
    return new[:max_new_tokens]


def follow(members, settled, tails, ids, method, config):
    """Every member takes committed ids of the main model."""
    said = b"".join(members[0].token_bytes(token) for token in ids)
    for k, m in enumerate(members):
        if k == 0 or m.tokenizer is members[0].tokenizer:
            settled[k] = settled[k] + ids
            continue
        is_apart = tails[k].strip() and (said[:1].isspace() or tails[k][-1:].isspace())
        is_long = bool(tails[k]) and len(write(m, tails[k]) or []) >= config.max_word_tokens
        if (is_apart or is_long) and not cut_character(tails[k])[1]:
            settled[k], tails[k] = settled[k] + write(m, tails[k]), b""
        tails[k] += said
        if not method.retokenizes and not cut_character(tails[k])[1]:
            settled[k], tails[k] = settled[k] + write(m, tails[k]), b""
