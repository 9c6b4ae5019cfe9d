"""Log-likelihoods of given answers: those of plain forward passes over the same ids, and what is refused."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from support.cases import PROMPTS, random_case
from support.kinds import MODELS, model_of
from support.reference import RefMember
from support.tiny import ARCHITECTURES, TOKENIZERS, eos_ids, tiny_model

import hf_adafuse.decoding.long_spans
from hf_adafuse import AdaFuseConfig, AdaFuseDecodingError, AdaFuseEnsemble, chat_inputs
from hf_adafuse.trees.kv_cache_backend import KVCacheBackend
from hf_adafuse.trees.tree_attention_backend import TreeAttentionBackend

ANSWERS = [
    " there was a cat.",
    " there was a dog on the tree",
    " Lima",
    "\n\nPiñata",
    " 3.14, 6.28",
    "x",
    " 天气",
    " a",
]
ANSWERS += [" the the the the the the the the the the the the", " there was a cat."]


def plain(model, ids, answer, eos):
    """The log-probability of each of the answer's ids behind the others, and with `eos` of the end; by one pass."""
    with torch.no_grad():
        rows = model(torch.tensor([[*ids, *answer]]), use_cache=False).logits[0].float().log_softmax(-1)
    values = [rows[len(ids) - 1 + at, token].item() for at, token in enumerate(answer)]
    if eos is None:
        return values
    return [*values, torch.logsumexp(rows[-1, eos], 0).item() if eos else -math.inf]


def assert_plain(score, members, prompts, text, ends):
    """`members`: as of the oracle; `prompts`: of each its ids."""
    assert (score.text, score.ends) == (text, ends)
    assert "".join(score.words) == text
    for k, (member, ids) in enumerate(zip(members, prompts, strict=True)):
        answer, is_exact = member.encode(text)
        expected = plain(member.model, ids, answer, member.eos if ends else None)
        assert score.log_probs[k] == pytest.approx(expected, abs=2e-4), (k, text)
        assert score.num_tokens[k] == len(expected)
        assert score.log_likelihoods[k] == (pytest.approx(sum(expected), abs=1e-3) if expected else None)
        assert (k in score.lossy) != is_exact
    assert score.num_bytes == len(text.encode()) + ends


@pytest.mark.parametrize("number", range(48))
def test_scores_are_those_of_plain_passes(number):
    """Over random members of all tokenizers, batches and places."""
    case, rng = random_case(70000 + number), random.Random(number)
    members, ends = case.ref_members(), number % 2 == 1
    ensemble = AdaFuseEnsemble(list(zip(case.models, case.tokenizers, strict=True)))
    answers = [rng.sample(ANSWERS, rng.randint(1, 5)) for _ in case.prompts]
    told = {}
    found = ensemble.score(
        case.prompts, answers, ends=ends, max_batch_size=rng.randint(1, 4), on_scores=told.__setitem__
    )
    assert told == dict(enumerate(found))
    for prompt, texts, scores in zip(case.prompts, answers, found, strict=True):
        prompts = [tokenizer(prompt).input_ids for tokenizer in case.tokenizers]
        for text, score in zip(texts, scores, strict=True):
            assert_plain(score, members, prompts, text, ends)


