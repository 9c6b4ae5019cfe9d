"""What prompts begin with is read once: the same text as the oracle's over random ensembles, in a batch and from call
to call; and counts of the tokens that are read.
"""

from __future__ import annotations

import copy
import gc
import random
from types import SimpleNamespace

import pytest
import torch
from support import cases
from support.cases import Case, assert_equal, assert_equals_the_rule, counts, random_case
from support.kinds import BYTES, CPU, MODELS, case_of, force, model_of
from support.releases import cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from test_longrope import SWITCH, phi

import hf_adafuse
from hf_adafuse import AdaFuseConfig
from hf_adafuse.trees.backend_probe import BACKENDS, choose_backend
from hf_adafuse.trees.kv_cache import common_length
from hf_adafuse.trees.kv_slots import KVSlots
from hf_adafuse.trees.nodes import Node
from hf_adafuse.trees.pass_policy import Policy
from hf_adafuse.trees.recurrent_backend import RecurrentBackend
from hf_adafuse.trees.shared_prefix import KeptPrefixes, SharedPrefix, kept_prefixes, worth_sharing


def choose(model):
    return BACKENDS[choose_backend(model, CPU)](model, CPU)


SHOTS = "Question: what is the capital? Answer: a big tree.\n\nQuestion: "


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch):
    monkeypatch.setattr(Policy, "least_shared_tokens", 1)


@pytest.fixture(autouse=True)
def same_main(monkeypatch):
    """A case's main model is a copy in every call, and what that one keeps is of no use to the next: here, the same."""
    copies = {}
    monkeypatch.setattr(cases, "copy", SimpleNamespace(copy=lambda model: copies.setdefault(model, copy.copy(model))))
    return copies


def with_shots(number):
    """A random case whose prompts begin alike; some with trust that follows from the prompt."""
    case, rng = random_case(number), random.Random(number)
    shots = SHOTS * rng.randint(1, 2)
    case.prompts = [shots[: rng.randint(5, len(shots))] * (rng.random() < 0.9) + prompt for prompt in case.prompts]
    if number % 3 == 0:
        case.config = AdaFuseConfig.from_dict(case.config.to_dict() | {"model_weights": "prompt"})
    return case


@pytest.mark.parametrize("number", range(24))
def test_prompts_that_begin_alike_equal_the_oracle(number, monkeypatch):
    if number % 4 == 3:
        force(monkeypatch, "branch-rows")
    if number % 5 == 4:
        monkeypatch.setattr(Policy, "most_shared_columns", 40)  # soon a row for each
    assert_equals_the_rule(with_shots(number))


@pytest.mark.parametrize("number", range(40, 56))
def test_calls_one_after_the_other_equal_the_oracle(number, same_main):
    """What is kept of one call serves the next, also one of fewer prompts, of others, of one alone; also where only
    some of it has room."""
    case = with_shots(number)
    with hf_adafuse.prefix_caching(KeptPrefixes(100_000) if number % 2 else None):
        for prompts in (case.prompts, case.prompts[:1], [SHOTS + "She", SHOTS + "It was"], ["She"], case.prompts[::-1]):
            case.prompts = prompts
            assert_equals_the_rule(case)
        assert kept_prefixes(same_main[case.models[0]])
    assert not kept_prefixes(same_main[case.models[0]])


@pytest.mark.filterwarnings("ignore:.* reads the whole text again:UserWarning")
@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_shares_or_does_not(name, role):
    case = case_of(model_of(name), role, batch=3)
    case.prompts = [SHOTS[:40] + prompt for prompt in case.prompts]
    with hf_adafuse.prefix_caching():
        assert_equal(case)
        assert_equal(case)


def llama_case(prompts, **config):
    model = tiny_model("llama", "byte_level", 1)
    return Case([model], [BYTES], AdaFuseConfig(**config), prompts, 1)


def tokens_run(case):
    ((_, tokens),) = counts(case.fast())
    return tokens


@pytest.mark.parametrize("weights", [None, "prompt"])
def test_shared_tokens_are_run_once(weights, monkeypatch):
    """In a batch once for all; within `prefix_caching` not again, by a prompt alone either."""
    case = llama_case([SHOTS + end for end in ("a cat", "the tree", "Once")], num_branches=1, model_weights=weights)
    alone = llama_case([SHOTS + "park"], num_branches=1, model_weights=weights)
    rows, (row,) = case.main_ids()[0], alone.main_ids()[0]
    shared, of_alone = common_length(rows), common_length([row, rows[0]])
    assert shared > 20 and of_alone > 20
    monkeypatch.setattr(Policy, "least_shared_tokens", 1000)
    num_tokens, num_alone = tokens_run(case), tokens_run(alone)
    monkeypatch.setattr(Policy, "least_shared_tokens", 1)
    assert tokens_run(case) == num_tokens - 2 * shared
    with hf_adafuse.prefix_caching():
        assert tokens_run(case) == num_tokens - 2 * shared
        assert tokens_run(case) == num_tokens - 3 * shared
        assert tokens_run(alone) == num_alone - of_alone
    assert tokens_run(alone) == num_alone


