"""Linear layers by parts: the same products, by a model that shares all with the caller's and leaves it alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from support.cases import assert_equal, random_case
from support.tiny import TOKENIZERS, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import RwkvConfig, RwkvForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_adafuse import enable_adafuse
from hf_adafuse.kernels import small_batch_linear
from hf_adafuse.kernels.autotuner import Autotuner
from hf_adafuse.kernels.small_batch_linear import MAX_TOKENS, linear, with_small_batch_linears
from hf_adafuse.trees.backend_probe import choose_backend
from hf_adafuse.trees.model_call import ModelCall

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture
def ways(monkeypatch):
    """How products were made, those of whole weights with the weight on the right left out."""
    taken, product = [], small_batch_linear._product
    monkeypatch.setattr(small_batch_linear, "_product", lambda x, w, way: taken.append(way) or product(x, w, way))
    return taken


@pytest.fixture
def products(monkeypatch):
    """The shapes of the products that layers ask for, by parts or not."""
    shapes = []
    place = "hf_adafuse.kernels.small_batch_linear.linear"
    monkeypatch.setattr(place, lambda x, *rest: shapes.append(tuple(x.shape)) or linear(x, *rest))
    return shapes


# What the constants are that `small_parts` makes small.
ORDINARY = {
    name: getattr(small_batch_linear, name) for name in ("_LARGE_PART", "_SMALL_PART", "_FEWEST_ROWS", "_ROW_MULTIPLE")
}


def own(*args):
    return copy.deepcopy(tiny_model(*args))


def state(model):
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("num_outputs", [5, 8, 96, 97, 103])
@pytest.mark.parametrize("shape", [(1, 16), (4, 1, 16), (3, 1, 16), (2, 16), (3, 5, 16), (5, 16), (MAX_TOKENS, 16)])
def test_a_product_is_the_same_in_every_way(shape, num_outputs, ways):
    torch.manual_seed(num_outputs)
    inputs, weight, bias = torch.randn(shape), torch.randn(num_outputs, 16), torch.randn(num_outputs)
    across = weight.t().contiguous().t()  # as `Conv1D` has it
    for given in ((weight, bias), (weight, None), (across, bias)):
        for _ in range(20):
            outputs = linear(inputs, *given)
            torch.testing.assert_close(outputs, F.linear(inputs, *given), rtol=1e-5, atol=1e-5)
            assert outputs.is_contiguous()
    sizes = {way.part_rows for way in ways}
    assert len(sizes) == (3 if num_outputs > 8 else 2) and None in sizes and {way.is_left for way in ways} == {0, 1}


@pytest.mark.parametrize("shape", [(MAX_TOKENS + 1, 16), (3, MAX_TOKENS, 16), (0, 16), (2, 0, 16)])
def test_many_tokens_and_none_take_the_weight_whole(shape, ways):
    inputs, weight = torch.randn(shape), torch.randn(96, 16)
    for _ in range(5):
        torch.testing.assert_close(linear(inputs, weight), F.linear(inputs, weight))
    assert not ways


@pytest.mark.parametrize("quickest", range(5))
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 100])
def test_the_quickest_way_is_found_for_each_number_of_tokens_and_taken(quickest, num_tokens, ways, monkeypatch):
    inputs, weight = torch.randn(num_tokens, 16), torch.randn(96, 16)
    now, multiplied = [0.0], small_batch_linear._multiplied
    monkeypatch.setattr("hf_adafuse.kernels.autotuner.time.perf_counter", lambda: now[0])
    found = []

    def timed(x, w, bias, way):
        if way not in found:
            found.append(way)
        now[0] += 1.0 if found.index(way) == quickest else 1.5
        return multiplied(x, w, bias, way)

    monkeypatch.setattr(small_batch_linear, "_multiplied", timed)
    for _ in range(20):
        linear(inputs, weight)
    assert len(found) == 5
    ways.clear()
    for _ in range(4):
        linear(inputs, weight)
    assert ways == ([] if found[quickest] is small_batch_linear._WHOLE else 4 * [found[quickest]])
    before = Autotuner.num_trials
    linear(torch.randn(2, 16), weight)  # another number of tokens is another race
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # so is another number of threads
    linear(inputs, weight)
    assert Autotuner.num_trials == before + 2


@pytest.mark.parametrize(("num_tokens", "is_by_parts"), [(1, False), (3, False), (4, True), (15, True), (16, False)])
def test_processes_that_share_a_model_try_nothing(num_tokens, is_by_parts, ways, monkeypatch):
    """Rounding differs by way: of two that find another quickest one might take another token."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(20):
        linear(torch.randn(num_tokens, 16), torch.randn(96, 16))
    assert len(ways) == 20 * is_by_parts and len(set(ways)) <= 1


