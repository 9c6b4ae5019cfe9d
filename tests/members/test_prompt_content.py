"""What of a prompt is its content, what a member's next token tells of it, and what weights follow from that."""

from __future__ import annotations

import copy
import dataclasses
import math
import random

import pytest
import torch
from support.chats import CHATS, LONGER, MARKED, PLAIN, QUESTION, members, templated
from support.chats import by_hand as rendered
from support.hosts import TWO, ensemble
from support.reference import RefMember
from support.reference_rules import decode_by_rule
from support.reference_rules import information as by_hand
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseConfig, chat_inputs, enable_adafuse
from hf_adafuse.decoding import member_weights
from hf_adafuse.decoding.member_weights import MemberWeights
from hf_adafuse.members.chat_ending import chat_endings, ending_of
from hf_adafuse.members.prompt_content import (
    PromptEvidence,
    content_bytes,
    content_divergence,
    ids_without_content,
    without_content,
)
from hf_adafuse.members.vocabulary import Vocabulary

FEW_SHOT = "Question: cat\nAnswer: it was\nQuestion: tree\nAnswer:"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Question: Who wrote Faust?\nAnswer:", "Question: ...\nAnswer:"),
        ("Passage: A b c.\nQuestion: Who?\nAnswer:", "Passage: ...\nQuestion: ...\nAnswer:"),
        ("The capital of Peru is", "The ... is"),
        ("Q: Who wrote Faust? A: ", "Q: ... A: "),
        ("Who wrote Faust?\n", "Who ... Faust?\n"),  # the last line is the last one with text
        ("one two", "one two"),
        ("Faust", "Faust"),
        ("a b\n\n  c d\ne", "a ...\n\nc ...\ne"),  # empty lines stay, space at the beginning of a line does not
        ("a b\r\nc:", "a ...\nc:"),
        ("", ""),
        (" \n", " \n"),
    ],
)
def test_what_is_left_of_a_prompt(text, expected):
    assert without_content(text) == expected
    assert without_content(expected) == expected


def test_the_divergence_is_that_of_a_coin():
    """Of two tokens that were equally likely one is left: the logarithm of 2."""
    both, one = torch.tensor([0.0, 0.0, -math.inf]), torch.tensor([0.0, -math.inf, -math.inf])
    assert content_divergence(one, both) == pytest.approx(math.log(2))
    assert content_divergence(both, both + 3) == pytest.approx(0.0, abs=1e-12)  # logits are known but for a constant
    assert content_divergence(both, one) == math.inf
    assert content_divergence(torch.tensor([0.0, -740.0]), torch.tensor([0.0, -800.0])) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "characters"])
def test_random_prompts_equal_what_is_computed_by_hand(kind):
    tokenizer, model = TOKENIZERS[kind](), tiny_model("llama", kind, 3)
    vocabulary, slow, rng, num_found = Vocabulary(tokenizer), RefMember(model, tokenizer, []), random.Random(kind), 0
    for _ in range(60):
        text = "".join(rng.choice(["Q:", " the cat", " tree", "\n", " ", "it was", " A:"]) for _ in range(8))
        ids = tokenizer(text).input_ids
        expected, shortened = by_hand(slow, ids), ids_without_content(vocabulary, [], ids)
        assert (expected is None) == (shortened is None)
        if expected is not None:
            logits = [model(torch.tensor([each])).logits[0, -1].detach() for each in (ids, shortened)]
            assert content_divergence(*logits) == pytest.approx(expected[0], rel=1e-6)
            assert content_bytes(vocabulary, ids, shortened) == expected[1]
            num_found += 1
    assert num_found > 20


def weights(*evidence, **config):
    config = AdaFuseConfig(model_weights="examples_or_content", **config)
    found = MemberWeights(config, [PromptEvidence(*each) for each in evidence], len(evidence)).weights
    return [weight / max(found) for weight in found]


