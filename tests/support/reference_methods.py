"""The slow oracles of the methods over spans: one round of each in plain lines, straight from the maths. No cache, no
batch, no tree; shares no code with the package.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
import unicodedata
from typing import ClassVar

from support.reference import TIE, fit, greedy_word, mid_character
from support.reference_rules import best_eos, own_or_encoded, token_log_probs


def is_full(m, ids):
    return m.max_length is not None and len(ids) >= m.max_length


def following(m, ids):
    """What the member would write next; `None` for the end of the text."""
    if is_full(m, ids):
        return b""
    token = m.best(ids, 1)[0][0]
    return None if token in m.eos else m.token_bytes(token)


class Cut(list):
    """The ids of an answer that was cut, as one word, and the text that is left: the ids may not say it exactly."""

    def __init__(self, ids, text):
        super().__init__([ids])
        self.text = text


def text_of(m, words):
    return words.text if isinstance(words, Cut) else "".join(m.text(word) for word in words)


def words_until(m, prefix, config, is_over, most_tokens=None):
    """Greedy words until `is_over(words, next)`; of the words after the first only those that end within the tokens."""
    words, ids = [], list(prefix)
    while not is_full(m, ids):
        word, ends = greedy_word(m, ids, m.best(ids, 1)[0][0], config)
        used = len(ids) - len(prefix)
        if words and most_tokens is not None and used + len(word) > most_tokens:
            break
        ids += word
        words += [word] if word else []
        if ends:
            return words, True
        if most_tokens is not None and len(ids) - len(prefix) >= most_tokens:
            break
        after = following(m, ids)
        if after is not None and is_over(words, after):
            break
    return words, False


def fixed_words(m, prefix, config, count, others):
    words, ids = [], list(prefix)
    while len(words) < count and not is_full(m, ids):
        word, ends = greedy_word(m, ids, m.best(ids, 1)[0][0], config)
        if ends:
            return words, True
        words, ids = [*words, word], ids + word
    return words, False


def draft_tokens(m, prefix, config, count, others):
    return words_until(m, prefix, config, lambda *_: False, most_tokens=count)


def is_line_end(text, after):
    return "\n" in after[: len(after) - len(after.lstrip())] or "\n" in text[len(text.rstrip()) :]


def is_sentence_end(text, after):
    from icu4py.breakers import SentenceBreaker

    if is_line_end(text, after):
        return True
    whole, at = text + after, 0
    for segment in SentenceBreaker(whole, "en"):
        at += len(segment)
        if at < len(whole) and at >= len(text) and not whole[len(text) : at].strip():
            return True
    return False


def unit_of_text(m, prefix, config, options, others):
    rule = {"word": lambda *_: True, "sentence": is_sentence_end, "paragraph": is_line_end}[options["unit"]]

    def is_over(words, after):
        return len(words) >= options["num_words"] or rule(text_of(m, words), after.decode(errors="replace"))

    return words_until(m, prefix, config, is_over)


def answer(m, prefix, config, left, others):
    """To the end, or until the main model's ids of it are as many as are left: its own, or those of the text."""

    def is_over(words, after):
        own = m.tokenizer is others[0].tokenizer
        ids = [token for word in words for token in word] if own else others[0].encode(text_of(m, words))[0]
        return len(ids) >= left

    words, ends = words_until(m, prefix, config, is_over)
    main, text, ids = others[0], text_of(m, words), [token for word in words for token in word]
    if m.tokenizer is main.tokenizer:
        kept = kept_text(main, main.text(ids), ids, left)
        return (words, ends) if kept is None else (first_ids(words, left), False)
    kept = kept_text(main, text, main.encode(text)[0], left)
    return (words, ends) if kept is None else (Cut(own_ids(m, ids, kept), kept), False)


def first_ids(words, count):
    """Words up to an id, which may be inside one."""
    starts = [sum(map(len, words[:i])) for i in range(len(words))]
    return [word[: count - start] for word, start in zip(words, starts) if start < count]


