"""The slow oracle for the rules of fusion and trust: the loop of `reference.py` with another choice, in plain lines. No
cache, no batch, no tree; shares no code with the package.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from support.reference import TIE, fit, greedy_word, propose

LEAST_WEIGHT = 0.05  # with `words` who has a smaller share of the largest weight is not asked


def token_log_probs(m, prefix, ids, ends):
    values, so_far = [], list(prefix)
    m.logits(tuple(prefix) + tuple(ids if ends else ids[:-1]))  # one pass instead of one for each token
    for token in ids:
        values.append(m.log_probs(so_far)[token].item())
        so_far.append(token)
    if ends:
        own = [m.log_probs(so_far)[token].item() for token in m.eos]
        values.append(math.log(sum(math.exp(v) for v in own)) if any(v > -math.inf for v in own) else -math.inf)
    return values


def best_eos(m, prefix):
    log_probs = m.log_probs(prefix)
    return max(sorted(m.eos), key=lambda token: log_probs[token].item())


def unicode_words(text):
    from icu4py.breakers import WordBreaker

    words, space = [], ""
    for segment in WordBreaker(text, "en"):
        if segment.strip():
            words.append(space + segment)
            space = ""
        else:
            space += segment
    if not words:
        return [text] if text else []
    return [*words[:-1], words[-1] + space]


def words_of(text, config):
    if config.word_boundary == "unicode":
        return unicode_words(text)
    words, word = [], ""
    for char in text:
        if char.isspace() and word.strip():
            words.append(word)
            word = ""
        word += char
    if word.strip() or not words:
        return [*words, word] if word else words
    return [*words[:-1], words[-1] + word]


def without_break(word):
    """A word's first whitespace up to its last line break, and the rest, where there are both."""
    at = 0
    for index, char in enumerate(word):
        if not char.isspace():
            break
        at = index + 1 if char == "\n" else at
    return [part for part in (word[:at], word[at:]) if part]


def by_word(m, words, ids, values, ends):
    """Per word, the log-probabilities of the tokens that begin in it; the end is a word, with all before it that has no
    text. Tokens that say another text are asked where each word ends in it."""
    if not values:  # nothing to score, or not asked
        return [[] for _ in range(len(words) + ends)]
    if not words:
        return [list(values)] if ends else []
    groups = [[] for _ in words]
    start = 0
    ends_at = [sum(len(word.encode("utf-8", "replace")) for word in words[: i + 1]) for i in range(len(words))]
    if sum(len(m.token_bytes(token)) for token in ids) != ends_at[-1]:
        so_far = ["".join(words[: i + 1]) for i in range(len(words))]
        ends_at = [sum(len(m.token_bytes(token)) for token in m.encode(text)[0]) for text in so_far]
    for token, value in zip(ids, values):
        groups[min(sum(end <= start for end in ends_at), len(words) - 1)].append(value)
        start += len(m.token_bytes(token))
    return [*groups, [values[-1]]] if ends else groups


def apart(word, value, others):
    """The log-probability of what sets a word (tokens and their values) apart from others: token by token, whoever goes
    on alike is still there; to end is to do nothing that these do."""
    total, is_contested = 0.0, False
    for at in range(len(word) + 1):
        alike = [(o, v) for o, v in [(word, value), *others] if o[:at] == word[:at]]
        onward = {o[at]: v[at] for o, v in alike if len(o) > at}
        to_end = math.log(max(1e-6, 1 - sum(math.exp(v) for v in onward.values())))
        choices = [*onward.values(), *([to_end] if any(len(o) == at for o, _ in alike) else [])]
        mine = onward[word[at]] if at < len(word) else to_end
        total += mine - max(choices) if is_contested else mine
        is_contested = is_contested or len(choices) > 1
        if at == len(word) or (is_contested and len(alike) == 1):
            return total
    return total


def nll_of(entry, k, config, horizon=None):
    groups, words = entry["groups"][k], entry["words"][:horizon]
    values = [value for group in groups[:horizon] for value in group]
    if not values:
        return None
    size = len(values)
    if config.nll_normalization == "byte":
        size = max(1, sum(1 if word is None else len(word.encode("utf-8", "replace")) for word in words))
    return -sum(values) / size ** config.method_options.get("length_exponent", 1.0)


