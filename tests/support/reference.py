"""The slow oracle: the algorithm in plain lines. No cache, no batch, no tree; shares no code with the package.

Logits come from running whole sequences; results are remembered by their input alone.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

TIE = 1e-6
ANCHORS = ("", "\n", "a", "1", ".", ")", "Z", "é")
BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}  # as byte-level vocabularies write bytes


@dataclass
class RefMember:
    """A model, its tokenizer, its end-of-sequence ids and its context; `process(ids, logits)` for its processors."""

    model: object
    tokenizer: object
    eos: list
    max_length: int | None = None
    process: object = None
    memory: dict = field(default_factory=dict)
    raw: dict = field(default_factory=dict)

    def log_probs(self, ids):
        key = tuple(ids)
        if key not in self.memory:
            logits = self.logits(key)
            if self.process is not None:
                logits = self.process(torch.tensor([ids]), logits[None].clone())[0]
            self.memory[key] = torch.log_softmax(logits, -1)
        return self.memory[key]

    def logits(self, ids):
        """After `ids`; running a sequence also gives those after each of its beginnings."""
        if ids not in self.raw:
            with torch.no_grad():
                rows = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
            for end, row in enumerate(rows, start=1):
                self.raw.setdefault(ids[:end], row)
        return self.raw[ids]

    def best(self, ids, count):
        values, order = self.log_probs(ids).sort(descending=True, stable=True)
        return [(token, value) for token, value in zip(order.tolist(), values.tolist()) if value > -math.inf][:count]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @functools.cached_property
    def lead(self):
        """A visible token to decode behind, so that a span is read as a continuation."""
        return next([t] for c in "aA1." for t in self.tokens_of(c)[::-1] if self.decode([t]).strip())

    def text(self, ids):
        return self.decode(self.lead + ids)[len(self.decode(self.lead)) :]

    def tokens_of(self, text):
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def encode(self, text):
        """The ids of a span as a continuation, and whether they decode back to it exactly."""
        found = []
        for anchor in ANCHORS:
            head, ids = self.tokens_of(anchor) if anchor else [], self.tokens_of(anchor + text)
            if ids[: len(head)] == head:
                ids = ids[len(head) :]
                back = self.text(ids)
                if back == text:
                    return ids, True
                common = next((i for i, (a, b) in enumerate(zip(back, text)) if a != b), min(len(back), len(text)))
                found.append((common, ids))
        return (max(found, key=lambda pair: pair[0])[1] if found else []), False

    def token_bytes(self, token):
        if ("bytes", token) not in self.memory:
            self.memory["bytes", token] = self._token_bytes(token)
        return self.memory["bytes", token]

    def _token_bytes(self, token):
        """The bytes of one token, by the vocabulary's own notation."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if token in self.tokenizer.all_special_ids:
            return b""
        if "ByteLevel" in str(self.tokenizer.backend_tokenizer.decoder) and all(char in BYTE_OF for char in name):
            return bytes(BYTE_OF[char] for char in name)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return self.text([token]).encode()


def mid_character(data):
    for length in (1, 2, 3):
        try:
            data[-length:].decode()
            return False
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return True
    return False


def unicode_boundary(word, after):
    from icu4py.breakers import WordBreaker

    ends, whole = [], word.lstrip() + after
    for segment in WordBreaker(whole, "en"):
        ends.append((ends[-1] if ends else 0) + len(segment))
    return len(word.lstrip()) in ends


def complete(m, prefix, word, config):
    """Whether the word (ids after prefix) is complete; reads the greedy next token."""
    data = b"".join(m.token_bytes(t) for t in word)
    text = data.decode(errors="replace")
    limit = config.max_word_tokens + (3 if mid_character(data) else 0)
    if len(word) >= limit:
        return True
    if text.strip() and text[-1].isspace():
        return True
    if m.max_length is not None and len(prefix) + len(word) >= m.max_length:
        return True
    return ends_before(m, word, m.best(prefix + word, 1)[0][0], config)


def ends_before(m, word, token, config):
    if token in m.eos:
        return True
    data = b"".join(m.token_bytes(t) for t in word)
    text = data.decode(errors="replace")
    if not text.strip() or mid_character(data):
        return False
    after = m.token_bytes(token).decode(errors="replace")
    if after[:1].isspace():
        return True
    return config.word_boundary == "unicode" and after and unicode_boundary(text, after)


def greedy_word(m, prefix, first, config):
    """(ids, ends) of the word that begins with `first`."""
    if first in m.eos:
        return [], True
    word = [first]
    while not complete(m, prefix, word, config):
        word.append(m.best(prefix + word, 1)[0][0])
    return word, False