def kept_text(main, text, main_ids, left):
    """The text of the first ids where there are as many as are left, or more; `None` where there are fewer, or the last
    one ends inside a character."""
    kept = main.text(main_ids[:left])
    return kept if len(main_ids) >= left and text.startswith(kept) else None


def own_ids(m, ids, kept):
    """The ids up to where the text ends, where one of them does; else the tokenization of the text."""
    return next((ids[:n] for n in range(len(ids), -1, -1) if m.text(ids[:n]) == kept), m.encode(kept)[0])


def cuts(m, text):
    """Where words of a tokenizer's own end in a text; where none can be told apart, where space begins."""
    encoded = m.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, owners = encoded["offset_mapping"], encoded.word_ids()
    if len(set(owners)) < 2:
        return {i for i in range(len(text) + 1) if text[i : i + 1].isspace() or i == len(text)}
    found = set()
    for at in range(len(text) + 1):
        left = [owner for (_, end), owner in zip(spans, owners) if end <= at]
        right = [owner for (start, _), owner in zip(spans, owners) if start >= at]
        if len(left) + len(right) == len(owners) and (not left or not right or left[-1] != right[0]):
            found.add(at)
    return found


def common_run(m, prefix, config, options, others):
    first = m.best(prefix, 1)[0][0]
    if first in m.eos:
        return [], True
    ids = [first]
    while True:
        data = b"".join(m.token_bytes(token) for token in ids)
        if len(ids) >= config.max_word_tokens + (3 if mid_character(data) else 0) or is_full(m, prefix + ids):
            return [ids], False
        token = m.best(prefix + ids, 1)[0][0]
        if token in m.eos:
            return [ids], False
        text, both = m.text(ids), m.text([*ids, token])
        if text.strip() and both.startswith(text) and "\ufffd" not in both and both != text:
            space = len(both) - len(both[len(text) :].lstrip())
            gap = set(range(len(text.rstrip()), space + 1))
            if all(gap & cuts(other, both) for other in others):
                return [ids], False
        ids = [*ids, token]


class Drawn:
    """A member whose next token is drawn: where the probabilities, laid end to end, reach a random number."""

    def __init__(self, m, numbers, temperature, top_k):
        self.m, self.numbers, self.temperature, self.top_k, self.drawn = m, numbers, temperature, top_k, {}

    def __getattr__(self, name):
        return getattr(self.m, name)

    def best(self, ids, count):
        if tuple(ids) not in self.drawn:
            log_probs = self.m.log_probs(ids).double() / self.temperature
            least = log_probs.sort(descending=True).values[: self.top_k][-1]
            shares = [math.exp(v) if v >= least else 0.0 for v in log_probs.tolist()]
            number, ends = next(self.numbers) * sum(shares), itertools.accumulate(shares)
            self.drawn[tuple(ids)] = next(token for token, end in enumerate(ends) if end > number)
        return [(self.drawn[tuple(ids)], 0.0)]


def perplexity(nll):
    return math.exp(min(nll, 700.0))


def weighted(values, weights):
    pairs = [(v, w) for v, w in zip(values, weights) if v is not None]
    return sum(v * w for v, w in pairs) / sum(w for _, w in pairs)


class SweetSpan:
    def __init__(self, num_words=4, filter_ratio=10.0):
        self.options, self.ratio = num_words, filter_ratio
        self.propose = fixed_words

    def scores(self, entries, weights):
        return [self.score(entry["nlls"], weights) for entry in entries]

    def score(self, nlls, weights):
        kept = sorted((perplexity(n), w) for n, w in zip(nlls, weights) if n is not None)
        if len(kept) > 1 and self.ratio is not None and kept[-1][0] > self.ratio * kept[0][0]:
            kept = kept[1:-1] if len(kept) > 2 else kept[:1]
        return sum(v * w for v, w in kept) / sum(w for _, w in kept)