def test_only_products_on_cpu_in_float32_are_tried(ways):
    before = Autotuner.num_trials
    for _ in range(20):
        with FakeTensorMode():
            linear(torch.randn(4, 16), torch.randn(96, 16))
        linear(torch.randn(4, 16, device="meta"), torch.randn(96, 16, device="meta"))
        linear(torch.randn(4, 16).bfloat16(), torch.randn(96, 16).bfloat16())
    assert Autotuner.num_trials == before and not ways


@pytest.mark.parametrize(("num_rows", "num_columns"), [(2050, 320), (1536, 576), (409, 2048)])
def test_weights_of_ordinary_sizes_and_their_gradients(num_rows, num_columns, ways, monkeypatch):
    for name, value in ORDINARY.items():
        monkeypatch.setattr(small_batch_linear, name, value)
    for number in range(1, 10):
        inputs = torch.randn(num_columns, number).t() / num_columns**0.5  # not contiguous
        weight, bias = torch.randn(num_rows, num_columns, requires_grad=True), torch.randn(num_rows)
        for _ in range(5):
            outputs, expected = linear(inputs, weight, bias), F.linear(inputs, weight, bias)
            torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
            grads = [torch.autograd.grad(found.square().sum(), weight)[0] for found in (outputs, expected)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert len(set(ways)) == 4


def test_a_weight_falls_into_equal_parts_and_a_rest(monkeypatch):
    shapes, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: shapes.append((tuple(a.shape), tuple(b.shape))) or bmm(a, b))
    for num_rows in (96, 9 * 11, 97):  # of the prime one row is left over
        way = small_batch_linear._Way(small_batch_linear._part_rows(num_rows, 16, 2, 64))
        inputs, weight = torch.randn(6, 16), torch.randn(num_rows, 16)
        torch.testing.assert_close(small_batch_linear._product(inputs, weight, way), F.linear(inputs, weight))
    assert shapes == [((48, 6, 16), (48, 16, 2)), ((33, 6, 16), (33, 16, 3)), ((48, 6, 16), (48, 16, 2))]


@pytest.mark.parametrize(
    ("shape", "num_threads", "part_rows"),
    [
        ((262144, 640), 2, 256),  # 1,024 parts of 640 KB
        ((151936, 1024), 2, 128),
        ((50257, 768), 2, 216),
        ((4096, 4096), 2, 32),
        ((4096, 14336), 2, 16),  # so few rows at least
        ((768, 768), 2, 96),  # four parts for each thread
        ((3072, 768), 16, 48),
        ((192, 576), 2, None),  # in a core's cache as it is
        ((768, 768), 1, 192),
        ((96, 16), 2, None),
        ((17, 14336), 2, None),  # too few rows for both threads
        ((151669, 1024), 2, 160),  # and a rest
    ],
)
def test_parts_fit_into_a_cores_cache(shape, num_threads, part_rows, monkeypatch):
    for name, value in ORDINARY.items():
        monkeypatch.setattr(small_batch_linear, name, value)
    assert small_batch_linear._part_rows(*shape, num_threads, small_batch_linear._LARGE_PART) == part_rows


@pytest.mark.parametrize(("architecture", "kind"), [("llama", torch.nn.Linear), ("gpt2", Conv1D)])
def test_a_model_that_multiplies_by_parts(architecture, kind, products):
    model = own(architecture, "byte_level", 0)
    num_layers = sum(type(module) in (torch.nn.Linear, kind) for module in model.modules())
    ids, before = torch.tensor([[3, 5, 7]]), state(model)
    twin = with_small_batch_linears(model)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(products) == num_layers > 4
    assert state(model) == before
    assert list(map(id, twin.parameters())) == list(map(id, model.parameters()))
    assert type(twin) is type(model) and all(isinstance(a, type(b)) for a, b in zip(twin.modules(), model.modules()))
    copy.deepcopy(model)(ids)
    assert len(products) == num_layers


@pytest.mark.parametrize("number", range(0, 60, 5))
def test_ensembles_that_multiply_by_parts_equal_the_oracle(number, ways):
    assert_equal(random_case(number))
    assert len(ways) > 10


def _quantized(model):
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _hooked(model):
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            add_hook_to_module(module, ModelHook())
    return model


def _compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _compiled_in_place(model):
    model.compile(backend="eager")
    return model


def _put_away(model):
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    return model


LEFT_ALONE = {
    "quantized": _quantized,
    "hooked": _hooked,
    "forward compiled": _compiled_forward,
    "compiled in place": _compiled_in_place,
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "compiled in a wrapper": lambda m: _compiled_in_place(torch.nn.Sequential(m)),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "put away": _put_away,
    "another device": lambda m: m.to("meta"),
}


