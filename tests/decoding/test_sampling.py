"""Sampled words: how often each comes, and which come for given random numbers.

The statistics compare draws with probabilities that are worked out from the members' tables. The oracle is the rule in
plain lines: no cache, no batch, no tree, no code of the package but the random numbers.
"""

from __future__ import annotations

import bisect
import collections
import copy
import dataclasses
import itertools
import math
import random

import pytest
import torch
from support.cases import random_case
from support.reference import mid_character, unicode_boundary
from support.toys import Toy, ToyConfig, word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_adafuse import AdaFuseConfig, enable_adafuse
from hf_adafuse.call.sampling import random_streams

# Statistics. The level of every test is 1 in 1,000; the seeds are fixed.

NEVER = -60.0  # a logit beside others of about 0
LEVEL = 3.0902  # of the standard normal distribution, the point that one value in 1,000 is above


def critical(freedom):
    """The point that one value in 1,000 of a chi-squared distribution is above (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + LEVEL * math.sqrt(2 / (9 * freedom))) ** 3


def chi_squared(counts, expected):
    """The statistic and its degrees of freedom; outcomes expected less than 5 times are one."""
    assert math.isclose(math.fsum(expected.values()), 1.0, abs_tol=1e-6)
    assert set(counts) <= {outcome for outcome, share in expected.items() if share > 0}, "an impossible outcome"
    total = sum(counts.values())
    cells, rest = [], (0, 0.0)
    for outcome, share in expected.items():
        cell = counts[outcome], share * total
        if cell[1] >= 5:
            cells.append(cell)
        else:
            rest = rest[0] + cell[0], rest[1] + cell[1]
    cells += [rest] if rest[1] > 0 else []
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def agrees(counts, expected):
    statistic, freedom = chi_squared(counts, expected)
    return statistic < critical(freedom)


def test_the_test_itself():
    for freedom, point in {1: 10.83, 5: 20.52, 10: 29.59, 30: 59.70}.items():  # of a printed table
        assert critical(freedom) == pytest.approx(point, rel=0.035)
    rng = random.Random(0)
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    drawn = [collections.Counter(rng.choices("abc", shares.values(), k=2000)) for _ in range(1000)]
    assert sum(not agrees(counts, shares) for counts in drawn) <= 5
    assert sum(agrees(counts, {"a": 0.45, "b": 0.35, "c": 0.2}) for counts in drawn) < 200
    with pytest.raises(AssertionError, match="impossible"):
        agrees(collections.Counter("abcd"), shares)


def member(tokenizer, rows, eos=("</s>",), **warping):
    """A toy whose next token depends on the last one: what a row leaves out cannot come; how its tokens are drawn."""
    index = tokenizer.get_vocab()
    table = torch.full((len(tokenizer), len(tokenizer)), NEVER)
    table[:, index["</s>"]] = 0.0
    for last, row in rows.items():
        assert math.isclose(sum(row.values()), 1.0)
        table[index[last]] = NEVER
        for token, probability in row.items():
            table[index[last], index[token]] = math.log(probability)
    config = ToyConfig(vocab_size=len(tokenizer), eos_token_id=index["</s>"], pad_token_id=index["</s>"])
    model = Toy(config, table).eval()
    model.generation_config.eos_token_id = [index[token] for token in eos]
    model.generation_config.update(**warping)
    return model, tokenizer


def draw(members, prompt, num_tokens, times, weights=None, batch=500, **kwargs):
    """The new ids of so many draws."""
    (main, tokenizer), *others = members
    row = tokenizer(prompt, return_tensors="pt").input_ids
    ids = []
    for seed in range(times // batch):
        torch.manual_seed(seed)
        output = enable_adafuse(main).generate(
            row.repeat(batch, 1),
            attention_mask=torch.ones_like(row.repeat(batch, 1)),
            tokenizer=tokenizer,
            assistant_models=[model for model, _ in others],
            assistant_tokenizers=[tok for _, tok in others],
            adafuse_config=AdaFuseConfig(model_weights=weights),
            do_sample=True,
            max_new_tokens=num_tokens,
            **kwargs,
        )
        ids += output[:, row.shape[1] :].tolist()
    return ids


def warped(row, temperature=1.0, top_k=None):
    """Probabilities that were warped: made as sharp as the temperature says, and those below the k-th left out."""
    least = sorted(row.values())[-top_k] if top_k is not None and top_k < len(row) else 0.0
    sharp = {token: share ** (1 / temperature) for token, share in row.items() if share >= least}
    return {token: share / sum(sharp.values()) for token, share in sharp.items()}


def mixture(rows, weights):
    shares = collections.Counter()
    for row, weight in zip(rows, weights, strict=True):
        for outcome, share in row.items():
            shares[outcome] += share * weight / sum(weights)
    return dict(shares)


# Two tokenizers of the same words in different orders, a token each.
WORDS = word_tokenizer(["So", "It", "is", "was", "be"]), word_tokenizer(["be", "was", "So", "is", "It"])
ROWS = (
    {"▁It": {"▁is": 0.5, "▁was": 0.3, "▁be": 0.16, "</s>": 0.04}, "▁is": {"▁It": 0.7, "</s>": 0.3},
     "▁was": {"▁be": 0.2, "▁So": 0.8}, "▁be": {"▁was": 0.4, "▁is": 0.35, "▁So": 0.25}},
    {"▁It": {"▁is": 0.1, "▁was": 0.2, "▁be": 0.6, "▁So": 0.1}, "▁is": {"▁was": 0.5, "▁So": 0.2, "</s>": 0.3},
     "▁was": {"▁be": 0.9, "</s>": 0.1}, "▁be": {"▁was": 0.1, "▁is": 0.2, "▁So": 0.7}},
)  # fmt: skip


def mixed(last, weights=(1.0, 1.0), **warping):
    """The words after a word, by both members together."""
    return mixture([warped(rows.get(last, {"</s>": 1.0}), **warping) for rows in ROWS], weights)


def named(ids, tokenizer=WORDS[0]):
    return collections.Counter(tuple(tokenizer.convert_ids_to_tokens(row)) for row in ids)


def as_texts(shares):
    return {(token,): share for token, share in shares.items()}


def pair():
    return [member(tokenizer, rows) for tokenizer, rows in zip(WORDS, ROWS, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        (dict(weights=[1.0, 3.0]), [dict(weights=[1.0, 2.6]), dict(weights=[3.0, 1.0]), {}]),
        (dict(temperature=0.5, top_k=2), [dict(temperature=0.6, top_k=2), dict(temperature=0.5, top_k=3), {}]),
    ],
    ids=["weighted", "warped"],
)
def test_a_word_is_of_the_weighted_mixture(asked, wrong):
    """20,000 words. The test can fail: of another weight, temperature or k they would not be."""
    counts = named(draw(pair(), "So It", 1, 20_000, **asked))
    assert counts.total() == 20_000 and agrees(counts, as_texts(mixed("▁It", **asked)))
    for other in wrong:
        assert not agrees(counts, as_texts(mixed("▁It", **other)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [dict(weights=[1.0, 3.0]), dict(temperature=0.5, top_k=2)], ids=["weighted", "warped"]
)
def test_a_text_of_two_words_has_the_product(asked):
    counts = named(draw(pair(), "So It", 2, 5000, **asked))
    expected = {}
    for first, share in mixed("▁It", **asked).items():
        rest = mixed(first, **asked) if first != "</s>" else {"</s>": 1.0}  # padding is the same token
        expected.update({(first, second): share * probability for second, probability in rest.items()})
    assert agrees(counts, expected)
    wrong = {pair: mixed("▁It", **asked)[pair[0]] / len(expected) for pair in expected}
    assert not agrees(counts, {pair: share / sum(wrong.values()) for pair, share in wrong.items()})


@pytest.mark.slow
def test_each_member_draws_by_settings_of_its_own():
    own = {"temperature": 0.5}, {"top_k": 2}
    members = [member(tok, rows, **settings) for tok, rows, settings in zip(WORDS, ROWS, own, strict=True)]
    expected = [warped(rows["▁It"], **settings) for rows, settings in zip(ROWS, own, strict=True)]
    assert agrees(named(draw(members, "So It", 1, 3000)), as_texts(mixture(expected, [1, 1])))


@pytest.mark.slow
def test_a_member_of_no_temperature_takes_its_likeliest_word_while_others_draw():
    """Its own temperature, or the main model's, is nearly 0; the other's is 1."""
    for number, settings in enumerate([({"temperature": 0.001}, {}), ({}, {"temperature": 0.001})]):
        members = [member(tok, rows, **own) for tok, rows, own in zip(WORDS, ROWS, settings, strict=True)]
        expected = [rows["▁It"] for rows in ROWS]
        expected[number] = {max(expected[number], key=expected[number].get): 1.0}
        assert agrees(named(draw(members, "So It", 1, 3000, [1.0, 2.0])), as_texts(mixture(expected, [1, 2])))


def test_rounds_say_by_which_weights_a_member_is_drawn():
    members = [member(tok, rows) for tok, rows in zip(WORDS, ROWS, strict=True)]
    main, tokenizer = members[0]
    output = enable_adafuse(main).generate(
        tokenizer("So It", return_tensors="pt").input_ids,
        tokenizer=tokenizer,
        assistant_models=[members[1][0]],
        assistant_tokenizers=[members[1][1]],
        adafuse_config=AdaFuseConfig(model_weights=[1.0, 3.0]),
        do_sample=True,
        max_new_tokens=2,
        return_dict_in_generate=True,
    )
    assert output.rounds[0] and all(one.weights == [0.25, 0.75] for one in output.rounds[0])


@pytest.mark.slow
def test_words_that_the_main_model_cannot_write_are_drawn_again():
    """The assistant's " was" is unknown to the main model: the mixture is that of the words that are left."""
    tokenizer = word_tokenizer(["So", "It", "is", "be"])
    main = member(tokenizer, {"▁It": {"▁is": 0.8, "▁be": 0.2}})
    other = member(WORDS[1], {"▁It": {"▁is": 0.2, "▁be": 0.3, "▁was": 0.5}})
    counts = named(draw([main, other], "So It", 1, 3000, [1.0, 2.0]), tokenizer)
    assert agrees(counts, as_texts({"▁is": (0.8 + 2 * 0.2) / 2, "▁be": (0.2 + 2 * 0.3) / 2}))