class CoolFusion:
    options = None

    def __init__(self, rerank=False):
        self.rerank, self.propose = rerank, answer if rerank else common_run

    def scores(self, entries, weights):
        return [weighted([n if n is None else perplexity(n) for n in e["nlls"]], weights) for e in entries]


class Spans:
    def __init__(self, unit="sentence", merge="weighted", num_words=64):
        self.options = {"unit": unit, "num_words": num_words}
        self.merge, self.propose = merge, unit_of_text

    def scores(self, entries, weights):
        if self.merge == "confidence":
            own = [next((e["nlls"][k] for e in entries if k in e["own"]), None) for k in range(len(weights))]
            weights = [w * (0.5 if n is None else math.exp(-n)) for w, n in zip(weights, own)]
        return [weighted(entry["nlls"], weights) for entry in entries]


class SpecFuse:
    def __init__(self, num_tokens=10, score="probability", learning_rate=None):
        self.options, self.kind, self.rate = num_tokens, score, learning_rate
        self.propose, self.round, self.logs = draft_tokens, 0, None

    def scores(self, entries, weights):
        count, table = len(weights), []
        for j in range(count):
            row = []
            for entry in entries:
                values = entry["logits"][j] if self.kind == "logit" else [math.exp(v) for v in entry["values"][j]]
                row.append(sum(values) / len(values) if values else None)
            known = [value for value in row if value is not None]
            size, least = sum(abs(value) for value in known) or 1.0, min(0.0, *known, 0.0)
            table.append([(least if value is None else value) / size for value in row])
        self.round += 1
        if self.rate is not None and count > 1:
            self.logs = self.logs or [math.log(w) for w in weights]
            draft = [next((i for i, e in enumerate(entries) if k in e["own"]), None) for k in range(count)]
            for i in range(count):
                wins = 0
                for j in range(count):
                    for k in range(count):
                        if i not in (j, k) and draft[i] is not None:
                            wins += table[j][draft[i]] >= (
                                min(0.0, *table[j]) if draft[k] is None else table[j][draft[k]]
                            )
                reward = max(1, wins) / (count - 1) ** 2
                self.logs[i] += self.rate * math.sqrt(1 / count) / self.round * reward
            weights = [math.exp(v - max(self.logs)) for v in self.logs]
        return [-sum(w * row[i] for w, row in zip(weights, table)) / sum(weights) for i in range(len(entries))]


RUBRIC = """You are an expert reviewer. Rate how well a response answers the question.
1: the response does not answer the question, or its answer is certainly wrong.
MOST: the answer is certainly right, and nothing that was asked for is missing.
Between them: the more likely the answer is right, the higher the rating.
Neither the order of the responses nor their length matters."""


class Rerank:
    options, propose = None, staticmethod(answer)

    def __init__(self, num_samples=1):
        self.num_samples = num_samples

    def scores(self, entries, weights):
        return [weighted(entry["nlls"], weights) for entry in entries]


class Majority(Rerank):
    def __init__(self, pattern=None, num_samples=1):
        self.pattern, self.num_samples = pattern, num_samples

    def says(self, text):
        found = re.findall(self.pattern, text) if self.pattern else []
        words = unicodedata.normalize("NFKC", found[-1] if found else text).lower().casefold().split()
        return " ".join(map(self.bare, words)).strip()

    def bare(self, word):
        signs = [c for c in word if unicodedata.category(c)[0] == "P" or unicodedata.category(c) == "Cf" or c in "`|~="]
        while word and word[0] in signs and not re.match(r"[-+]?\.?\d", word):
            word = word[1:]
        return word.rstrip("".join(signs))

    def pick(self, entries, weights):
        votes = {}
        for entry in entries:
            key = self.says(entry["text"])
            votes[key] = votes.get(key, 0.0) + sum(weights[k] * n for k, n in entry["times"].items())
        top = [e for e in entries if votes[self.says(e["text"])] >= max(votes.values()) - 1e-9]
        values = self.scores(top, weights)
        return top[next(i for i, value in enumerate(values) if value <= min(values) + TIE)]