def fused(entry, weights, config, horizon=None):
    pairs = [(nll_of(entry, k, config, horizon), weight) for k, weight in enumerate(weights)]
    pairs = [(value, weight) for value, weight in pairs if value is not None]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs)


def word_log_prob(entry, k, level, firsts, weights, config):
    """Of an entry's word at a level, where the words are those of `firsts`."""
    values, tokens = entry["groups"][k][level], entry["tokens"][k][level]
    others = [one for one in firsts if one is not entry and any(one["groups"][k])]
    if not others:
        return sum(values)
    part = apart(tokens, values, [(one["tokens"][k][level], one["groups"][k][level]) for one in others])
    shares = [weight / sum(weights) for weight in weights]
    evenness = (1 / sum(share * share for share in shares) - 1) / (len(shares) - 1) if len(shares) > 1 else 0
    rest = {"whole": 1, "distinct": 0, "weighted": evenness}[config.method_options.get("part", "whole")]
    return rest * sum(values) + (1 - rest) * part


def word_value(entry, level, firsts, weights, config):
    total = sum(w for k, w in enumerate(weights) if any(entry["groups"][k]))
    scorers = [(w / total, k) for k, w in enumerate(weights) if any(entry["groups"][k])]
    parts = [(w, word_log_prob(entry, k, level, firsts, weights, config)) for w, k in scorers]
    mean = config.method_options.get("mean", "arithmetic")
    if mean == "geometric":
        return sum(w * v for w, v in parts)
    top = max(v for _, v in parts)
    if mean == "root":
        return top + 2 * math.log(sum(w * math.sqrt(math.exp(v - top)) for w, v in parts))
    return top + math.log(sum(w * math.exp(v - top) for w, v in parts))


def pick(values, own, delta):
    """The index of the lowest value; the main model's own where it is within delta."""
    best = next(i for i, value in enumerate(values) if value <= min(values) + TIE)
    return own if own is not None and delta > 0 and values[own] - values[best] <= delta else best


def first_of_each(entries, level):
    """The first entry of each word."""
    firsts = []
    for entry in entries:
        if all(entry["words"][level] != other["words"][level] for other in firsts):
            firsts.append(entry)
    return firsts


def outspoken(entries, weights, config, kept):
    """Of a text's first candidates: none that begins with a break or the end, if a member that counts likes a word."""

    def blank(entry):
        return not (entry["words"][0] or "").strip()

    firsts = first_of_each(entries, 0)
    for k, weight in enumerate(weights):
        scored = [entry for entry in firsts if entry["groups"][k][0]]
        of_member = [(word_log_prob(entry, k, 0, firsts, weights, config), entry) for entry in scored]
        if of_member and weight >= 0.5 * max(weights):
            top = max(value for value, _ in of_member)
            if not blank(next(entry for value, entry in of_member if value >= top - TIE)):
                return [entry for entry in entries if not blank(entry) or entry is kept]
    return entries


def proposed_by(entries, weights):
    """How much those members weigh together that have proposed one of the entries."""
    return sum(weight for k, weight in enumerate(weights) if any(k in entry["own"] for entry in entries))


def agreed(entries, level, members):
    """The entries with the word that is in every member's greedy text, if there is one such word."""
    greedy = [{entry["words"][level] for entry in entries if k in entry["greedy"]} for k in members]
    if greedy and all(len(word) == 1 and word == greedy[0] for word in greedy):
        return [entry for entry in entries if entry["words"][level] in greedy[0]]
    return entries


def choose(entries, weights, config, own, is_first):
    """The winner among the entries that are possible; `own`: the main model's best candidate."""
    own = own if own in entries else None
    members = {k for entry in entries for k in entry["greedy"] if weights[k] >= LEAST_WEIGHT * max(weights)}
    if not config.method_options.get("allow_blank", True) and is_first:
        entries = outspoken(agreed(entries, 0, members), weights, config, own if config.switch_margin > 0 else None)
    if config.method != "words":
        horizon = min(len(entry["words"]) for entry in entries) if config.method_options.get("horizon") else None
        values = [fused(entry, weights, config, horizon) for entry in entries]
        return entries[pick(values, entries.index(own) if own else None, config.switch_margin)]
    level = 0
    while True:
        longer = [entry for entry in entries if len(entry["words"]) > level]
        if config.switch_margin > 0 and any(e is own for e in entries) and not any(e is own for e in longer):
            return own
        ended = [entry for entry in entries if len(entry["words"]) == level]
        if not longer or (ended and proposed_by(longer, weights) < proposed_by(ended, weights)):
            return ended[0]
        longer = agreed(longer, level, members)
        firsts = first_of_each(longer, level)
        values = [-word_value(entry, level, firsts, weights, config) for entry in firsts]
        mine = None
        if any(entry is own for entry in longer):
            mine = next(i for i, entry in enumerate(firsts) if entry["words"][level] == own["words"][level])
        word = firsts[pick(values, mine, config.switch_margin)]["words"][level]
        entries = [entry for entry in longer if entry["words"][level] == word]
        level += 1


