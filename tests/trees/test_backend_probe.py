"""The self-test: what it costs, that it is remembered, and what it finds for models such as remote code may be."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.cases import assert_equal, counts
from support.kinds import BYTES, CPU, MANY, MODELS, case_of, model_of, peaked
from support.releases import with_cache
from support.tiny import TOKENIZERS, tiny_model
from transformers import (
    DynamicCache,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    XLMRobertaXLConfig,
    XLMRobertaXLForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from hf_adafuse import disable_adafuse, enable_adafuse
from hf_adafuse.kernels import small_batch_linear
from hf_adafuse.kernels.small_batch_linear import with_small_batch_linears
from hf_adafuse.trees.backend_probe import SelfTestError, _choose, _distance, _eps, _ids, _plain_logits, choose_backend
from hf_adafuse.trees.model_call import has_dropout


def passes(model, call):
    seen = []
    handle = model.register_forward_pre_hook(lambda *_: seen.append(1))
    try:
        call()
    finally:
        handle.remove()
    return len(seen)


def test_the_self_test_is_short_and_remembered():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 509  # of which there is no other
    model = LlamaForCausalLM(config).eval()
    assert 1 <= passes(model, lambda: choose_backend(model, CPU)) <= 5
    for known in (model, copy.deepcopy(model), enable_adafuse(copy.copy(model)), LlamaForCausalLM(config).eval()):
        assert passes(known, lambda known=known: choose_backend(known, CPU)) == 0
    assert passes(model.to(torch.bfloat16), lambda: choose_backend(model, CPU)) > 0


def test_which_backend_and_why_no_quicker_one_is_said_at_the_level_info(caplog):
    name = "hf_adafuse.trees.backend_probe"
    with caplog.at_level("INFO", logger=name):
        assert _choose(model_of("bloom"), CPU) == "branch-rows"
    (said,) = {record.getMessage() for record in caplog.records if record.name == name}
    assert said.startswith("BloomForCausalLM in torch.float32 runs by branch-rows; tree-attention: ")


def test_the_self_test_is_not_in_the_statistics():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 508
    case = case_of(peaked(LlamaForCausalLM(config)))
    assert counts(case.fast()) == counts(case.fast())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "bloom", "jamba", "qwen3_next"])
def test_the_same_backend_in_half_precision(name, dtype):
    model = copy.deepcopy(tiny_model() if name == "llama" else model_of(name)).to(dtype)
    assert choose_backend(model, CPU) == ("tree-attention" if name == "llama" else MODELS[name][-1])


class Rough(LlamaForCausalLM):
    """As large models in half precision: with a cache it rounds otherwise than without."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        output = super().forward(input_ids, **with_cache(past_key_values), **kwargs)
        if past_key_values is not None and past_key_values.get_seq_length() > input_ids.shape[1]:
            waves = torch.cos(torch.arange(output.logits.shape[-1]) * 7.0)
            output.logits = output.logits + (0.12 * output.logits.std() * waves).to(output.logits.dtype)
        return output


def test_rounding_in_half_precision_is_measured_by_ordinary_decoding():
    """Gemma 3 in bfloat16 came down to the slowest backend by it; in float32 nothing rounds so."""
    model = Rough(copy.deepcopy(tiny_model().config)).eval()
    model.load_state_dict(tiny_model().state_dict())
    assert choose_backend(copy.deepcopy(model).to(torch.bfloat16), CPU) == "tree-attention"
    assert choose_backend(model, CPU) == "uncached"


class Untrained(LlamaForCausalLM):
    """As Gemma 3 in bfloat16: after tokens that training never saw, no two passes round alike."""

    num_passes = 0

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        self.num_passes += 1
        output.logits[input_ids < 400] *= 1 + self.num_passes
        return output


def test_the_self_test_reads_frequent_tokens_of_a_large_vocabulary():
    """Gemma 3 in bfloat16 came down to the slower backend for branch rows by the first ids of its vocabulary."""
    config = copy.deepcopy(tiny_model().config)
    config.vocab_size = 1200
    assert choose_backend(Untrained(config).eval().to(torch.bfloat16), CPU) == "tree-attention"


@pytest.mark.usefixtures("small_kernel")
def test_quick_products_that_round_otherwise_are_no_fault_of_the_model(monkeypatch):
    """Gemma 3 in bfloat16: by a quarter of the spread. It widens what backends may be off by; none may lose all."""
    model = copy.deepcopy(tiny_model()).to(torch.bfloat16)
    ids, tolerances = torch.tensor([[3, 5, 7]]), []

    def multiply(factor):
        monkeypatch.setattr(small_batch_linear, "linear", lambda *given: factor * torch.nn.functional.linear(*given))

    for factor in (1.0, 1.03, 1.3):
        multiply(factor)
        with torch.no_grad():
            distance = _distance(with_small_batch_linears(model)(ids).logits[0], model(ids).logits[0])
            tolerances.append(_plain_logits(model, CPU, _ids(model))[1])
        assert _choose(model, CPU) == "tree-attention"
    assert distance > 0.3
    assert tolerances[0] < tolerances[1] < tolerances[2] == 0.3
    multiply(-1.0)
    with pytest.raises(SelfTestError, match="more precision"):
        _choose(model, CPU)