class Blender(Rerank):
    """`rankers` has, by the name of a ranker, `scores(source, answers)` of all members' answers, equal ones too."""

    rankers: ClassVar = {}

    def __init__(self, ranker="nll", num_samples=1):
        super().__init__(num_samples)
        self.ranker, self.source = self.rankers.get(ranker), None

    def scores(self, entries, weights):
        if self.ranker is None:
            return super().scores(entries, weights)
        answers = [entry["text"].strip() for entry in entries for _ in entry["own"]]
        by_text = dict(zip(answers, self.ranker.scores(self.source, answers)))
        return [-by_text[entry["text"].strip()] for entry in entries]


class Anchor:
    propose, options = staticmethod(fixed_words), 1

    def __init__(self, alpha=0.5, beta=0.5, num_words=4):
        self.alpha, self.beta, self.num_words = alpha, beta, num_words

    def alone(self, members, prefixes, config):
        """The main model's words of at least alpha each: a round of its own, or `None`."""
        m, prefix, ids, texts, ends = members[0], prefixes[0], [], [], False
        while len(texts) < self.num_words and not ends and not is_full(m, prefix + ids):
            so_far = prefix + ids
            word, ends_here = greedy_word(m, so_far, m.best(so_far, 1)[0][0], config)
            if math.exp(sum(token_log_probs(m, so_far, word, ends_here))) < self.alpha:
                break
            ids, texts, ends = ids + word, [*texts, m.text(word)], ends_here
        text = "".join(texts)
        encoded = [own_or_encoded(m, other, ids, text) for other in members]
        is_good = bool(text or ends) and fit(members, prefixes, encoded)
        return {"text": text, "ends": ends, "ids": encoded} if is_good else None

    def pick(self, entries, weights):
        mine = [entry for entry in entries if 0 in entry["own"]]
        if mine and math.exp(sum(mine[0]["values"][0])) >= self.alpha:
            return mine[0]
        logs = [-sum(entry["values"][0]) - math.log(self.beta or 1e-300) for entry in mine]
        for entry in entries:
            if entry not in mine:
                logs.append(min(-sum(entry["values"][k]) - math.log(weights[k] / weights[0]) for k in entry["own"]))
        ordered = [*mine, *[entry for entry in entries if entry not in mine]]
        return ordered[next(i for i, value in enumerate(logs) if value <= min(logs) + TIE)]