def beam_words(m, prefix, config):
    width = config.num_branches
    beams = []
    for token, value in m.best(prefix, width):
        ends = token in m.eos
        beams.append((value, [] if ends else [token], ends, ends))
    while True:
        beams = [(s, w, e, done or complete(m, prefix, w, config)) for s, w, e, done in beams]
        if all(done for *_, done in beams):
            return [(word, ends) for _, word, ends, _ in beams]
        grown = []
        for score, word, ends, done in beams:
            onward = (
                []
                if done
                else [(t, v) for t, v in m.best(prefix + word, None) if not ends_before(m, word, t, config)][:width]
            )
            grown += [(score + v, [*word, t], False, False) for t, v in onward] or [(score, word, ends, True)]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]


def propose(m, prefix, config):
    """Spans (words as id lists, ends), best branch first."""
    words, ids = [], list(prefix)
    while len(words) < config.max_words and (m.max_length is None or len(ids) < m.max_length):
        top = [math.exp(value) for _, value in m.best(ids, 2)] + [0.0]
        if config.commitment == "adaptive" and top[0] - top[1] < config.margin_threshold:
            if config.exploration == "beam":
                tails = beam_words(m, ids, config)
            else:
                tails = [greedy_word(m, ids, first, config) for first, _ in m.best(ids, config.num_branches)]
            return [([*words, word], ends) if word else (words, ends) for word, ends in tails]
        word, ends = greedy_word(m, ids, m.best(ids, 1)[0][0], config)
        words = [*words, word] if word else words
        if ends:
            return [(words, True)]
        ids = ids + word
    return [(words, False)]


def nll(m, prefix, ids, ends, text, config):
    m.logits(tuple(prefix + (ids if ends else ids[:-1])))
    total, ids_so_far = [], list(prefix)
    for token in ids:
        total.append(m.log_probs(ids_so_far)[token].item())
        ids_so_far.append(token)
    if ends:
        own = m.log_probs(ids_so_far)[m.eos]
        total.append(torch.logsumexp(own, 0).item() if m.eos else -math.inf)
    if not total:
        return None
    size = len(total) if config.nll_normalization == "token" else max(1, len(text.encode("utf-8", "replace")) + ends)
    return -sum(total) / size


def fit(members, prefixes, encoded):
    return all(
        m.max_length is None or len(prefix) + len(ids) <= m.max_length
        for m, prefix, ids in zip(members, prefixes, encoded)
    )


def reference_decode(members, prompts, config, max_new_tokens):
    """New main-model ids of one prompt (`prompts`: per member, its ids) and the text of each round."""
    prefixes, new, texts = [list(p) for p in prompts], [], []
    weights = config.model_weights or [1.0] * len(members)
    while len(new) < max_new_tokens:
        if any(m.max_length is not None and len(p) >= m.max_length for m, p in zip(members, prefixes)):
            break
        pool = {}  # (text, ends) -> per member its own ids; in the order of members and branches
        for k, (m, prefix) in enumerate(zip(members, prefixes)):
            for words, ends in propose(m, prefix, config):
                text = "".join(m.text(word) for word in words)
                pool.setdefault((text, ends), {}).setdefault(k, [t for word in words for t in word])
        scored = []
        for (text, ends), own in pool.items():
            encoded = [own[k] if k in own else m.encode(text)[0] for k, m in enumerate(members)]
            exact = 0 in own or members[0].encode(text)[1]
            if not exact or not fit(members, prefixes, encoded) or not (text or ends):
                continue
            nlls = [nll(m, p, e, ends, text, config) for m, p, e in zip(members, prefixes, encoded)]
            pairs = [(n, w) for n, w in zip(nlls, weights) if n is not None]
            score = sum(n * w for n, w in pairs) / sum(w for _, w in pairs) if pairs else math.inf
            if score < math.inf:
                scored.append((score, text, ends, encoded))
        if scored:
            lowest = min(score for score, *_ in scored)
            _, text, ends, encoded = next(entry for entry in scored if entry[0] <= lowest + TIE)
        else:
            word, ends = greedy_word(members[0], prefixes[0], members[0].best(prefixes[0], 1)[0][0], config)
            text = members[0].text(word)
            encoded = [word, *[m.encode(text)[0] for m in members[1:]]]
            if not fit(members, prefixes, encoded):
                break
        prefixes = [prefix + ids for prefix, ids in zip(prefixes, encoded)]
        new += encoded[0]
        texts.append(text)
        if ends:
            log_probs = members[0].log_probs(prefixes[0])
            new.append(max(sorted(members[0].eos), key=lambda token: log_probs[token].item()))
            break
    return new[:max_new_tokens], texts