@pytest.mark.usefixtures("small_kernel")
def test_layers_in_half_precision_beside_others_are_tested_as_such(monkeypatch):
    monkeypatch.setattr(small_batch_linear, "linear", lambda *given: 1.1 * torch.nn.functional.linear(*given))
    model = copy.deepcopy(tiny_model())
    assert _eps(model) == torch.finfo(torch.float32).eps
    model.lm_head = Widened(model.lm_head)
    assert model.dtype is torch.float32 and _eps(model) == torch.finfo(torch.bfloat16).eps
    assert _choose(model, CPU) == "tree-attention"


class Widened(torch.nn.Module):
    """A layer in bfloat16 within a model in float32."""

    def __init__(self, layer):
        super().__init__()
        self.layer = copy.deepcopy(layer).to(torch.bfloat16)
        self.weight = self.layer.weight

    def forward(self, inputs):
        return self.layer(inputs.to(torch.bfloat16)).float()


class Forgetful(LlamaForCausalLM):
    """As remote code may be: it takes every argument, and knows neither masks nor caches."""

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=super().forward(input_ids, use_cache=False).logits)


class Bare(LlamaForCausalLM):
    """As remote code may be, too: ids in, a tuple out."""

    def forward(self, input_ids):
        return (super().forward(input_ids, use_cache=False).logits,)


class Legacy(LlamaForCausalLM):
    """Its cache is a tuple of keys and values per layer, as it was before transformers had caches; it has no masks."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        past = DynamicCache(ddp_cache_data=past_key_values or ())
        output = super().forward(input_ids, **with_cache(past), use_cache=use_cache)
        layers = tuple((layer.keys, layer.values) for layer in past.layers)
        return CausalLMOutputWithPast(logits=output.logits, **with_cache(layers if use_cache else None))


class Lying(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = torch.randn_like(output.logits)
        return output


class Broken(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise RuntimeError("the weights are on fire")


class Empty(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * torch.nan
        return output


def of_class(cls):
    return peaked(cls(copy.deepcopy(tiny_model().config)))


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("cls", [Forgetful, Bare])
def test_a_model_that_remembers_nothing_is_read_again_with_one_warning(cls, role, look_ahead):
    model = of_class(cls)
    plain = LlamaForCausalLM(model.config).eval()
    plain.load_state_dict(model.state_dict())

    def case(batch):
        made = case_of(model, role, batch)
        made.slow = case_of(plain, role, batch).slow  # the oracle asks for what `Bare` does not give
        return made

    name = "the main model" if role == "main" else rf"assistant 1 \({cls.__name__}\)"
    with pytest.warns(UserWarning, match=f"{name} .*reads the whole text again") as caught:
        assert_equal(case(batch=3))
    assert len(caught) == 1
    look_ahead(2)
    with warnings.catch_warnings():  # `fast` copies the main model: another one, that warns too
        warnings.filterwarnings("ignore" if role == "main" else "error", message=".* reads the whole text again")
        assert_equal(case(batch=1))


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_a_model_with_a_cache_of_its_own_kind_goes_on_from_it(role):
    model = of_class(Legacy)
    assert choose_backend(model, CPU) == MANY
    for batch in (1, 3):
        assert_equal(case_of(model, role, batch))


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Lying, "two plain forward passes over one text differ"),
        (Broken, "a plain forward pass raises RuntimeError: the weights are on fire"),
        (Empty, "a plain forward pass gives logits that are NaN"),
    ],
)
def test_a_model_that_no_backend_can_run_is_refused(cls, match):
    tokenizer = TOKENIZERS["characters"]()
    main, assistant = tiny_model("llama", "characters"), of_class(cls)
    with pytest.raises(ValueError, match=rf"but for assistant 1 \({cls.__name__}\) .*{match}.* Choose another model"):
        enable_adafuse(copy.copy(main), [assistant], [BYTES], tokenizer)
    with pytest.raises(ValueError, match=f"but for the main model .*{match}"):
        case_of(assistant).fast()


def with_dropout(max_positions):
    """A model of one's own in training mode, but for its last layer, and that its logits are random then."""
    config = copy.deepcopy(tiny_model("gpt2").config)
    config.n_positions, config.resid_pdrop, config.embd_pdrop = max_positions, 0.4, 0.4
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config).train()
    model.transformer.h[-1].eval()
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(model(ids).logits, model(ids).logits)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_dropout_does_not_decide_the_backend(seed):
    model = with_dropout(500 + seed)  # none of which is known yet
    modes = [module.training for module in model.modules()]
    torch.manual_seed(seed)
    assert choose_backend(model, CPU) == "tree-attention"
    assert [module.training for module in model.modules()] == modes and len(set(modes)) == 2
    assert choose_backend(model.eval(), CPU) == "tree-attention"