def test_weights_follow_from_what_all_members_tell():
    nan = math.nan
    assert weights((nan, 2.0), (nan, 1.0)) == pytest.approx([1.0, 0.5**8])
    assert weights((nan, 4.1), (nan, math.inf)) == [1.0, 1.0]  # both make enough of it
    assert weights((nan, 9.0), (nan, 0.0)) == pytest.approx([1.0, (0.001 / 4.0) ** 8])
    assert weights((nan, 0.8), (nan, nan)) == [1.0, 1.0]  # one does not tell
    assert weights((1.0, nan), (nan, 0.4)) == [1.0, 1.0]  # one found examples where the other found none
    assert weights((nan, 0.5, 20, True), (nan, 0.2, 20, False)) == [1.0, 1.0]  # a chat for one of them only
    assert weights((1.0, 0.9), (2.0, 0.4), prompt_sharpness=3.0) == pytest.approx([1.0, math.exp(-3)])


def test_of_long_content_more_is_enough():
    """A nat for 40 bytes, from 4 to 8, and twice the power; by the member in whose text the content is shortest."""
    nan = math.nan
    assert weights((nan, 9.0, 160), (nan, 4.5, 160)) == [1.0, 1.0]
    assert weights((nan, 9.0, 200), (nan, 4.5, 200)) == pytest.approx([1.0, (4.5 / 5) ** 10])
    assert weights((nan, 9.0, 200), (nan, 4.5, 2000)) == pytest.approx([1.0, (4.5 / 5) ** 10])
    assert weights((nan, 9.0, 5000), (nan, 7.0, 5000)) == pytest.approx([1.0, (7 / 8) ** 16])
    assert weights((nan, 9.0, 5000), (nan, math.inf, 5000)) == [1.0, 1.0]


@pytest.mark.parametrize("number", range(4))
def test_long_prompts_equal_the_oracle(number):
    """Their content moves the next token by more than is enough for short ones."""
    rng = random.Random(number)
    words = " ".join(rng.choice(["the cat", "tree", "was there", "it was", "She"]) for _ in range(30))
    case = ensemble(*TWO, n=8, prompts=[f"Text: {words}\nQuestion: cat\nAnswer:"], model_weights="examples_or_content")
    prompts, members = case.member_prompts(case.main_ids()[0][0]), case.ref_members()
    told = [by_hand(member, ids) for member, ids in zip(members, prompts, strict=True)]
    assert max(nats for nats, _ in told) > 4 and min(num_bytes for _, num_bytes in told) > 160, "choose another case"
    expected = decode_by_rule(members, prompts, case.config, 8)[0]
    output = case.fast()
    assert output.sequences[0, len(prompts[0]) :].tolist()[: len(expected)] == expected
    found = output.rounds[0][0].weights
    enough = min(8, min(num_bytes for _, num_bytes in told) / 40)
    logs = [2 * enough * math.log(min(nats, enough)) for nats, _ in told]
    assert math.log(found[0] / found[1]) == pytest.approx(logs[0] - logs[1], rel=1e-4)


@pytest.mark.parametrize(
    ("weighting", "prompts", "num_reads"),
    [
        ("examples_or_content", ["Question: cat\nAnswer:", "Question: the tree\nAnswer:"], 1),  # in one form
        ("examples_or_content", [FEW_SHOT] * 2, 0),
        ("examples_or_content", ["Question:"], 0),  # without content
        ("examples", ["Question: cat\nAnswer:"], 0),
    ],
)
def test_each_member_reads_a_shortened_prompt_once(weighting, prompts, num_reads):
    case = ensemble(*TWO, n=4, prompts=prompts, model_weights=weighting)
    case.max_batch_size = 1  # they come one after the other
    case.models = [copy.deepcopy(model) for model in case.models]
    read = [[], []]
    for model, ids in zip(case.models, read, strict=True):
        model.register_forward_pre_hook(
            lambda model, args, given, ids=ids: ids.append(given["input_ids"].tolist()), with_kwargs=True
        )
    case.fast()  # the first call tests the model
    read[0].clear()
    read[1].clear()
    stats = case.fast().stats
    for k, (tokenizer, ids) in enumerate(zip(case.tokenizers, read, strict=True)):
        assert ids.count([tokenizer("Question: ...\nAnswer:").input_ids]) == num_reads
        assert stats["members"][k]["forward_passes"] == len(ids)