@pytest.mark.filterwarnings("ignore:.* works with neither a 4-D mask nor a cache:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_scores_of_every_kind_of_model(name):
    model, tokenizer = model_of(name), TOKENIZERS["byte_level"]()
    (scores,) = AdaFuseEnsemble([(model, tokenizer)]).score(PROMPTS[0], ANSWERS[:4], ends=True)
    prompt = tokenizer(PROMPTS[0]).input_ids
    for text, score in zip(ANSWERS, scores, strict=False):
        answer = tokenizer(text, add_special_tokens=False).input_ids
        assert score.log_probs[0] == pytest.approx(plain(model, prompt, answer, eos_ids(tokenizer)), abs=2e-4)


@pytest.mark.parametrize("role", range(2))
def test_a_member_reads_the_prompt_once_and_all_answers_in_one_pass(role, monkeypatch):
    columns, run, read = [], TreeAttentionBackend.run, KVCacheBackend._read_prompts

    def counted(self, wanted):
        nodes = run(self, wanted)
        columns.append(len(nodes))
        return nodes

    def counted_prompt(self, ids, *rest):
        columns.append(ids.numel())
        return read(self, ids, *rest)

    names = ["byte_level", "characters"][:: 1 if role else -1]
    tokenizers = [TOKENIZERS[name]() for name in names]
    members = [(tiny_model("llama", name), tokenizer) for name, tokenizer in zip(names, tokenizers, strict=True)]
    ensemble = AdaFuseEnsemble(members)  # tries the backends, where no test before has
    for handle in ensemble.handles:
        handle.tested_backend()
    monkeypatch.setattr(TreeAttentionBackend, "run", counted)
    monkeypatch.setattr(KVCacheBackend, "_read_prompts", counted_prompt)
    texts = [" there was a cat", " there was a dog", " there"]
    ensemble.score(PROMPTS[0], texts)
    expected = []
    for tokenizer in tokenizers:
        answers = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        begun = {answer[:end] for answer in answers for end in range(1, len(answer))}  # what they share counts once
        expected.append((len(tokenizer(PROMPTS[0]).input_ids), len(begun)))
    prompts, passes = columns[:2], columns[2:]
    assert len(passes) == 2  # a few guesses may go along
    assert prompts == [length for length, _ in expected]
    assert all(nodes <= count <= nodes + 8 for count, (_, nodes) in zip(passes, expected, strict=True))


def test_many_logits_are_read_in_several_passes(monkeypatch):
    case = random_case(3)
    ensemble = AdaFuseEnsemble(list(zip(case.models, case.tokenizers, strict=True)))
    whole = ensemble.score(case.prompts, [ANSWERS] * len(case.prompts), ends=True)
    monkeypatch.setattr(hf_adafuse.decoding.long_spans, "_MOST_LOGITS", 1)
    monkeypatch.setattr(hf_adafuse.decoding.long_spans, "_LEAST_TOKENS", 3)
    parts = ensemble.score(case.prompts, [ANSWERS] * len(case.prompts), ends=True)
    for one, other in zip(sum(whole, []), sum(parts, []), strict=True):
        for values, others in zip(one.log_probs, other.log_probs, strict=True):
            assert values == pytest.approx(others, abs=2e-4)


def test_logits_that_are_not_needed_any_more_are_dropped(monkeypatch):
    kept = []
    leave = KVCacheBackend.drop

    def looked_at(self, finished):
        for index in finished:
            kept.extend(node for node in self.trees[index].root.computed_descendants())
        leave(self, finished)

    monkeypatch.setattr(KVCacheBackend, "drop", looked_at)
    AdaFuseEnsemble([(tiny_model(), TOKENIZERS["byte_level"]())]).score(PROMPTS[0], ANSWERS)
    assert kept and all(node.logits is None and len(node.logprobs.scores) == 0 for node in kept)


def test_logits_processors_and_sampling_play_no_part():
    model = copy.copy(tiny_model())
    tokenizer = TOKENIZERS["byte_level"]()
    (plain_scores,) = AdaFuseEnsemble([(model, tokenizer)]).score(PROMPTS[0], ANSWERS)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.suppress_tokens = tokenizer(" Lima", add_special_tokens=False).input_ids
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.3
    (scores,) = AdaFuseEnsemble([(model, tokenizer)], {"do_sample": True}).score(PROMPTS[0], ANSWERS)
    for score, expected in zip(scores, plain_scores, strict=True):
        assert score.log_probs[0] == pytest.approx(expected.log_probs[0], abs=2e-4)


def test_confidence_is_that_of_words_and_weights():
    case = random_case(6)
    weights = [float(k + 1) for k in range(len(case.models))]
    members = list(zip(case.models, case.tokenizers, strict=True))
    (score, _), *_ = AdaFuseEnsemble(members, {"model_weights": weights}).score(PROMPTS[0], [" cat", " a dog"])
    probabilities = [math.exp(value) for value in score.log_likelihoods]
    expected = sum(w * p for w, p in zip(weights, probabilities, strict=True)) / sum(weights)
    assert score.confidences == [pytest.approx(expected)]
    assert score.confidence == pytest.approx(expected)
    assert score.to_dict()["log_likelihoods"] == score.log_likelihoods


def test_a_chat_is_scored_behind_each_members_own_template():
    names, members = ["byte_level", "sentencepiece"], []
    for k, name in enumerate(names):
        tokenizer = copy.deepcopy(TOKENIZERS[name]())
        tokenizer.chat_template = "{% for m in messages %}[" + name + "]{{ m['content'] }}{% endfor %}"
        members.append((tiny_model(ARCHITECTURES[k], name), tokenizer))
    (scores,) = AdaFuseEnsemble(members).score(["there was a cat"], [[" a dog"]], chat=True)
    inputs = chat_inputs([[{"role": "user", "content": "there was a cat"}]], [tokenizer for _, tokenizer in members])
    for k, made in enumerate([inputs, *inputs["assistant_inputs"]]):
        model, tokenizer = members[k]
        answer, _ = RefMember(model, tokenizer, []).encode(" a dog")
        expected = plain(model, made["input_ids"][0].tolist(), answer, None)
        assert scores[0].log_probs[k] == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    ("prompts", "answers", "match"),
    [
        ("a", " b", "`answers` must be one list of texts per prompt"),
        ("a", [], "`answers` must be one list of texts per prompt"),
        ("a", [[]], "`answers` must be one list of texts per prompt"),
        (["a", "b"], [" c", " d"], "`answers` must be one list of texts per prompt"),
        (["a", "b"], [[" c"]], "`answers` must be one list of texts per prompt, but is 1 for 2 prompts"),
        ("a", [" c", ""], r"`answers\[0\]` must be texts that are not empty"),
        ("a", ["\ud800"], r"`answers\[0\]` must be text in UTF-8"),
        ("a", [3], "`answers` must be one list of texts per prompt"),
        (3, [" a"], "`prompts` must be a text or a list of texts"),
        pytest.param(
            "a",
            [" b" * 600],
            r"`answers\[0\]\[0\]` must fit behind its prompt into the context of the main model, 512",
            id="long",
        ),
    ],
    ids=str,
)
def test_wrong_answers_are_refused_before_the_first_pass(prompts, answers, match, monkeypatch):
    ensemble = AdaFuseEnsemble([(tiny_model("gpt2"), TOKENIZERS["byte_level"]())])  # whose positions are a table
    monkeypatch.setattr("hf_adafuse.members.member.Member.read_prompts", None)
    with pytest.raises(ValueError, match=match) as error:
        ensemble.score(prompts, answers)
    assert ", but " in str(error.value)