class Select(Rerank):
    """The answer of the highest score, or with a calibration of the highest probability: straight from the formulas."""

    def __init__(self, calibration=None, with_features=False):
        super().__init__()
        self.calibration = calibration

    def told(self, members, prompts):
        """What the prompt says to each member: the entropy of its first token, and what it and its last part cost."""
        self.members, self.entropies, self.costs, self.last_costs = members, [], [], []
        for m, ids in zip(members, prompts):
            log_probs = m.log_probs(ids)
            self.entropies.append(-sum(math.exp(v) * v for v in log_probs.double().tolist() if v > -math.inf))
            pieces = [m.token_bytes(token) for token in ids]
            text = b"".join(pieces)
            at = text.rstrip().rfind(b"\n\n")
            self.costs.append(self.cost(m, ids, pieces, 0))
            self.last_costs.append(self.cost(m, ids, pieces, at + 2 if at >= 0 else 0))

    def cost(self, m, ids, pieces, start):
        total, count, end = 0.0, 0, 0
        for i, piece in enumerate(pieces):
            end += len(piece)
            if i and piece and end > start:
                total, count = total - m.log_probs(ids[:i])[ids[i]].item(), count + len(piece)
        return total / count if count else None

    def words(self, text):
        if self.config.word_boundary == "unicode" and text.strip():
            from icu4py.breakers import WordBreaker

            found, space = [], ""
            for segment in WordBreaker(text, "en"):
                found, space = ([*found, space + segment], "") if segment.strip() else (found, space + segment)
            return [*found[:-1], found[-1] + space]
        found = re.findall(r"\s*\S+", text)
        rest = text[len("".join(found)) :]
        return [*found[:-1], found[-1] + rest] if found else [rest] * bool(rest)

    def by_word(self, entry, k):
        """The log-probabilities of a member's tokens, by the word that each begins in; the end is a word of its own."""
        words, values = self.words(entry["text"]), entry["values"][k]
        ends = list(itertools.accumulate(len(word.encode()) for word in words))
        m = self.members[k]
        if words and sum(len(m.token_bytes(token)) for token in entry["ids"][k]) != ends[-1]:  # they say another text
            so_far = [m.encode(text)[0] for text in itertools.accumulate(words)]
            ends = [sum(len(m.token_bytes(token)) for token in ids) for ids in so_far]
        found, at = [[] for _ in words], 0
        for token, value in zip(entry["ids"][k], values):
            if words:
                found[min(sum(end <= at for end in ends), len(words) - 1)].append(value)
            at += len(self.members[k].token_bytes(token))
        if entry["ends"]:
            found.append(values[len(entry["ids"][k]) if words else 0 :])
        return found if any(found) else []

    def confidence(self, of_words, weights, levels):
        """Per word the log of the members' mean probability of it."""
        known = [(w, words) for w, words in zip(weights, of_words) if words and any(words[at] for at in levels)]
        total, found = sum(w for w, _ in known), []
        for at in levels:
            most = max(sum(words[at]) for _, words in known)
            found.append(most + math.log(sum(w * math.exp(sum(words[at]) - most) for w, words in known) / total))
        return found

    def scores(self, entries, weights):
        if self.calibration is not None:
            return [-math.log(p) for p in self.probabilities(entries, weights)]
        found = []
        for entry in entries:
            levels = range(len(self.words(entry["text"])) or 1)
            logs = self.confidence([self.by_word(entry, k) for k in range(len(weights))], weights, levels)
            found.append(-sum(logs) / len(logs))
        has_whole = any(entry["ends"] for entry in entries)
        return [math.inf if has_whole and not e["ends"] else score for e, score in zip(entries, found)]

    def features(self, entry, texts, weights, has_whole):
        members = range(len(weights))
        of_words = [self.by_word(entry, k) for k in members]
        text, size = entry["text"], len(entry["text"].encode()) + entry["ends"]
        sums = [sum(values) if values else None for values in entry["values"]]
        tokens = [None if s is None else s / len(values) for s, values in zip(sums, entry["values"])]
        size_of = [None if s is None else s / size for s in sums]
        worst = [min(sum(word) for word in words if word) if words else None for words in of_words]
        own = [size_of[k] for k in members if k in entry["own"]]
        others = [size_of[k] for k in members if k not in entry["own"]]
        known = [value for value in size_of if value is not None]
        mean = sum(known) / len(known)
        roots = [None if s is None else s / math.sqrt(len(values)) for s, values in zip(sums, entry["values"])]
        sure = [roots[k] for k in members if k in entry["own"]] or roots
        levels = range(max(len(words) for words in of_words))
        logs = self.confidence(of_words, weights, levels)
        said, mine = [None if t is None else self.said(t) for t in texts], self.said(text)
        share = lambda values: sum(w * v for w, v in zip(weights, values)) / sum(weights)  # noqa: E731
        of_text = sum(logs) / math.sqrt(len(logs))
        return [
            *tokens, *size_of, *sums, *worst,
            self.mean(own or others), self.mean(others or own), self.mean(sure),
            math.sqrt(sum((value - mean) ** 2 for value in known) / len(known)),
            sum(logs) / len(logs), of_text, of_text if entry["ends"] or not has_whole else None, min(logs),
            share([t is not None and t.strip() == text.strip() for t in texts]),
            share([s is not None and s[0] == mine[0] for s in said]),
            share([s is not None and mine[1] is not None and s[1] == mine[1] for s in said]),
            share([0 if s is None else self.overlap(s[0], mine[0]) for s in said]),
            math.log(1 + size),
            *self.entropies, *self.costs, *self.last_costs,
        ]  # fmt: skip

    def mean(self, values):
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def said(self, text):
        words = [word for word in Majority().says(text).split() if word not in ("a", "an", "the")]
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text)
        return words, float(numbers[-1].replace(",", "")) if numbers else None

    def overlap(self, words, others):
        if not words or not others:
            return words == others
        left, common = list(others), 0
        for word in words:
            if word in left:
                left.remove(word)
                common += 1
        return 2 * common / (len(words) + len(others))

    def probabilities(self, entries, weights):
        c, texts, count = self.calibration, [None] * len(weights), len(weights)
        for entry in entries:
            for k in entry["own"]:
                texts[k] = entry["text"]
        has_whole = any(entry["ends"] for entry in entries)
        rows = [self.features(entry, texts, weights, has_whole) for entry in entries]
        place = [next((i for i, e in enumerate(entries) if k in e["own"]), None) for k in range(count)]
        found = [0.0] * len(entries)
        values = []
        for j in range(c["num_features"]):
            column = [None if i is None else rows[i][j] for i in place]
            known = [v for v in column if v is not None]
            filler = sum(known) / len(known) if known else c["centres"][j]
            values.append([filler if v is None else v for v in column])
        clip = lambda v: min(max(v, -5.0), 5.0)  # noqa: E731
        for k, i in enumerate(place):
            if i is None:
                continue
            logit = c["intercept"] + c["places"][k]
            for j, column in enumerate(values):
                mean = sum(column) / count
                prompt = clip((mean - c["centres"][j]) / c["prompt_spreads"][j])
                logit += c["own"][j] * clip((column[k] - mean) / c["own_spreads"][j])
                logit += (c["prompt"][j] + c["products"][k][j]) * prompt
            found[i] = max(found[i], 1 / (1 + math.exp(-logit)))
        return found