def answers(text):
    """Per byte, whether it is of an answer: of the rest of a line that begins with the prompt's last line, the cue; if
    there is none, of the rest of a line of the same first word after the last line's last word."""
    end = len(text)
    while end and text[end - 1 : end] in (b"\n", b"\r"):
        end -= 1
    last = max((i + 1 for i in range(end) if text[i : i + 1] == b"\n"), default=0)
    cue, marks = text[last:], [False] * len(text)
    arrows = [b"=>", b"->", "→".encode()]
    ends = [b":", b"\n", "：".encode(), *arrows]
    is_cue = cue.strip() != b"" and any(cue.rstrip(b" ").endswith(end) for end in ends)
    for start in range(last if is_cue else 0):
        if (start == 0 or text[start - 1 : start] == b"\n") and text[start:].startswith(cue):
            at = start + len(cue)
            while at < len(text) and text[at : at + 1] != b"\n" and text[at : at + 2] != b"\r\n":
                marks[at] = True
                at += 1
    words = cue.split()
    if is_cue and not any(marks) and not cue.endswith(b"\n") and len(words) > 1:
        tail = cue[cue.rstrip(b" ").rindex(b" ") :]
        at = 0
        for line in text[:last].split(b"\n"):
            is_alike = line.startswith(words[0] + b" ") or any(words[-1].endswith(arrow) for arrow in arrows)
            places = [i for i in range(1, len(line)) if line[i:].startswith(tail)]
            if is_alike and places:
                for i in range(places[-1] + len(tail), len(line) - line.endswith(b"\r")):
                    marks[at + i] = True
            at += len(line) + 1
    return marks


def prompt_nll(m, ids, weights):
    """Nats per byte of the prompt's text, or its answers where it has some, of the tokens after the first with text."""
    total, size = 0.0, 0
    marks = None if weights == "prompt" else answers(b"".join(m.token_bytes(token) for token in ids))
    if marks is not None:
        others = (m.tokenizer.bos_token_id, m.tokenizer.eos_token_id, m.tokenizer.pad_token_id)
        unknown = [m.tokenizer.unk_token_id] if m.tokenizer.unk_token_id not in others else []
        texts = [token in unknown or m.token_bytes(token) != b"" for token in ids]
        begun = next((i for i, token in enumerate(ids) if m.token_bytes(token)), len(ids))
        if not all(texts[begun:]) or bare_chat(m, list(ids)) is not None:  # of a chat nothing counts
            marks = [False] * len(marks)
    at = len(m.token_bytes(ids[0]))
    m.logits(tuple(ids[:-1]) or tuple(ids))
    for end in range(1, len(ids)):
        piece = m.token_bytes(ids[end])
        at += len(piece)
        if piece and (marks is None or any(marks[at - len(piece) : at])):
            raw = m.logits(tuple(ids[:end]))
            total -= (raw[ids[end]] - raw.logsumexp(-1)).item()
            size += len(piece)
    return total / size if size else None