@pytest.mark.parametrize("name", ["chat", "ends"])
def test_switches_are_true_or_false(name, monkeypatch):
    ensemble = AdaFuseEnsemble([(tiny_model("gpt2"), TOKENIZERS["byte_level"]())])
    monkeypatch.setattr("hf_adafuse.members.member.Member.read_prompts", None)
    with pytest.raises(ValueError, match=f"`{name}` must be True or False, but is 'yes'"):
        ensemble.score(PROMPTS[0], [" a"], **{name: "yes"})
    with pytest.raises(ValueError, match="`chat` must be True or False, but is 'no'"):
        ensemble.texts(PROMPTS[0], chat="no")


def test_the_end_alone_may_be_scored():
    model, tokenizer = tiny_model(), TOKENIZERS["byte_level"]()
    (scores,) = AdaFuseEnsemble([(model, tokenizer)]).score(PROMPTS[0], [""], ends=True)
    expected = plain(model, tokenizer(PROMPTS[0]).input_ids, [], eos_ids(tokenizer))
    assert scores[0].log_probs[0] == pytest.approx(expected, abs=2e-4)
    assert (scores[0].words, scores[0].confidence, scores[0].num_bytes) == ([], None, 1)


def test_a_member_that_fails_is_named(monkeypatch):
    model, tokenizer = copy.deepcopy(tiny_model()), TOKENIZERS["byte_level"]()
    ensemble = AdaFuseEnsemble([(tiny_model("gpt2"), tokenizer), (model, tokenizer)])
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.nan)
    with pytest.raises(AdaFuseDecodingError, match="assistant 1"):
        ensemble.score(PROMPTS[0], [" a"])


def test_weights_that_follow_from_the_prompt():
    """The confidence of a word is a mean by the weights that the settings have for the prompt."""
    case = random_case(10)
    members = list(zip(case.models, case.tokenizers, strict=True))
    config = AdaFuseConfig(model_weights="prompt", prompt_sharpness=1e4)
    (score,), *_ = AdaFuseEnsemble(members, config).score(PROMPTS[1], [" Lima"])
    # So sharp are the weights that one member counts alone.
    assert any(score.confidences == [pytest.approx(math.exp(value))] for value in score.log_likelihoods)
