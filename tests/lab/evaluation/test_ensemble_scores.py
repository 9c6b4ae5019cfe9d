"""Log-likelihoods of ensembles: against a plain computation, one text and token at a time, and the harness's own."""

import math
import re

import pytest
import torch
from asked import KINDS, PAIRS, ensemble, harness_model, members, requests

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding import member_weights
from hf_adafuse.lab.evaluation import ensemble_scores
from hf_adafuse.members.vocabulary import vocabulary_of

CONFIGS = {
    "span": AdaFuseConfig(),
    "weights": AdaFuseConfig(model_weights=(3, 1)),
    "horizon": AdaFuseConfig(method_options={"length_exponent": 0.5, "horizon": True}),
    "byte": AdaFuseConfig(method_options={"length_exponent": 0.7}, nll_normalization="byte"),
    "word": AdaFuseConfig(method="words", model_weights=(1, 2)),
    "geometric": AdaFuseConfig(method="words", method_options={"mean": "geometric"}),
    "distinct": AdaFuseConfig(
        method="words", method_options={"part": "distinct", "allow_blank": False}, model_weights=(1, 2)
    ),
    "weighted": AdaFuseConfig(method="words", method_options={"part": "weighted"}, model_weights=(9, 1)),
    "prompt": AdaFuseConfig(method="words", model_weights="prompt", prompt_sharpness=2.0),
    "main alone": AdaFuseConfig(switch_margin=math.inf, model_weights=(1, 9)),
}


def log_probs_of(model, ids, start):
    """The log-probability of each id from `start` on, and whether it is the best."""
    with torch.no_grad():
        scores = [model(torch.tensor([ids[:end]])).logits[0, -1].double().log_softmax(-1) for end in range(1, len(ids))]
    kept = list(zip(scores, ids[1:], strict=True))[start - 1 :]
    return [score[token].item() for score, token in kept], all(score.argmax() == token for score, token in kept)


def ids_of(tokenizer, context, continuation):
    """The ids of both, and how many belong to the context."""
    if not context:
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return [prefix, *tokenizer.encode(continuation, add_special_tokens=False)], 1
    before, both = tokenizer.encode(context.rstrip()), tokenizer.encode(context + continuation)
    if not is_prefix(before, both):
        both = before + vocabulary_of(tokenizer).encode(context[len(context.rstrip()) :] + continuation).ids
    return both, len(before)


def is_prefix(before, both):
    return both[: len(before)] == before


def words_of_tokens(tokenizer, ids, start, text):
    """Per token from `start` on, the number of the word in which it begins, line breaks before a word apart; texts of
    the tests have no lossy tokens."""
    found = re.finditer(r"(\s*\n)?([^\S\n]*\S+)", text)
    ends = [end for word in found for end in (word.end(1), word.end()) if end > 0]
    pieces = [tokenizer.convert_ids_to_tokens(token).replace("▁", " ").replace("Ġ", " ") for token in ids[start:]]
    begin, numbers = len(text) - sum(map(len, pieces)), []
    for piece in pieces:
        numbers.append(sum(begin >= end for end in ends[:-1]))
        begin += len(piece)
    return numbers, len(ends)


def plain_score(pair, context, continuation, config):
    """The formulas of `ensemble_scores`, written out."""
    text = context[len(context.rstrip()) :] + continuation
    num_bytes = len(text.encode())
    read = []
    for model, tokenizer in pair:
        ids, start = ids_of(tokenizer, context, continuation)
        values, greedy = log_probs_of(model, ids, start)
        numbers, num_words = words_of_tokens(tokenizer, ids, start, text)
        words = [sum(v for v, n in zip(values, numbers, strict=True) if n == word) for word in range(num_words)]
        asked, special = log_probs_of(model, ids[:start], 1)[0] if start > 1 else [], set(tokenizer.all_special_ids)
        known = [-v for v, token in zip(asked, ids[1:start], strict=True) if token not in special]
        pieces = [vocabulary_of(tokenizer).piece(token) for token in ids[1:start]]
        size = sum(map(len, pieces))
        read.append((values, greedy, words, sum(known) / size if size else math.nan))
    weights = config.model_weights or [1.0] * len(pair)
    if weights == "prompt":
        nlls = [nll for *_, nll in read]
        weights = [1.0, 1.0] if any(map(math.isnan, nlls)) else [math.exp(-config.prompt_sharpness * n) for n in nlls]
    if config.switch_margin == math.inf:
        read, weights = read[:1], [1.0]
    total = sum(weights)
    weights = [weight / total for weight in weights]
    greedy = all(one[1] for one in read)
    if config.method == "words":
        columns = zip(*(words for _, _, words, _ in read), strict=True)
        if config.method_options.get("mean") == "geometric":
            return sum(sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns), greedy
        return sum(
            math.log(sum(w * math.exp(v) for w, v in zip(weights, column, strict=True))) for column in columns
        ), greedy
    lengths = [num_bytes if config.nll_normalization == "byte" else len(values) for values, *_ in read]
    a = config.method_options.get("length_exponent", 1.0)
    mean = sum(w * sum(one[0]) / length**a for w, one, length in zip(weights, read, lengths, strict=True))
    return mean * lengths[0] ** a, greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kinds", [KINDS[:2], KINDS[2:], [KINDS[1], KINDS[2]]], ids=lambda kinds: kinds[0][1])