PLAIN_CHAT = (
    "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)


def bare_chat(m, ids):
    """The ids of a chat that says "..." and nothing else, where `ids` are a chat by their end; else `None`."""
    own = {} if m.tokenizer.chat_template else {"chat_template": PLAIN_CHAT}
    whole = m.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for thinks in (False, True):
        options = {"add_generation_prompt": True, "tokenize": False, "enable_thinking": thinks, **own}
        try:
            text = m.tokenizer.apply_chat_template([{"role": "user", "content": "..."}], **options)
        except Exception:
            continue
        bare = m.tokenizer(text, add_special_tokens=bool(own)).input_ids
        end = m.tokenizer.decode(bare, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text.partition("...")[2].strip() and whole.endswith(end.rpartition("...")[2].lstrip()):
            return bare
    return None


def information(m, ids):
    """
    How far what a chat says, or the middle of a prompt's lines, moves the next token, in nats, and how many bytes that
    is; `None` without these.
    """
    bare = bare_chat(m, list(ids))
    if bare is not None:
        return None if bare == list(ids) else divergence(m, ids, bare)
    others = (m.tokenizer.bos_token_id, m.tokenizer.eos_token_id, m.tokenizer.pad_token_id)
    unknown = [m.tokenizer.unk_token_id] if m.tokenizer.unk_token_id not in others else []
    has_text = [token in unknown or m.token_bytes(token) != b"" for token in ids]
    if True in has_text and not all(has_text[has_text.index(True) :]):
        return None
    text = m.decode(ids)
    end = re.search(r"\s*\Z", text).group()
    lines = text[: len(text) - len(end)].split("\n")
    for number, line in enumerate(lines):
        keep = r"\s*(\S+)\s.*\s(\S+)\s*" if number == len(lines) - 1 else r"\s*(\S+)\s+\S.*()"
        found = re.fullmatch(keep, line, re.DOTALL)
        if found and len(line.split()) > (2 if number == len(lines) - 1 else 1):
            lines[number] = f"{found[1]} ... {found[2]}" if found[2] else f"{found[1]} ..."
    bare = "\n".join(lines) + end
    if bare == text or not bare:
        return None
    return divergence(m, ids, m.tokenizer(bare).input_ids)


def divergence(m, ids, bare):
    p, q = (m.logits(tuple(each)).double().log_softmax(-1).tolist() for each in (ids, bare))
    size = sum(len(m.token_bytes(token)) for token in ids) - sum(len(m.token_bytes(token)) for token in bare)
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q)), max(size, 0)


def certain_words(m, prefix, config):
    """Greedy words of which the member is certain: their ids, texts, and whether the sequence ends."""
    ids, texts = list(prefix), []
    while len(texts) < config.max_words and (m.max_length is None or len(ids) < m.max_length):
        token, value = m.best(ids, 1)[0]
        if math.exp(value) < config.certainty_gate:
            break
        word, ends = greedy_word(m, ids, token, config)
        if ends:
            return ids[len(prefix) :], texts, True
        ids, texts = ids + word, [*texts, m.text(word)]
    return ids[len(prefix) :], texts, False


def own_or_encoded(main, m, ids, text):
    """What a member reads of the main model's words: the same ids where it has the same tokenizer."""
    return list(ids) if m.tokenizer is main.tokenizer else m.encode(text)[0]


def decode_by_rule(members, prompts, config, max_new_tokens):
    """New main-model ids of one prompt (`prompts`: per member, its ids) and the text of each round."""
    prefixes, new, spans = [list(ids) for ids in prompts], [], []
    if isinstance(config.model_weights, str):
        nlls = [prompt_nll(m, ids, config.model_weights) for m, ids in zip(members, prompts)]
        logs = [0.0] * len(members)  # a prompt without text says nothing
        if None not in nlls:
            logs = [-config.prompt_sharpness * nll for nll in nlls]
        elif config.model_weights == "examples_or_content" and all(nll is None for nll in nlls):
            told = [information(m, ids) for m, ids in zip(members, prompts)]
            if None not in told and len({bare_chat(m, list(ids)) is None for m, ids in zip(members, prompts)}) == 1:
                enough = min(8, max(4, min(size for _, size in told) / 40))
                logs = [2 * enough * math.log(min(max(value, 0.001), enough)) for value, _ in told]
    else:
        logs = [math.log(weight) for weight in config.model_weights or [1.0] * len(members)]
    asked = asked_of(members, [math.exp(log - max(logs)) for log in logs], config)
    while len(new) < max_new_tokens:
        if any(m.max_length is not None and len(p) >= m.max_length for m, p in zip(members, prefixes)):
            break
        winner = None
        if config.certainty_gate is not None:
            ids, texts, ends = certain_words(members[0], prefixes[0], config)
            encoded = [own_or_encoded(members[0], m, ids, "".join(texts)) for m in members]
            if (texts or ends) and fit(members, prefixes, encoded) and ("".join(texts) or ends):
                winner = {"text": "".join(texts), "ends": ends, "ids": encoded}
        if winner is None:
            winner = one_round(members, prefixes, logs, config, "".join(spans) == "", asked)
            if winner is None:
                break
            if "groups" in winner and config.online_rate:
                size = len(winner["text"].encode("utf-8", "replace")) + winner["ends"]
                values = [[v for group in groups for v in group] for groups in winner["groups"]]
                scored = [-sum(own) for own in values if own]
                sums = [-sum(own) if own else sum(scored) / len(scored) for own in values]  # as the others on average
                logs = [log - config.online_rate * value / size for log, value in zip(logs, sums)] if size else logs
        prefixes = [prefix + ids for prefix, ids in zip(prefixes, winner["ids"])]
        new += winner["ids"][0]
        spans.append(winner["text"])
        if winner["ends"]:
            new.append(best_eos(members[0], prefixes[0]))
            break
    return new[:max_new_tokens], spans