class PeerReview(Rerank):
    """The answer of the highest mean rating; each rating prompt is read whole, and alone."""

    def __init__(self, rubric=None, max_score=5, num_samples=1):
        super().__init__(num_samples)
        self.rubric, self.most, self.first = rubric or RUBRIC.replace("MOST", str(max_score)), max_score, None

    def told(self, members, prompts):
        self.members = members

    def turn(self, m, content):
        if not m.tokenizer.chat_template:
            return f"### User:\n{content}\n\n### Assistant:\n"
        return m.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def rating_prompt(self, m, answers, rated):
        """The ids before the reply; what answers say holds no special token."""
        request = f"\n\nRate Response {'ABC'[rated]}. Reply with one whole number from 1 to {self.most}, "
        request += "and with nothing else."
        head = f"{self.rubric}\n\nQuestion:\n{self.source}\n\nResponse A:\n"
        said = "".join(f"\n\nResponse {letter}:\n{text}" for letter, text in zip("ABC", answers))
        middle = m.encode(said.removeprefix("\n\nResponse A:\n") + request)[0]
        before = self.turn(m, head + "@@").split("@@")[0]
        own = self.turn(m, "hf-adafuse" + request)
        start, after = own[: own.rindex(request) + len(request)], own[own.rindex(request) + len(request) :]
        if not m.tokenizer.chat_template:
            return m.tokenizer(before).input_ids + middle + m.encode(after)[0]
        plain = lambda text: m.tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
        whole, part = plain(own), plain(start)
        return plain(before) + middle + (whole[len(part) :] if whole[: len(part)] == part else plain(after))

    def reply(self, m, ids):
        """The expected digit, whose probability is that of all ways to write it."""
        likely = []
        for score in range(1, self.most + 1):
            ways = {tuple(m.encode(text)[0]) for text in (str(score), f" {score}") if m.encode(text)[1]}
            likely.append(sum(math.exp(sum(token_log_probs(m, ids, list(way), False))) for way in ways))
        return sum(score * value for score, value in enumerate(likely, start=1)) / sum(likely)

    def rating(self, m, texts):
        """Of each text; `None` where a prompt and a reply outgrow the context."""
        count, found = len(texts), {text: [] for text in texts}
        ring = [[texts[(i + j) % count] for j in range(min(count, 3))] for i in range(count)]
        orders = {tuple(order) for order in ring} | {tuple(order[::-1]) for order in ring}
        shown = [(order, at, self.rating_prompt(m, order, at)) for order in sorted(orders) for at in range(len(order))]
        ways = [m.encode(text) for n in range(1, self.most + 1) for text in (str(n), f" {n}")]
        longest = max(len(ids) for ids, is_exact in ways if is_exact)
        if m.max_length is not None and any(len(ids) + longest > m.max_length for _, _, ids in shown):
            return dict.fromkeys(texts)
        for order, at, ids in shown:
            found[order[at]].append(self.reply(m, ids))
        return {text: sum(values) / len(values) for text, values in found.items()}

    def pick(self, entries, weights):
        texts = sorted({(self.so_far + entry["text"]).strip() for entry in entries})
        ratings = [self.rating(m, texts) for m in self.members]
        self.first = self.first or [{text: of[text] for text in texts} for of in ratings]
        fused = [weighted(entry["nlls"], weights) for entry in entries]
        if all(of_member[texts[0]] is None for of_member in ratings):
            means = [0.0] * len(entries)
        else:
            own = [[of_member[(self.so_far + e["text"]).strip()] for of_member in ratings] for e in entries]
            means = [weighted(row, weights) for row in own]
        best = [i for i, mean in enumerate(means) if mean >= max(means) - TIE]
        return entries[next(i for i in best if fused[i] <= min(fused[j] for j in best) + TIE)]