def test_processors_do_not_change_whom_the_content_moves(monkeypatch):
    """One member may write a single word only; what it makes of the prompt is the same."""
    found, weights_of = [], member_weights.MemberWeights
    monkeypatch.setattr(
        member_weights,
        "MemberWeights",
        lambda config, said, number: found.append(said) or weights_of(config, said, number),
    )
    case = ensemble(*TWO, n=2, prompts=["Question: the tree\nAnswer:"], model_weights="examples_or_content")
    case.fast()
    allowed = case.tokenizers[0](" the", add_special_tokens=False).input_ids[0]
    case.fast(suppress_tokens=[token for token in range(len(case.tokenizers[0])) if token != allowed])
    assert found[0] == found[1] and 0 < found[0][0].divergence < math.inf


def test_nobody_reads_more_where_nothing_follows_from_it():
    """A single member, or one behind a server: no shortened prompt is read."""
    case = ensemble(TWO[0], n=2, prompts=["Question: the tree\nAnswer:"], model_weights="examples_or_content")
    passes = [case.fast().stats["members"][0]["forward_passes"]]
    case.config = dataclasses.replace(case.config, model_weights=None)
    passes.append(case.fast().stats["members"][0]["forward_passes"])
    assert passes[0] == passes[1]


@pytest.mark.parametrize("added", [True, False])
def test_a_shortened_prompt_begins_as_the_prompt_does(added):
    tokenizer = TOKENIZERS["sentencepiece"]()
    vocabulary = Vocabulary(tokenizer)
    long, short = (
        tokenizer(text, add_special_tokens=added).input_ids for text in ("Q: the tree is big\nA:", "Q: ...\nA:")
    )
    assert (long[0] == tokenizer.bos_token_id) == added
    assert ids_without_content(vocabulary, [], long) == short


SYSTEM = [{"role": "system", "content": "she was there"}, *LONGER]
SPACED = [{"role": "user", "content": "\n the cat \n"}]


@pytest.mark.parametrize("chat", [QUESTION, LONGER, SYSTEM, SPACED])
@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_what_is_left_of_a_chat(template, chat):
    """Nothing that was said, by whomsoever."""
    if template == PLAIN and chat == SYSTEM:
        chat = LONGER  # it has no message of the system's
    tokenizer = templated("byte_level" if template == MARKED else "sentencepiece", template)
    vocabulary = Vocabulary(tokenizer)
    endings = chat_endings(tokenizer, vocabulary)
    ids, empty = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in (chat, [{"role": "user", "content": "..."}])
    )
    assert ids_without_content(vocabulary, endings, ids) == empty
    assert ids_without_content(vocabulary, endings, empty) is None
    begun = ids + tokenizer(" it was", add_special_tokens=False).input_ids
    if template == MARKED:
        assert ids_without_content(vocabulary, endings, begun) is None  # what is begun says more of the next token