@pytest.mark.parametrize("change", LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_models_left_alone(change):
    model = own("llama", "byte_level", 0)
    assert with_small_batch_linears(model) is not model
    changed = change(model)
    assert with_small_batch_linears(changed) is changed


def test_a_weight_that_lies_across_is_not_on_the_left_in_parts(ways):
    layer = with_small_batch_linears(torch.nn.Sequential(Conv1D(96, 16)))
    for _ in range(20):
        layer(torch.randn(1, 4, 16))
    assert {way.part_rows for way in ways if way.is_left} == {None}
    assert len({way.part_rows for way in ways if not way.is_left}) == 2


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_model_of_small_layers_is_left_alone(num_threads, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    model = own("llama", "byte_level", 0)
    assert with_small_batch_linears(model) is model


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*jit:DeprecationWarning")
def test_layers_left_alone_among_others(products):
    layers = [torch.nn.Linear(8, 8) for _ in range(5)]
    weight_norm(layers[0])
    layers[1].weight = torch.nn.Parameter(layers[1].weight.detach().to_sparse_csr(), requires_grad=False)
    layers[2] = torch.jit.trace(layers[2], torch.randn(1, 8))
    add_hook_to_module(layers[3], ModelHook())
    model, inputs = torch.nn.Sequential(*layers), torch.randn(3, 8)
    twin = with_small_batch_linears(model)
    torch.testing.assert_close(twin(inputs), model(inputs))
    assert len(products) == 1 and twin is not model


def test_a_model_that_rescales_its_weights_does_so_once(products):
    """RWKV does in its first pass: the weights, which all share, and a note on itself."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, attention_hidden_size=16, intermediate_size=16)
    model = RwkvForCausalLM(RwkvConfig(num_hidden_layers=3, rescale_every=1, **sizes)).eval()
    plain, ids = copy.deepcopy(model), torch.tensor([[3, 5, 7]])
    expected = plain(ids, use_cache=False).logits
    choose_backend(model, torch.device("cpu"))
    for call in (ModelCall(model), ModelCall(copy.deepcopy(model)), ModelCall(model)):
        for _ in range(2):
            logits, _ = call(ids, use_memory=False)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert products
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_autocast_is_heeded():
    inputs, layer = torch.randn(3, 8), torch.nn.Linear(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(inputs, layer.weight, layer.bias).dtype is layer(inputs).dtype is torch.bfloat16


def test_a_mode_that_replaces_functions_sees_the_twin_as_the_model():
    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func is F.linear
            return func(*args, **(kwargs or {}))

    model = tiny_model()
    counts = []
    for one in (model, with_small_batch_linears(model)):
        with torch.no_grad(), Counting() as counting:
            one(torch.tensor([[3, 4]]))
        counts.append(counting.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("emptied", [torch.empty(0), torch.empty(16, 0)])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Conv1D])
def test_a_weight_that_is_emptied_later_fails_as_in_the_model(emptied, kind):
    """As an offloader does between two passes."""
    model = torch.nn.Sequential(torch.nn.Linear(96, 103) if kind is torch.nn.Linear else Conv1D(103, 96))
    twin = with_small_batch_linears(model)
    assert twin is not model
    model[0].weight.data = emptied
    for one in (model, twin):
        with pytest.raises(RuntimeError, match=r"mat[12]"):
            one(torch.ones(2, 96))


@pytest.mark.slow
def test_generate_multiplies_by_parts(products):
    main, assistant = own("llama", "byte_level", 0), own("gpt2", "characters", 1)
    tokenizers = [TOKENIZERS[name]() for name in ("byte_level", "characters")]
    ids = tokenizers[0]("the cat", return_tensors="pt").input_ids
    enable_adafuse(main, [assistant], tokenizers[1:], tokenizers[0])
    before = state(main), state(assistant)
    main.generate(ids, adafuse_config=True, max_new_tokens=8)
    assert len(products) > 100
    assert (state(main), state(assistant)) == before


@pytest.mark.parametrize("pick", [lambda model: model.model.layers[0], lambda model: model.model.layers[1].mlp.up_proj])
def test_hooks_see_the_modules_that_they_are_on(pick):
    """They may look them up by name, and write on them, in every pass."""
    model = copy.deepcopy(tiny_model())
    names = {module: name for name, module in model.named_modules()}
    seen = []

    def note(module, inputs, output):
        seen.append(names[module])
        module.seen = len(seen)

    pick(model).register_forward_hook(note)
    twin = with_small_batch_linears(model)
    assert twin is not model  # the other layers multiply in the quicker way
    for _ in range(2):
        twin(torch.tensor([[3, 4]]))
    assert seen == [names[pick(model)]] * 2 and pick(model).seen == 2