def test_members_of_one_architecture_do_not_take_each_others(same_main):
    models = [tiny_model("llama", "byte_level", seed) for seed in (1, 2)]
    case = Case(models, [BYTES, BYTES], AdaFuseConfig(), [SHOTS + "a", SHOTS + "the"], 8)
    with hf_adafuse.prefix_caching():
        assert_equal(case)
        first, second = kept_prefixes(same_main[models[0]])[0], kept_prefixes(models[1])[0]
        assert not torch.equal(first.memory[0][0], second.memory[0][0])
        case.models = models[::-1]
        assert_equal(case)


def test_a_callers_cache_is_not_kept(same_main):
    """It may hold zeros where a sliding layer has dropped its keys."""
    model, prompt = (
        hf_adafuse.enable_adafuse(copy.copy(tiny_model("llama", "byte_level", 1))),
        BYTES(SHOTS, return_tensors="pt"),
    )
    cache = cache_of(model(**prompt))
    ids = torch.cat([prompt.input_ids, prompt.input_ids[:, :1]], dim=1)
    with hf_adafuse.prefix_caching():
        model.generate(
            ids,
            **with_cache(cache),
            adafuse_config=hf_adafuse.AdaFuseConfig(),
            max_new_tokens=2,
            pad_token_id=0,
            tokenizer=BYTES,
        )
        assert not kept_prefixes(model)


@pytest.mark.parametrize("name", ["mamba2", "bart", "llama"])
def test_a_prompt_that_is_what_is_kept(name, same_main):
    case = case_of(model_of(name) if name != "llama" else tiny_model("llama", "byte_level", 1), batch=2)
    with hf_adafuse.prefix_caching():
        for prompts in (
            [SHOTS[:30] + " a", SHOTS[:30] + " the"],
            [SHOTS[:30]],
            [SHOTS[:30], SHOTS[:30] + "x"],
            [SHOTS[:9]],
        ):
            case.prompts = prompts
            assert_equal(case)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