def test_a_chat_of_another_template_tells_nothing():
    tokenizer, other = templated("byte_level", MARKED), templated("byte_level", PLAIN)
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.apply_chat_template(LONGER, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids_without_content(vocabulary, chat_endings(other, vocabulary), ids) is None


@pytest.mark.parametrize("chat", [QUESTION, LONGER, SYSTEM, SPACED])
def test_a_chat_of_a_model_without_a_template(chat):
    """Its plain rendering is a chat, too."""
    pair = [TOKENIZERS["sentencepiece"](), templated("byte_level", MARKED)]
    vocabulary, ids = Vocabulary(pair[0]), chat_inputs(chat, pair)["input_ids"][0].tolist()
    expected = pair[0]("### User:\n...\n\n### Assistant:\n").input_ids
    assert ids_without_content(vocabulary, chat_endings(pair[0], vocabulary), ids) == expected


def test_chats_without_and_with_thoughts_end_differently():
    """As Qwen3's: an empty thought stands where the model is not to think."""
    template = MARKED.replace("assistant: {%", "assistant: {% if not enable_thinking %}<think></think>{% endif %}{%")
    tokenizer = templated("byte_level", template)
    vocabulary, endings = Vocabulary(tokenizer), chat_endings(tokenizer, Vocabulary(tokenizer))
    for thinks in (False, True):
        ids, empty = (
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, enable_thinking=thinks
            )["input_ids"]
            for messages in (LONGER, [{"role": "user", "content": "..."}])
        )
        assert ids_without_content(vocabulary, endings, ids) == empty
    asked = tokenizer.apply_chat_template(
        LONGER, add_generation_prompt=True, return_dict=True, chat_template="[think]" + MARKED
    )["input_ids"]
    other = [endings[0], endings[1]._replace(empty_chat=tokenizer("[think]").input_ids + endings[1].empty_chat)]
    assert ending_of(asked, [endings[1], other[1]]) == other[1]  # of two that end alike
    thought = ids + tokenizer("<think>a cat</think>", add_special_tokens=False).input_ids
    assert ids_without_content(vocabulary, endings, thought) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",  # any text may end so
        "{{ bos_token }}[ask]{% for part in messages[0].content %}{{ part.text }}{% endfor %}[/ask]",  # no texts
    ],
)
def test_templates_that_say_nothing_of_turns(template):
    """Such a member tells nothing of a chat, and all count alike."""
    tokenizer = templated("byte_level", template)
    assert chat_endings(tokenizer, Vocabulary(tokenizer)) == []


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("main", ["byte_level", "sentencepiece"])
def test_chats_equal_the_oracle(main, number):
    """The weights follow from what a chat moves, as the oracle finds it by the members' templates."""
    long = [{"role": "user", "content": "she was there in the park " * 11}]
    pair, chat = members(main), [*CHATS, SYSTEM, SPACED, LONGER[:1], long][number]
    inputs = rendered(pair, chat)
    config = AdaFuseConfig(max_word_tokens=4, model_weights="examples_or_content")
    (model, tokenizer), (other, other_tokenizer) = pair
    output = enable_adafuse(copy.copy(model)).generate(
        **inputs, assistant_models=[other], assistant_tokenizers=[other_tokenizer], tokenizer=tokenizer,
        adafuse_config=config, max_new_tokens=10, do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    prompts = [inputs["input_ids"][0].tolist(), inputs["assistant_inputs"][0]["input_ids"][0].tolist()]
    slow = [RefMember(*one, eos) for one, eos in zip(pair, ([tokenizer.eos_token_id], [other_tokenizer.eos_token_id]))]
    assert None not in [by_hand(member, ids) for member, ids in zip(slow, prompts, strict=True)]
    expected = decode_by_rule(slow, prompts, config, 10)[0]
    assert output.sequences[0, len(prompts[0]) :].tolist()[: len(expected)] == expected


BASE_CHAT = "### User:\nwas there a cat\n\n### Assistant:\na big cat\n\n### User:\nshe was there\n\n### Assistant:\n"


@pytest.mark.parametrize("weighting", ["examples_or_content", "examples"])
def test_a_conversation_of_base_models_has_no_examples(weighting):
    case = ensemble(*TWO, n=8, prompts=[BASE_CHAT], model_weights=weighting)
    prompts = case.member_prompts(case.main_ids()[0][0])
    expected = decode_by_rule(case.ref_members(), prompts, case.config, 8)[0]
    output = case.fast()
    assert output.sequences[0, len(prompts[0]) :].tolist()[: len(expected)] == expected
    assert output.rounds[0][0].weights == [0.5, 0.5]  # these make enough of it