# Words of one to three tokens.


def spelled_tokenizer():
    """Letters, two of which may have the space in front."""
    vocab = {token: index for index, token in enumerate(["<unk>", "</s>", "</e>", "▁", "a", "b", "c", "▁a", "▁b"])}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>", "</e>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<unk>")


SPELLED = spelled_tokenizer()
SPELLING = {
    "▁a": {"b": 0.4, "c": 0.2, "▁a": 0.15, "▁b": 0.15, "</s>": 0.06, "</e>": 0.04},
    "▁b": {"c": 0.5, "▁a": 0.3, "▁b": 0.1, "</e>": 0.1},
    "b": {"c": 0.3, "▁b": 0.5, "▁a": 0.1, "</s>": 0.1},
    "c": {"▁a": 0.6, "▁b": 0.2, "</s>": 0.05, "</e>": 0.15},
}
ENDS = ("</s>", "</e>")


def begins(token):
    return token.startswith("▁") or token in ENDS


def two_words(last, num_words=2, row=lambda last: SPELLING[last]):
    """The tokens of texts of so many words, or of fewer that end, with their probabilities."""
    texts = collections.Counter()
    open_texts = [((), 1.0)]
    while open_texts:
        tokens, share = open_texts.pop()
        for token, probability in row(tokens[-1] if tokens else last).items():
            longer = (*tokens, token)
            if token in ENDS:
                texts[longer] += share * probability
            elif sum(map(begins, longer)) > num_words:  # this token begins one word more
                texts[tokens] += share * probability
            else:
                open_texts.append((longer, share * probability))
    return dict(texts)