@pytest.mark.parametrize("role", ["main", "assistant"])
def test_dropout_is_warned_of_once(role):
    model = with_dropout(510 + len(role))
    case = case_of(peaked(model).train(), role, batch=1)
    main, name = case.models[0], "the main model" if role == "main" else "assistant 1"
    match = rf"^{name} \(GPT2LMHeadModel\) .*is in training mode: dropout .* Call `\.eval\(\)` on it\.$"
    try:
        with pytest.warns(UserWarning, match=match) as seen:
            enable_adafuse(main, case.models[1:], case.tokenizers[1:], case.tokenizers[0], case.config)
        assert len(seen) == 1 and model.training
        for _ in range(2):  # warnings are errors
            main.generate(case.main_ids()[1], max_new_tokens=4, do_sample=False)
    finally:
        disable_adafuse(main)
    model.eval()
    assert_equal(case)


def test_training_mode_without_dropout_is_nobodys_business():
    model = copy.deepcopy(tiny_model())
    expected = case_of(model).fast().sequences
    case = case_of(model.train())
    assert torch.equal(case.fast().sequences, expected) and model.training


class OwnAttention(LlamaAttention):
    """As remote code may have it: it looks at the columns of keys, and not at the positions of tokens."""

    def bias_of(self, distances):
        raise NotImplementedError

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (one(hidden_states).view(shape).transpose(1, 2) for one in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = (one.repeat_interleave(self.num_key_value_groups, 1) for one in (key, value))
        length, columns = query.shape[2], key.shape[2]
        distances = torch.arange(length)[:, None] + columns - length - torch.arange(columns)
        mask = torch.full((length, columns), -1e9).triu(columns - length + 1)
        if attention_mask is not None:
            mask = attention_mask
            mask = torch.where(mask, 0.0, -1e9) if mask.dtype == torch.bool else mask
        weights = (query @ key.transpose(-1, -2) * self.scaling + mask + self.bias_of(distances)).softmax(-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2)), weights


class Alibi(OwnAttention):
    def bias_of(self, distances):
        return -0.3 * distances


class Window(OwnAttention):
    def bias_of(self, distances):
        return torch.where(distances < 128, 0.0, -1e9)


@pytest.mark.parametrize("attention", [Alibi, Window])
def test_another_class_of_attention_is_tested_for_itself(attention):
    """The result for a model of the same class and config says nothing of it. What a window hides shows behind a long
    text alone."""
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 507
    plain, other = peaked(LlamaForCausalLM(config)).eval(), peaked(LlamaForCausalLM(config)).eval()
    for layer in other.model.layers:
        layer.self_attn.__class__ = attention
    assert choose_backend(plain, CPU) == "tree-attention"
    assert choose_backend(other, CPU) == "branch-rows"


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("name", ["mamba", "mpt"])
def test_tokens_that_are_ruled_out_hide_no_difference(name, value):
    model = copy.deepcopy(model_of(name))

    def rule_out(module, inputs, logits):
        logits = logits.clone()
        logits[..., 20:90] = value
        return logits

    handle = model.get_output_embeddings().register_forward_hook(rule_out)
    try:
        assert choose_backend(model, CPU) == MODELS[name][-1]
    finally:
        handle.remove()


def test_positions_that_begin_behind_the_padding_id():
    config = XLMRobertaXLConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        is_decoder=True, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    assert choose_backend(XLMRobertaXLForCausalLM(config).eval(), CPU) == "tree-attention"


def test_dropout_in_an_adapter_is_dropout():
    """PEFT leaves its own layers in training mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what PEFT asks
        lora = LoraConfig(lora_dropout=0.3, target_modules=["q_proj"])
        adapted = get_peft_model(copy.deepcopy(tiny_model()).eval(), lora)
    adapted.base_model.eval()
    assert not has_dropout(adapted.base_model.model)
    for module in adapted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    assert has_dropout(adapted.base_model.model)


def test_modules_that_are_scripts():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 506
    model = peaked(LlamaForCausalLM(config)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.jit.script(torch.nn.SiLU())
    assert choose_backend(model, CPU) == "tree-attention"


class ShortSighted(LlamaForCausalLM):
    """As of remote code: its config says under a name of its own how long texts may be."""

    def forward(self, input_ids, **kwargs):
        if input_ids.shape[1] > 64:
            raise IndexError("index out of range in self")
        return super().forward(input_ids, **kwargs)


def test_a_model_that_reads_no_long_text_is_not_asked_to():
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 505
    model = peaked(ShortSighted(config)).eval()
    assert choose_backend(model, CPU) == "tree-attention"