METHODS = {
    "sweetspan": SweetSpan,
    "cool-fusion": CoolFusion,
    "specfuse": SpecFuse,
    "spans": Spans,
    "rerank": Rerank,
    "majority": Majority,
    "blender": Blender,
    "anchor": Anchor,
    "select": Select,
    "peer-review": PeerReview,
}


def mean_nll(values, text, ends, config):
    if not values:
        return None
    size = len(values) if config.nll_normalization == "token" else max(1, len(text.encode("utf-8", "replace")) + ends)
    return -sum(values) / size


def own_logits(m, prefix, ids, ends):
    values = [m.logits(tuple(prefix + ids[:i]))[token].item() for i, token in enumerate(ids)]
    end = [max(m.logits(tuple(prefix + ids))[token].item() for token in m.eos)] if ends and m.eos else []
    return values + end


def decode_by_method(members, prompts, config, max_new_tokens, numbers=None, **warping):
    """
    New main-model ids of one prompt (`prompts`: per member, its ids) and the text of each round; `numbers`: the random
    ones by which drafts are drawn, those of a draft by its member and how many that has made.
    """
    method = METHODS[config.method](**config.method_options)
    method.source = members[0].tokenizer.decode(
        prompts[0], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    method.config = config
    prefixes, new, spans = [list(ids) for ids in prompts], [], []
    count, samples = 0, getattr(method, "num_samples", 1)

    def drafters(k):
        if numbers is None:
            return [members[k]]
        return [Drawn(members[k], numbers.branch(k, count * samples + i), **warping) for i in range(samples)]

    while len(new) < max_new_tokens and not any(is_full(m, p) for m, p in zip(members, prefixes)):
        extra = None
        if isinstance(method, Rerank) or getattr(method, "rerank", False):
            method.options = max_new_tokens - len(new)
            if not isinstance(method, Rerank):
                extra = write_together(members, prefixes, config, method.options)
        method.so_far = "".join(spans)
        if hasattr(method, "told"):
            method.told(members, prefixes)
        winner = method.alone(members, prefixes, config) if hasattr(method, "alone") else None
        winner = winner or one_round(members, prefixes, method, config, extra, drafters=drafters)
        count += 1
        if winner is None:
            break
        prefixes = [prefix + ids for prefix, ids in zip(prefixes, winner["ids"])]
        new += winner["ids"][0]
        spans.append(winner["text"])
        if winner["ends"]:
            new.append(best_eos(members[0], prefixes[0]))
            break
    return new[:max_new_tokens], spans


def write_together(members, prefixes, config, left):
    """The answer that the rounds of Cool-Fusion make, not committed: its text, whether it ends, per member its ids."""
    text, ends, taken = "", False, [[] for _ in members]
    while not ends and not (text and len(taken[0]) >= left):
        so_far = [prefix + ids for prefix, ids in zip(prefixes, taken)]
        if any(is_full(m, ids) for m, ids in zip(members, so_far)):
            break
        winner = one_round(members, so_far, CoolFusion(), config, is_sure=False)
        if winner is None:
            break
        text, ends = text + winner["text"], winner["ends"]
        taken = [ids + more for ids, more in zip(taken, winner["ids"])]
    kept = kept_text(members[0], text, taken[0], left)
    if kept is not None:
        text, ends, taken = kept, False, [own_ids(m, ids, kept) for m, ids in zip(members, taken)]
    return text, ends, taken


def one_round(members, prefixes, method, config, extra=None, is_sure=True, drafters=None):
    pool, times = {}, {}
    for k, (m, prefix) in enumerate(zip(members, prefixes)):
        for drafter in drafters(k) if drafters else [m]:
            words, ends = method.propose(drafter, prefix, config, method.options, members)
            own = pool.setdefault((text_of(m, words), ends), {})
            own.setdefault(k, [token for word in words for token in word])
            times.setdefault((text_of(m, words), ends), collections.Counter())[k] += 1
    entries, together = [], None
    if extra is not None and (extra[0] or extra[1]) and extra[:2] not in pool:
        pool[extra[:2]], together = {}, extra[2]
    for (text, ends), own in pool.items():
        ids = [own[k] if k in own else m.encode(text)[0] for k, m in enumerate(members)]
        exact = 0 in own or members[0].encode(text)[1]
        if together is not None and not own:
            ids, exact = together, True
        if not exact or not fit(members, prefixes, ids) or not (text or ends):
            continue
        values = [token_log_probs(m, p, e, ends) for m, p, e in zip(members, prefixes, ids)]
        if any(-math.inf in of_member for of_member in values) or not any(values):
            continue
        logits = [own_logits(m, p, e, ends) for m, p, e in zip(members, prefixes, ids)]
        nlls = [mean_nll(of_member, text, ends, config) for of_member in values]
        entry = {"text": text, "ends": ends, "ids": ids, "own": own, "times": times.get((text, ends), {})}
        entries.append(entry | {"values": values, "nlls": nlls, "logits": logits})
    weights = config.model_weights or [1.0] * len(members)
    if entries and hasattr(method, "pick"):
        return method.pick(entries, weights)
    if entries:
        scores = method.scores(entries, weights)
        return entries[next(i for i, score in enumerate(scores) if score <= min(scores) + TIE)]
    if not is_sure:
        return None
    word, ends = greedy_word(members[0], prefixes[0], members[0].best(prefixes[0], 1)[0][0], config)
    ids = [word, *[m.encode(members[0].text(word))[0] for m in members[1:]]]
    return {"text": members[0].text(word), "ends": ends, "ids": ids} if fit(members, prefixes, ids) else None