def cut(tokens, num_words=2):
    """The first words of a text, without the padding behind its end."""
    words = 0
    for index, token in enumerate(tokens):
        words += begins(token)
        if token in ENDS:
            return tuple(tokens[: index + 1])
        if words > num_words:
            return tuple(tokens[:index])
    raise AssertionError("the text is too short to tell its words")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_k": 2}], ids=["as they are", "warped"])
def test_one_member_alone_draws_what_ordinary_sampling_draws(asked):
    model = member(SPELLED, SPELLING, ENDS)
    expected = two_words("▁a", row=lambda last: warped(SPELLING[last], **asked))
    assert len(expected) > 40 and max(map(len, expected)) >= 8  # the prompt's word may go on
    ids = draw([model], "a a", 9, 4000, **asked)
    texts = collections.Counter(cut(SPELLED.convert_ids_to_tokens(row)) for row in ids)
    assert agrees(texts, expected)
    # Ordinary sampling is what was worked out.
    row = SPELLED("a a", return_tensors="pt").input_ids.repeat(4000, 1)
    torch.manual_seed(0)
    output = model[0].generate(row, attention_mask=torch.ones_like(row), do_sample=True, max_new_tokens=9, **asked)
    texts = collections.Counter(cut(SPELLED.convert_ids_to_tokens(ids)) for ids in output[:, row.shape[1] :].tolist())
    assert agrees(texts, expected)