def test_as_the_plain_computation(kinds, name):
    lm = ensemble(kinds, CONFIGS[name], batch_size=4)
    pairs = [pair for pair in PAIRS if name != "prompt" or len(pair[0]) > 20]
    found = lm.loglikelihood(requests("loglikelihood", pairs))
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        expected, is_greedy = plain_score(members(*kinds), context, continuation, CONFIGS[name])
        assert (value, greedy) == (pytest.approx(expected, abs=1e-3), is_greedy), (context, continuation)


EXAMPLES = [  # the last line of each is its cue, with what is behind it
    "Question: who?\nAnswer: the girl\n\nQuestion: where?\nAnswer: in the park\n\nQuestion: what?\nAnswer:",
    "Question: who?\nAnswer: the girl\n\nQuestion: where?\nAnswer: in the park\n\nQuestion: what?\nAnswer: ",
    "user\nWho was she?\nassistant\nthe girl\nuser\nWhere was she?\nassistant\n",
    "user\nWho was she?\nassistant\n\nthe girl\n\nuser\nWhere was she?\nassistant\n\n",
]


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["examples", "prompt"])
@pytest.mark.parametrize("context", EXAMPLES, ids=range(4))
def test_trust_is_that_of_the_context_as_it_was_given(context, weighting, monkeypatch):
    """The same numbers as `generate()` has for that prompt; of the score it is what the weights follow from."""
    kinds, trusts = KINDS[:2], []
    trust = member_weights.MemberWeights
    monkeypatch.setattr(
        member_weights, "MemberWeights", lambda config, said, number: trusts.append(said) or trust(config, said, number)
    )
    config = AdaFuseConfig(method="words", model_weights=weighting, prompt_sharpness=3.0)
    lm = ensemble(kinds, config)
    lm.generate_until(requests("generate_until", [(context, {"until": [], "max_gen_toks": 2})]))
    ((own, other),) = [[one.nll for one in said] for said in trusts]
    assert math.isfinite(own) and math.isfinite(other) and abs(own - other) > 0.01
    weights = [math.exp(-3 * own), math.exp(-3 * other)]
    pairs = [(context, " the girl"), (context, "in the park")]
    plain = AdaFuseConfig(method="words", model_weights=weights)
    for (value, _), (_, continuation) in zip(lm.loglikelihood(requests("loglikelihood", pairs)), pairs, strict=True):
        expected, _ = plain_score(members(*kinds), context, continuation, plain)
        assert value == pytest.approx(expected, abs=1e-3)
        alike, _ = plain_score(members(*kinds), context, continuation, AdaFuseConfig(method="words"))
        assert abs(value - alike) > 0.01


def test_a_context_is_read_once_for_its_continuations(monkeypatch):
    lm = ensemble(KINDS[:2], AdaFuseConfig(method="words", model_weights="examples"), batch_size=2)
    read, asked = ensemble_scores.context_evidence, []
    monkeypatch.setattr(ensemble_scores, "context_evidence", lambda *a: asked.append(a[2]) or read(*a))
    contexts = [*EXAMPLES[:2], ""]
    lm.loglikelihood(requests("loglikelihood", [(c, end) for c in contexts for end in (" a", " cat", " tree", "!")]))
    assert sorted(context for batch in asked for context in batch) == sorted([*contexts, *contexts])  # by two members


def test_trust_by_a_context_s_content_is_that_of_generate(monkeypatch):
    """Contexts without examples: one with content, one without, and one whose shortened form is too long to be read."""
    said, trust = [], member_weights.MemberWeights
    monkeypatch.setattr(
        member_weights, "MemberWeights", lambda config, one, number: said.append(one) or trust(config, one, number)
    )
    lm = ensemble([("llama", "byte_level"), ("gpt2", "characters")], AdaFuseConfig.robust())
    passage = "Passage: " + "she was there in the park " * 9
    contexts = [
        "Question: where was she?\nAnswer:",
        "Question:",
        "a b\n" * 110 + "what:",
        f"{passage}\nQuestion: cat\nA:",
    ]
    asked = [(context, {"until": [], "max_gen_toks": 2}) for context in contexts]
    for request in asked:
        lm.generate_until(requests("generate_until", [request]))
    found = ensemble_scores.EnsembleScorer(lm.handles, AdaFuseConfig.robust())
    found._read_contexts(contexts)
    for one, context in zip(said, contexts, strict=True):
        divergences = [[each.divergence for each in of_one] for of_one in (one, found._context_evidence[context])]
        assert divergences[0] == pytest.approx(divergences[1], rel=1e-5, nan_ok=True)
        sizes = [[each.content_bytes for each in of_one] for of_one in (one, found._context_evidence[context])]
        assert sizes[0] == sizes[1]
    assert all(0 < one.divergence < math.inf for one in said[0]) and all(math.isnan(one.divergence) for one in said[1])
    assert math.isnan(said[2][1].divergence)
    assert [one.content_bytes for one in said[3]] == [len(passage) - len("Passage: ...") + len("cat") - len("...")] * 2