def asked_of(members, weights, config):
    """The members that propose and score, by the weights before the text: with `words` those with a twentieth of the
    largest weight, those whose processors may forbid a text, those that cannot end it, and the main model where its own
    words are kept."""
    if config.method != "words":
        return range(len(members))
    is_kept = config.switch_margin > 0
    return [
        k
        for k, (m, weight) in enumerate(zip(members, weights))
        if weight >= LEAST_WEIGHT * max(weights) or m.process is not None or not m.eos or (k == 0 and is_kept)
    ]


def one_round(members, prefixes, logs, config, is_first, asked):
    """`asked`: the members that propose and score; all, where nothing that they propose can be committed."""
    pool, greedy = {}, {}
    weights = [math.exp(log - max(logs)) for log in logs]
    for k, (m, prefix) in enumerate(zip(members, prefixes)):
        if k not in asked:
            continue
        rule = config if len(asked) > 1 or len(members) == 1 else replace(config, num_branches=1, margin_threshold=0.0)
        for words, ends in propose(m, prefix, rule):
            text = "".join(m.text(word) for word in words)
            greedy.setdefault(k, (text, ends))
            pool.setdefault((text, ends), {}).setdefault(k, [token for word in words for token in word])
    entries, own = [], None
    for (text, ends), ids in pool.items():
        encoded = [ids[k] if k in ids else m.encode(text)[0] for k, m in enumerate(members)]
        exact = 0 in ids or members[0].encode(text)[1]
        entry = {"text": text, "ends": ends, "ids": encoded, "own": ids}
        entry["greedy"] = {k for k, first in greedy.items() if first == (text, ends)}
        if 0 in entry["greedy"]:
            own = entry
        if not exact or not fit(members, prefixes, encoded) or not (text or ends):
            continue
        values = [token_log_probs(m, p, e, ends) for m, p, e in zip(members, prefixes, encoded)]
        values = [own if k in asked else [] for k, own in enumerate(values)]
        if any(-math.inf in of_member for of_member in values) or not any(values):
            continue
        words = words_of(text, config) if text else []
        if config.method == "words":
            words = [part for word in words for part in without_break(word)]
        entry["words"] = [*words, None] if ends else words
        entry["groups"] = [by_word(m, words, e, v, ends) for m, e, v in zip(members, encoded, values)]
        entry["tokens"] = [by_word(m, words, e, [*e, -1], ends) for m, e in zip(members, encoded)]
        entries.append(entry)
    if len(asked) < len(members) and not any(
        (0 in ids or members[0].encode(text)[1])
        and fit(members, prefixes, [ids[k] if k in ids else m.encode(text)[0] for k, m in enumerate(members)])
        and (text or ends)
        for (text, ends), ids in pool.items()
    ):
        return one_round(members, prefixes, logs, config, is_first, range(len(members)))
    if entries:
        return choose(entries, weights, config, own, is_first)
    word, ends = greedy_word(members[0], prefixes[0], members[0].best(prefixes[0], 1)[0][0], config)
    text = members[0].text(word)
    encoded = [word, *[m.encode(text)[0] for m in members[1:]]]
    return {"text": text, "ends": ends, "ids": encoded} if fit(members, prefixes, encoded) else None