def word_shares(last):
    """The words that begin after a token, with their probabilities: what comes when the last word is over."""
    shares, open_words = collections.Counter(), []
    first = {token: share for token, share in SPELLING[last].items() if begins(token)}
    for token, share in first.items():
        share /= sum(first.values())
        if token in ENDS:
            shares["</s>"] += share
        else:
            open_words.append(([token], share))
    while open_words:
        word, share = open_words.pop()
        for token, probability in SPELLING[word[-1]].items():
            if begins(token):
                shares["".join(word)] += share * probability
            else:
                open_words.append(([*word, token], share * probability))
    return dict(shares)


@pytest.mark.slow
def test_the_mixture_is_of_words_however_they_are_spelled():
    """The main model spells, the other has a token for every word; the main model's own part of the second word is of
    what begins a word, however the first one was drawn."""
    whole = word_tokenizer(["a", "b", "ab", "ac", "abc", "bc"])
    rows = {
        "▁ac": {"▁abc": 0.3, "▁b": 0.4, "▁a": 0.2, "</s>": 0.1},
        "▁abc": {"▁ac": 0.5, "▁bc": 0.5},
        "▁b": {"▁ab": 1.0},
        "▁a": {"▁abc": 0.6, "</s>": 0.4},
        "▁ab": {"▁a": 0.9, "</s>": 0.1},
        "▁bc": {"▁ac": 0.2, "▁bc": 0.8},
    }
    ids = draw([member(SPELLED, SPELLING, ENDS), member(whole, rows)], "a ac", 7, 4000, [2.0, 3.0])
    texts = collections.Counter()
    for row in ids:
        tokens = ["</s>" if token in ENDS else token for token in cut(SPELLED.convert_ids_to_tokens(row))]
        words = [token for token in tokens if token != "</s>"]
        texts["".join(words if sum(map(begins, words)) == 2 else tokens)] += 1
    expected = collections.Counter()
    for first, share in mixture([word_shares("c"), rows["▁ac"]], [2, 3]).items():
        spelled = SPELLED.tokenize(first.replace("▁", " "))[-1] if first != "</s>" else None
        seconds = {"": 1.0} if spelled is None else mixture([word_shares(spelled), rows[first]], [2, 3])
        for second, probability in seconds.items():
            expected[first + second] += share * probability
    assert agrees(texts, dict(expected))


# The oracle.

MOST_DRAWS, MOST_REFUSED = 16, 8