def test_what_is_kept_is_of_the_active_adapter():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = copy.deepcopy(tiny_model("llama", "byte_level", 1))
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = get_peft_model(base, config, "red")
    wrapped.add_adapter("blue", config)
    model = hf_adafuse.enable_adafuse(wrapped.get_base_model())
    inputs = BYTES(SHOTS + "She", return_tensors="pt")

    def logits():
        options = dict(adafuse_config=True, max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
        return torch.stack(model.generate(**inputs, **options, pad_token_id=0, tokenizer=BYTES).logits)

    wrapped.set_adapter("blue")
    expected = logits()
    with hf_adafuse.prefix_caching():
        wrapped.set_adapter("red")
        assert not torch.allclose(logits(), expected)
        wrapped.set_adapter("blue")
        assert torch.allclose(logits(), expected, atol=1e-4)


def test_what_is_kept_is_not_changed(same_main):
    case = llama_case([SHOTS + "a cat", SHOTS + "the"])
    with hf_adafuse.prefix_caching():
        case.fast()
        kept = kept_prefixes(same_main[case.models[0]])[0]
        before = copy.deepcopy(kept.memory)
        case.prompts = case.prompts[1:]
        case.fast()
        for layer, known in zip(kept.memory, before, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(layer, known, strict=True))


def test_frequencies_that_switch_are_not_shared(same_main):
    """LongRoPE reads a short beginning otherwise than a long prompt."""
    other = tiny_model("llama", "characters", 1)
    prompts = [SHOTS + "a cat", SHOTS + "the tree"]
    case = Case([phi(), other], [BYTES, TOKENIZERS["characters"]()], AdaFuseConfig(max_words=2), prompts, 8)
    assert min(map(len, case.main_ids()[0])) > SWITCH
    with hf_adafuse.prefix_caching():
        assert_equal(case)
        assert_equal(case)
        assert not kept_prefixes(same_main[phi()])


def test_what_is_worth_sharing(monkeypatch):
    monkeypatch.setattr(Policy, "least_shared_tokens", 10)
    shared = list(range(10))
    assert worth_sharing([[*shared, 50], [*shared, 60]], 0, Policy) == 10  # ten tokens saved
    assert worth_sharing([[*shared[:9], 50], [*shared[:9], 60]], 0, Policy) == 0  # nine
    assert (
        worth_sharing([[*shared[:9], 50], [*shared[:9], 60]], 5, Policy) == 5
    )  # what is known: ten; a pass for the rest: four
    assert worth_sharing([[*shared[:9], 50], [*shared[:9], 60]], 4, Policy) == 0
    assert worth_sharing([[*shared, *shared, 50], [*shared, *shared, 60]], 10, Policy) == 20
    assert worth_sharing([shared, shared, shared], 0, Policy) == 9  # each reads its last token itself
    assert worth_sharing([[*shared, 50]], 10, Policy) == 10  # alone: what is known
    assert worth_sharing([[*shared, 50]], 9, Policy) == 0
    assert common_length([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2
    assert common_length([[1], []]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_shared_columns_are_free_when_the_last_prompt_leaves(seed):
    """Prompts of one beginning in one row, in rows of their own and back: each finds its own columns' content."""
    rng = random.Random(seed)
    num_shared, prompts = rng.randint(1, 5), list(range(rng.randint(2, 5)))
    columns = KVSlots(len(prompts), num_shared)
    content, roots = {}, {}
    for prompt in prompts:
        taken = columns.allocate_columns(prompt, num_shared + rng.randint(1, 4))
        columns.add_prompt(prompt, prompt, taken)
        own = [(prompt, place) for place in range(num_shared, len(taken))]
        for column, thing in zip(taken, [*range(num_shared), *own], strict=True):
            content[prompt, column] = thing
        roots[prompt] = Node(0, None, prompt, len(taken) - 1)
    expected = {p: [content[p, column] for column in columns.held(p)] for p in prompts}
    while prompts:
        in_one = rng.random() < 0.6
        sources = columns.rearrange([list(prompts)] if in_one else [[prompt] for prompt in prompts])
        content = {
            (row, column): content[place] for row, places in enumerate(sources) for column, place in enumerate(places)
        }
        assert all(len(set(places)) == len(places) for places in sources)
        for prompt in prompts:
            node = roots[prompt].add_child(rng.randint(0, 99))
            (column,) = columns.allocate_for_nodes([node])
            row = columns.row_of[prompt]
            assert (row, column) not in content  # it was free
            content[row, column] = (prompt, node)
            columns.promote(prompt, [node], [])
            expected[prompt].append((prompt, node))
            roots[prompt] = node
        for prompt in prompts:
            row = columns.row_of[prompt]
            assert [content[row, column] for column in columns.held(prompt)] == expected[prompt]
        distinct = {thing for prompt in prompts for thing in expected[prompt]}
        assert columns.num_distinct == len(distinct)
        gone = prompts.pop(rng.randrange(len(prompts)))
        freed = columns.held(gone)[0 if not in_one or not prompts else num_shared :]
        row = columns.row_of[gone]
        columns.drop(gone)
        content = {place: thing for place, thing in content.items() if place[0] != row or place[1] not in freed}
    assert columns.num_used == 0


@pytest.mark.parametrize(
    ("name", "config", "is_all_known"),
    [("bloom", {}, True), ("bloom", {"model_weights": "prompt"}, False)],
)
def test_of_a_conversation_only_what_is_new_is_read(name, config, is_all_known):
    """At the tenth turn, by every member. Trust that follows from the prompt needs the last answer read again."""
    case = case_of(model_of(name), role="assistant", batch=1, n=8, **config)  # the main model's tokens are characters
    case.prompts = ["Once upon a time there was a cat. "]

    def answer():
        output = case.fast()
        return "".join(committed.text for committed in output.rounds[0]), output.sequences[0].tolist(), counts(output)

    with hf_adafuse.prefix_caching():
        for _ in range(9):
            before, (text, known, _) = case.prompts[0], answer()
            case.prompts = [before + text + " The tree. "]
        last, _, cached = answer()
    expected, _, anew = answer()
    assert last == expected
    saved = [num_anew - num_cached for (_, num_cached), (_, num_anew) in zip(cached, anew, strict=True)]
    if not is_all_known:
        known = case.tokenizers[0](before).input_ids
    assert len(known) > 150 and case.main_ids()[0][0][: len(known)] == known
    assert saved[0] >= len(known) - 2  # the last token of a text has not been read
    assert saved[1] > 40  # what is left of the assistant's is where it cuts its own text into other tokens


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2"])
def test_a_text_that_has_ended_does_not_drive_out_a_prefix(name):
    """Worked examples, a question, another: what the questions share is still known, also where it cannot be cut."""
    shots = list(range(20, 60))
    with hf_adafuse.prefix_caching():
        read = []
        for prompts in ([[*shots, 60, 61], [*shots, 62]], [[*shots, 63, 64]], [[*shots, 65, 66]]):
            backend = choose(model_of(name))
            backend.prefill(prompts)
            backend.drop(set(range(len(prompts))))
            read.append(backend.num_tokens)
    assert read == [len(shots) + 3, 2, 2]


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2"])
def test_the_state_of_a_text_that_has_ended_is_gone_on_with(name):
    first, message = list(range(20, 60)), [70, 71, 72]
    with hf_adafuse.prefix_caching():
        backend = RecurrentBackend(model_of(name), CPU)
        (root,) = backend.prefill([first])
        path = root.add_path([60, 61, 62])
        backend.run(path)
        backend.commit(0, path)
        backend.drop({0})
        later, anew = RecurrentBackend(model_of(name), CPU), RecurrentBackend(model_of(name), CPU)
        (end,) = later.prefill([[*first, 60, 61, 62, *message]])
        assert later.num_tokens == len(message)
    (expected,) = anew.prefill([[*first, 60, 61, 62, *message]])
    assert torch.allclose(end.logits, expected.logits, atol=1e-5)


def read(*ids, **more):
    """Of each token 8 bytes are kept."""
    return SharedPrefix(list(ids), [(torch.zeros(1, 1, len(ids), 1), torch.zeros(1, 1, len(ids), 1))], **more)


def test_what_has_not_been_used_for_the_longest_time_goes_first():
    model, other = (copy.copy(tiny_model("llama", "byte_level", seed)) for seed in (1, 2))
    kept = KeptPrefixes(max_bytes=8 * 7)
    first, second, third = read(1, 2, 3), read(4, 5), read(1, 2)
    kept.add(model, first)
    kept.add(model, second, is_text=True)
    kept.add(other, third)  # of another member, so that the first one does not cover it
    assert kept.num_bytes == 8 * 7 and kept.of(model) == [first, second] and kept.of(model, is_text=True) == [second]
    kept.use(first, 3)
    kept.add(other, last := read(6))
    assert (kept.of(model), kept.of(other)) == ([first], [third, last]) and kept.num_bytes == 8 * 6
    kept.add(other, read(*range(8)))  # too large by itself: nothing goes for it
    assert kept.num_bytes == 8 * 6 and kept.num_used == 3
    del other
    gc.collect()
    assert kept.num_bytes == 8 * 3
    assert KeptPrefixes(0).of(model) == []


def test_a_longer_text_takes_the_place_of_what_it_begins_with():
    model, kept = tiny_model("llama", "byte_level", 1), KeptPrefixes(max_bytes=1000)
    kept.add(model, read(1, 2, log_probs=[-1.0]))
    kept.add(model, unscored := read(1, 2, 3))  # no log-probabilities of it are known
    assert len(kept.of(model)) == 2
    kept.add(model, longest := read(1, 2, 3, 4, log_probs=[-1.0] * 3))
    assert kept.of(model) == [longest]
    kept.add(model, unscored)
    assert kept.of(model) == [longest] and kept.num_bytes == 8 * 4
    state = read(1, 2, 3, 4, 5, can_be_cut=False, log_probs=[-1.0] * 4)
    kept.add(model, state)
    assert kept.of(model) == [longest, state]  # of a state no shorter one can be made


def test_bytes_are_those_of_the_tensors():
    """Of what members keep of texts that end one after the other: keys and values of each token, or a state."""
    kept = KeptPrefixes(max_bytes=10**9)
    llama, mamba = tiny_model("llama", "byte_level", 1), model_of("mamba2")
    with hf_adafuse.prefix_caching(kept):
        for model in (llama, mamba):
            backend = choose(model)
            backend.prefill([[*range(20, 40)]])
            backend.admit([[*range(50, 90)]])
            backend.drop({0})
            backend.drop({1})
            assert [len(one.ids) for one in kept.of(model)] == [20, 40]
    config = llama.config
    head = config.hidden_size // config.num_attention_heads
    keys = 60 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    config = mamba.config
    inner = config.num_heads * config.head_dim
    convolution = (inner + 2 * config.n_groups * config.state_size) * config.conv_kernel
    states = 2 * config.num_hidden_layers * (convolution + inner * config.state_size)
    assert kept.num_bytes == 4 * (keys + states)