@pytest.mark.parametrize("weighting", ["examples", "prompt"])
def test_trust_of_a_context_that_is_too_long(weighting):
    """It loses its beginning: then it has no examples."""
    kinds = [("llama", "byte_level"), ("gpt2", "characters")]
    long = EXAMPLES[2].replace("\nuser\nWhere", "\n" + "There was a cat on the tree. " * 60 + "\nuser\nWhere")
    asked = requests("loglikelihood", [(EXAMPLES[2], " cat"), (long, " cat")])
    scores = [
        [value for value, _ in ensemble(kinds, AdaFuseConfig(method="words", model_weights=given)).loglikelihood(asked)]
        for given in (weighting, None)
    ]
    assert abs(scores[0][0] - scores[1][0]) > 0.01
    assert (abs(scores[0][1] - scores[1][1]) > 0.01) == (weighting == "prompt")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
@pytest.mark.parametrize("config", [False, CONFIGS["span"], CONFIGS["byte"], AdaFuseConfig(method="words")])
def test_a_member_alone_has_the_harness_own_scores(kind, config):
    lm, own = ensemble([kind], config, batch_size=3), harness_model(*kind, batch_size=3)
    tokenizer = own.tokenizer
    pairs = [(c, d) for c, d in PAIRS if not c or is_prefix(tokenizer.encode(c.rstrip()), tokenizer.encode(c + d))]
    assert len(pairs) >= 3
    asked = requests("loglikelihood", pairs)
    for (value, greedy), expected in zip(lm.loglikelihood(asked), own.loglikelihood(asked, True), strict=True):
        assert (value, greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
    texts = requests("loglikelihood_rolling", [(text,) for _, text in PAIRS])
    assert lm.loglikelihood_rolling(texts) == pytest.approx(own.loglikelihood_rolling(texts, True), abs=1e-3)


def test_what_the_members_write_is_greedy():
    """The end of a member's own greedy text, for both members: then the ensemble is said to write it."""
    kind = KINDS[0]
    (model, tokenizer), _ = members(kind, kind)
    context = "Once upon a time"
    ids = tokenizer(context, return_tensors="pt", return_token_type_ids=False)
    written = tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0][-1:])
    lm = ensemble([kind, ("llama", "byte_level")])
    both = lm.loglikelihood(requests("loglikelihood", [(context, written), (context, " zzz")]))
    assert [greedy for _, greedy in both] == [True, False]


def test_contexts_that_are_too_long_lose_their_beginning():
    long = "There was a cat on the tree. " * 40
    kind = ("llama", "byte_level")
    asked = requests("loglikelihood", [(long, "She loved to play.")])
    (found,), (own,) = (
        ensemble([kind], False).loglikelihood(asked),
        harness_model(*kind).loglikelihood(asked, True),
    )
    assert found[0] == pytest.approx(own[0], abs=1e-3)
    with pytest.raises(ValueError, match="A continuation must be at most 512 tokens of the main model"):
        ensemble([kind], False).loglikelihood(requests("loglikelihood", [("a", long * 3)]))


def test_long_texts_are_read_in_windows():
    texts = requests("loglikelihood_rolling", [("There was a cat on the tree. " * 60,), ("She",)])
    kind = ("llama", "byte_level")
    own = harness_model(*kind).loglikelihood_rolling(texts, True)
    assert ensemble([kind], False).loglikelihood_rolling(texts) == pytest.approx(own, abs=1e-2)
    assert all(math.isfinite(value) for value in ensemble(KINDS[:2]).loglikelihood_rolling(texts))


@pytest.mark.parametrize("method", ["unite", "majority", "sweetspan"])
def test_other_methods_are_scored_by_the_span_rule_and_that_is_said(method):
    lm, span = ensemble(KINDS[:2], AdaFuseConfig(method=method)), ensemble(KINDS[:2], AdaFuseConfig())
    asked, texts = requests("loglikelihood", PAIRS), requests("loglikelihood_rolling", [("She said the cat",)])
    ensemble_scores.warn_of_span_rule.cache_clear()
    with pytest.warns(UserWarning, match="follow AdaFuse's span rule, not the method"):
        found = lm.loglikelihood(asked)
    rolling = lm.loglikelihood_rolling(texts)  # said once
    assert (found, rolling) == (span.loglikelihood(asked), span.loglikelihood_rolling(texts))