def warp(scores, temperature, top_k, top_p):
    """The probabilities from which is drawn, as a list."""
    scores = [value / temperature for value in scores.double().tolist()]
    if top_k:
        least = sorted(scores, reverse=True)[:top_k][-1]
        scores = [value if value >= least else -math.inf for value in scores]
    highest = max(scores)
    shares = [math.exp(value - highest) for value in scores]
    shares = [share / math.fsum(shares) for share in shares]
    if top_p < 1.0:  # the likeliest that together have it
        kept, total = set(), 0.0
        for token in sorted(range(len(shares)), key=lambda token: -shares[token]):
            if total >= top_p:
                break
            kept.add(token)
            total += shares[token]
        shares = [share if token in kept else 0.0 for token, share in enumerate(shares)]
    return shares


def pick(shares, number):
    """Where the shares, laid end to end, reach this part of the whole."""
    ends = list(itertools.accumulate(shares))
    return bisect.bisect_right(ends, number * ends[-1])


class PlainSampler:
    """A prompt's text, word by word, by running the whole text for every token."""

    def __init__(self, members, prompts, config, stream, temperature=1.0, top_k=50, top_p=1.0):
        self.members, self.prefixes, self.config = members, [list(prompt) for prompt in prompts], config
        self.weights = config.model_weights or [1.0] * len(members)
        self.numbers, self.warping = stream, (temperature, top_k, top_p)
        self.last = None  # the bytes of the last word where it might go on
        self.new, self.spans = [], []

    def is_over(self, data, member, token):
        """Whether a word of these bytes ends before a token."""
        if token in member.eos:
            return True
        text, after = data.decode(errors="replace"), member.token_bytes(token).decode(errors="replace")
        if not text.strip() or mid_character(data):
            return False
        return after[:1].isspace() or bool(
            self.config.word_boundary == "unicode" and after and unicode_boundary(text, after)
        )

    def is_closed(self, data, num_tokens, num_free):
        text = data.decode(errors="replace")
        is_long = num_tokens >= self.config.max_word_tokens + (3 if mid_character(data) else 0)
        return is_long or num_tokens >= num_free or bool(text.strip() and text[-1].isspace())

    def token(self, k, ids, allow):
        member, (temperature, *_) = self.members[k], self.warping
        scores = member.log_probs(self.prefixes[k] + ids)
        if temperature <= 0.01:
            order = [token for token, _ in member.best(self.prefixes[k] + ids, None)]
            return next(filter(allow, order), order[0])
        shares = warp(scores, *self.warping)
        for _ in range(MOST_DRAWS):
            token = pick(shares, next(self.numbers))
            if allow(token):
                return token
        allowed = [share if share and allow(token) else 0.0 for token, share in enumerate(shares)]
        return pick(allowed, next(self.numbers)) if any(allowed) else token

    def word(self, k):
        """Ids, bytes, the token that ends the text, and whether the word might go on."""
        member, ids, data, last = self.members[k], [], b"", self.last
        num_free = (member.max_length or math.inf) - len(self.prefixes[k])
        while True:
            over = last if not ids else None
            token = self.token(k, ids, lambda token, over=over: over is None or self.is_over(over, member, token))
            if not ids and token in member.eos:
                return ids, data, token, False
            if ids and self.is_over(data, member, token):
                return ids, data, None, True
            ids, data = [*ids, token], data + member.token_bytes(token)
            if self.is_closed(data, len(ids), num_free):
                return ids, data, None, False

    def whose(self):
        if self.warping[0] <= 0.01:
            return self.weights.index(max(self.weights))
        return pick(self.weights, next(self.numbers))

    def one_word(self):
        """The tokens of every member, the text, the end; `None` where a context is full."""
        for refused in range(MOST_REFUSED + 1):
            k = self.whose() if refused < MOST_REFUSED else 0
            ids, data, end, is_open = self.word(k)
            text = self.members[k].text(ids) if ids else ""
            encoded = [ids if other == k else member.encode(text) for other, member in enumerate(self.members)]
            is_exact = k == 0 or encoded[0][1]
            encoded = [ids if other == k else encoded[other][0] for other in range(len(self.members))]
            reaches = is_exact and (text or end is not None)
            fits = [
                member.max_length is None or len(prefix) + len(own) <= member.max_length
                for member, prefix, own in zip(self.members, self.prefixes, encoded, strict=True)
            ]
            if reaches and not all(fits):
                return None
            if reaches or k == 0:
                self.last = data if is_open else None
                return k, encoded, text, end
        raise AssertionError("unreachable")

    def run(self, max_new_tokens):
        """New ids of the main model, and each round's text and member."""
        while len(self.new) < max_new_tokens:
            full = [m.max_length is not None and len(p) >= m.max_length for m, p in zip(self.members, self.prefixes)]
            word = None if any(full) else self.one_word()
            if word is None:
                break
            k, encoded, text, end = word
            self.prefixes = [prefix + ids for prefix, ids in zip(self.prefixes, encoded, strict=True)]
            self.new += encoded[0]
            self.spans.append((text, k))
            if end is not None:
                main = self.members[0]
                log_probs = main.log_probs(self.prefixes[0])
                self.new.append(end if k == 0 else max(sorted(main.eos), key=lambda token: log_probs[token].item()))
                break
        return self.new[:max_new_tokens], self.spans


def sampled(case, **kwargs):
    _, ids, mask = case.main_ids()
    return enable_adafuse(copy.copy(case.models[0])).generate(
        ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, max_new_tokens=case.max_new_tokens,
        do_sample=True, return_dict_in_generate=True, **kwargs,
    )  # fmt: skip


def random_sampling(number):
    """A case, and how its tokens are drawn."""
    rng, case = random.Random(number), random_case(number)
    weights = [rng.uniform(0.2, 2.0) for _ in case.models] if number % 3 else None
    config = {"model_weights": weights, "max_word_tokens": rng.choice([1, 2, 3, 6, 32])}
    config["word_boundary"] = "unicode" if number % 4 == 1 else "whitespace"
    case.config = dataclasses.replace(case.config, **config)
    case.prompts += case.prompts[:1] if number % 5 == 0 else []  # the same one twice
    warping = {"temperature": rng.choice([0.001, 0.5, 1.0, 1.7]), "top_k": rng.choice([0, 3, 50]), "top_p": 1.0}
    warping["top_p"] = rng.choice([0.5, 0.9, 1.0])
    return case, warping


def assert_as_drawn(case, members, output, seed, warping):
    rows, ids, _ = case.main_ids()
    torch.manual_seed(seed)
    streams = random_streams(rows)
    for index, (row, stream) in enumerate(zip(rows, streams, strict=True)):
        plain = PlainSampler(members, case.member_prompts(row), case.config, stream, **warping)
        expected, spans = plain.run(case.max_new_tokens)
        got = output.sequences[index, ids.shape[1] :].tolist()
        assert got[: len(expected)] == expected, f"row {index} of {case} with {warping}: {got} is not {expected}"
        assert set(got[len(expected) :]) <= {case.tokenizers[0].pad_token_id}, f"row {index} of {case} goes on: {got}"
        found = [(committed.text, committed.proposer) for committed in output.rounds[index]]
        assert found[:-1] == spans[: len(found) - 1] and len(found) == len(spans)
    return streams


@pytest.mark.parametrize("number", range(48))
def test_a_sample_equals_the_oracle(number):
    case, warping = random_sampling(number)
    torch.manual_seed(number)
    output = sampled(case, **warping)
    assert_as_drawn(case, case.ref_members(), output, number, warping)


def test_the_cases_cover_what_they_should(monkeypatch):
    monkeypatch.setattr("support.cases.tiny_model", lambda architecture, *_: architecture)
    found = [random_sampling(number) for number in range(48)]
    assert {len(case.models) for case, _ in found} == {1, 2, 3, 4}
    assert {len(case.prompts) for case, _ in found} >= {1, 2, 3, 4}
    assert {case.config.max_word_tokens for case, _ in found} == {1, 2, 3, 6, 32}
    assert len({case.config.word_boundary for case, _ in found}) == 2
    for name, count in {"temperature": 4, "top_k": 3, "top_p": 3}.items():
        assert len({warping[name] for _, warping in found}) == count
