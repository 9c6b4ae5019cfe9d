"""The kernel: there wherever a compiler is, equal to torch's own product, and nothing beside it is touched."""

from __future__ import annotations

import copy
import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.cases import assert_equal, random_case
from support.project import ROOT
from support.tiny import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from hf_adafuse.kernels import native_product, small_batch_linear
from hf_adafuse.kernels.autotuner import Autotuner
from hf_adafuse.kernels.native_product import MAX_TOKENS, can_multiply, kernel_name, product
from hf_adafuse.kernels.small_batch_linear import linear, with_small_batch_linears

SETS = ["avx2", "avx512"]
HAS_COMPILER = sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("gcc") is not None
CAPABILITY = torch.backends.cpu.get_cpu_capability().lower()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]


@pytest.fixture(params=SETS[: 1 + SETS.index(CAPABILITY)] if CAPABILITY in SETS else [])
def kernel(request, monkeypatch):
    """Each of the kernels that this processor can run."""
    monkeypatch.setattr(native_product, "_capability", lambda: request.param)
    native_product._kernel.cache_clear()
    if kernel_name() is None and not HAS_COMPILER:
        pytest.skip("No compiler was there to build the kernel.")
    yield native_product._kernel()
    native_product._kernel.cache_clear()


@pytest.fixture
def made(monkeypatch):
    """The shapes of the kernel's inputs."""
    shapes = []
    monkeypatch.setattr(
        small_batch_linear, "product", lambda x, *rest: shapes.append(tuple(x.shape)) or product(x, *rest)
    )
    return shapes


def test_the_kernel_is_there_wherever_it_can_be_built():
    is_there = HAS_COMPILER and CAPABILITY in SETS
    assert kernel_name() == (CAPABILITY if is_there else None)
    assert all(can_multiply(16, 16, dtype) is is_there for dtype in DTYPES)
    assert not can_multiply(15, 16) and not can_multiply(16, 24) and not can_multiply(16, 16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(16, 16), (17, 32), (31, 48), (96, 16), (257, 576), (40, 4096)])
def test_products_are_those_of_torch(shape, num_threads, dtype, kernel, monkeypatch):
    """To half a unit in the last place of what is rounded once, the bias in it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    torch.manual_seed(num_threads)
    weight, bias = torch.randn(shape).to(dtype), (3 * torch.randn(shape[0])).to(dtype)
    half_unit = max(1e-5, torch.finfo(dtype).eps / 2)
    for number in (*range(1, 20), 64, 65, 127, MAX_TOKENS):
        inputs = torch.randn(number, shape[1]).to(dtype)
        for given in (None, bias):
            outputs = product(inputs, weight, given)
            expected = F.linear(inputs.double(), weight.double(), given if given is None else given.double())
            torch.testing.assert_close(outputs.double(), expected, rtol=half_unit, atol=2e-5 * shape[1] ** 0.5)
            assert outputs.dtype is dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_rounded_to_the_nearest_and_of_two_to_the_even(dtype, kernel):
    """Of small whole numbers sums are exact, and many are as near to one number as to another."""
    for scale in (1.0, 2.0**-13, 2.0**-20):  # the last two: below the smallest normal numbers of float16
        inputs = torch.randint(-60, 60, (MAX_TOKENS, 16)).float() * scale
        weight, bias = torch.randint(-60, 60, (64, 16)).float(), torch.randint(-60, 60, (64,)).float() * scale
        rounded = product(*(one.to(dtype) for one in (inputs, weight, bias)))
        given = [one.to(dtype).double() for one in (inputs, weight, bias)]
        assert torch.equal(rounded, F.linear(*given).float().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_infinite_and_what_is_no_number(dtype, kernel):
    inputs, weight = torch.ones(4, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype)
    inputs[0, 3], inputs[1, 5], inputs[2, 7] = torch.inf, -torch.inf, torch.nan
    inputs[3] = torch.finfo(dtype).max
    assert product(inputs, weight)[:, 0].tolist()[:2] == [torch.inf, -torch.inf]
    assert product(inputs, weight)[2].isnan().all() and product(inputs, -weight)[2].isnan().all()
    assert product(inputs, weight)[3].tolist() == 16 * [torch.inf]
    assert product(inputs, -weight)[3].tolist() == 16 * [-torch.inf]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_does_not_depend_on_what_is_beside_it(dtype, kernel, monkeypatch):
    """The same bits with any number of tokens in the pass, of threads and of rows."""
    inputs, weight = torch.randn(37, 320).to(dtype), torch.randn(75, 320).to(dtype)
    expected = torch.cat([product(one[None], weight) for one in inputs])
    for num_threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        for number in range(1, 38):
            assert torch.equal(product(inputs[:number], weight), expected[:number])
        assert torch.equal(product(inputs, weight[20:60]), expected[:, 20:60])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(16, 1), (33, 7), (50, MAX_TOKENS)])
def test_only_the_outputs_are_written(num_rows, num_tokens, dtype, kernel):
    sizes = (num_rows, 32), (num_tokens, 32), (num_rows,), (num_tokens, num_rows)
    dtypes = dtype, torch.float32, torch.float32, dtype
    # Each in the middle of a larger one, and not where a line of the cache begins.
    around = [
        torch.full((17 + math.prod(size) + 23,), torch.nan, dtype=one) for size, one in zip(sizes, dtypes, strict=True)
    ]
    weight, inputs, bias, outputs = (one[17:-23].view(size) for one, size in zip(around, sizes, strict=True))
    weight.normal_(), inputs.normal_(), bias.normal_()
    addresses = [one.data_ptr() for one in (weight, inputs, bias, outputs)]
    kernel(*addresses, num_rows, 32, num_tokens, DTYPES.index(dtype), 2)
    expected = F.linear(inputs, weight.float(), bias)
    torch.testing.assert_close(outputs.float(), expected, rtol=max(1e-4, torch.finfo(dtype).eps / 2), atol=1e-4)
    assert all(one[:17].isnan().all() and one[-23:].isnan().all() for one in around)


def test_inputs_need_not_be_contiguous_nor_of_two_dimensions(kernel):
    weight = torch.randn(32, 16)
    for inputs in (torch.randn(16, 5).t(), torch.randn(3, 4, 16)[:, 1:3], torch.randn(2, 1, 3, 16), torch.randn(16)):
        torch.testing.assert_close(product(inputs, weight), F.linear(inputs, weight), rtol=1e-4, atol=1e-4)


def test_defaults_of_torch_change_nothing(kernel):
    inputs, weight = torch.randn(3, 16), torch.randn(32, 16)
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            outputs = product(inputs, weight)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(outputs, F.linear(inputs, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_columns", [512, 4096])
def test_the_kernel_is_tried_and_taken(num_columns, kernel, made, monkeypatch):
    """Beside parts of the weight only where these may be quicker."""
    now, multiplied, found = [0.0], small_batch_linear._multiplied, []
    monkeypatch.setattr("hf_adafuse.kernels.autotuner.time.perf_counter", lambda: now[0])

    def timed(x, w, bias, way):
        found.append(way)
        now[0] += 1.0 if way.by_kernel else 1.2
        return multiplied(x, w, bias, way)

    monkeypatch.setattr(small_batch_linear, "_multiplied", timed)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    small_batch_linear._tuner.cache_clear()
    weight, bias = torch.randn(num_columns, num_columns), torch.randn(num_columns)
    inputs = torch.randn(5, num_columns) / num_columns**0.5
    with torch.no_grad():
        for _ in range(30):
            outputs = linear(inputs, weight, bias)
            torch.testing.assert_close(outputs, F.linear(inputs, weight, bias), rtol=1e-4, atol=1e-4)
    assert len(set(found)) == (2 if num_columns == 512 else 6)
    assert found[-5:] == 5 * [small_batch_linear._BY_KERNEL] and len(made) >= 9
    small_batch_linear._tuner.cache_clear()


@pytest.mark.parametrize(("num_tokens", "is_by_kernel"), [(3, False), (4, True), (15, True), (16, False)])
def test_processes_that_share_a_model_take_the_kernel_untried(num_tokens, is_by_kernel, kernel, made, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    before = Autotuner.num_trials
    with torch.no_grad():
        for _ in range(5):
            linear(torch.randn(num_tokens, 256), torch.randn(256, 256))
    assert len(made) == 5 * is_by_kernel and Autotuner.num_trials == before


@pytest.mark.parametrize("dtype", HALVES)
def test_in_half_precision_the_kernel_is_taken_untried(dtype, kernel, made):
    """Of so many tokens, and weights of so many bytes, whatever their precision."""
    weight, bias, before = torch.randn(256, 256).to(dtype), torch.randn(256).to(dtype), Autotuner.num_trials
    for number in (1, 3, 31, 32, 33, MAX_TOKENS, MAX_TOKENS + 1):
        made.clear()
        inputs = torch.randn(number, 256).to(dtype)
        with torch.no_grad():
            outputs = linear(inputs, weight, bias)
            linear(inputs, weight[:128])
        assert len(made) == (number <= 32) and Autotuner.num_trials == before
        torch.testing.assert_close(outputs, F.linear(inputs, weight, bias), rtol=0.02, atol=0.1)


@pytest.mark.usefixtures("small_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_are_as_torch_has_them(dtype, kernel, made):
    """Of one number for each row, wherever they are; others torch spreads out, or tells."""
    inputs, weight = torch.randn(2, 3, 32).to(dtype), torch.randn(48, 32).to(dtype)
    with torch.no_grad():
        for bias in (torch.randn(96).to(dtype)[::2], torch.randn(1).to(dtype).expand(48)):
            outputs = linear(inputs, weight, bias)
            torch.testing.assert_close(outputs, F.linear(inputs, weight, bias), rtol=0.02, atol=0.1)
        assert len(made) == 2
        for shape in ((1,), (), (1, 48), (2, 3, 48)):
            bias = torch.randn(shape).to(dtype)
            torch.testing.assert_close(linear(inputs, weight, bias), F.linear(inputs, weight, bias))
        for shape in ((47,), (49,), (96,), (0,)):
            with pytest.raises(RuntimeError, match=r"size|shape"):
                linear(inputs, weight, torch.randn(shape).to(dtype))
    assert len(made) == 2


@pytest.mark.usefixtures("small_kernel")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_in_half_precision(dtype, kernel, made):
    model = copy.deepcopy(tiny_model("llama", "byte_level", 0)).to(dtype)
    twin, ids = with_small_batch_linears(model), torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0.05, atol=0.2)
    assert len(made) == sum(type(module) is torch.nn.Linear for module in model.modules())
    assert list(map(id, twin.parameters())) == list(map(id, model.parameters()))
    assert with_small_batch_linears(model.double()) is model


@pytest.mark.usefixtures("small_kernel")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_cannot_multiply_is_left_to_torch(dtype, kernel, made):
    inputs, weight = torch.randn(4, 32).to(dtype), torch.randn(32, 32).to(dtype)
    others = {
        "across": (inputs, weight.t()),
        "columns": (torch.randn(4, 24).to(dtype), torch.randn(32, 24).to(dtype)),
        "rows": (inputs, weight[:15]),
        "rows apart": (inputs, torch.randn(32, 64).to(dtype)[:, :32]),
        "many": (torch.randn(MAX_TOKENS + 1, 32).to(dtype), weight),
        "double": (inputs.double(), weight.double()),
    }
    with torch.no_grad():
        for given, _ in itertools.product(others.values(), range(10)):
            torch.testing.assert_close(linear(*given), F.linear(*given))
    assert not made
    asked = weight.clone().requires_grad_()
    for _ in range(10):
        linear(inputs, asked).sum().backward()
    assert asked.grad is not None and not made
    with torch.no_grad():
        for _ in range(10):
            linear(inputs, weight)
    assert made


@pytest.mark.usefixtures("small_kernel")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_is_more_than_numbers_in_memory_is_left_to_torch(kernel, made):
    """Tensors that look like ordinary ones, and modes and transforms that would not see the kernel."""
    inputs, weight = torch.randn(4, 32), torch.randn(64, 32)
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64))
    twin = with_small_batch_linears(layer)
    assert twin is not layer
    quantize_(layer, Int8WeightOnlyConfig())  # the twin shares its weights
    with torch.no_grad():
        torch.testing.assert_close(twin(inputs), layer(inputs))
        negative = torch._neg_view(inputs), torch._neg_view(weight)
        assert negative[0].is_neg()
        for one, other in itertools.product((inputs, negative[0]), (weight, negative[1])):
            if one.is_neg() or other.is_neg():
                torch.testing.assert_close(linear(one, other), F.linear(one, other))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert linear(inputs, weight).shape == (4, 64)
        with FlopCounterMode(display=False) as counter:
            linear(inputs, weight)
        assert counter.get_total_flops() == 2 * 4 * 64 * 32
        traced = torch.jit.trace(lambda x: linear(x, weight), inputs, check_trace=False)
        torch.testing.assert_close(traced(2 * inputs), F.linear(2 * inputs, weight))
        mapped = torch.vmap(lambda x: linear(x, weight))(inputs[None])
        torch.testing.assert_close(mapped, F.linear(inputs, weight)[None])
        with pytest.raises(RuntimeError, match="dtype"):
            linear(inputs, weight, torch.randn(64, dtype=torch.float64))
    assert not made


@pytest.mark.usefixtures("small_kernel")
def test_inputs_that_do_not_match_are_told_by_torch(kernel, made):
    with torch.no_grad():
        for inputs in (torch.randn(4, 64), torch.randn(4, 16), torch.randn(64)):
            with pytest.raises(RuntimeError, match="shapes"):
                linear(inputs, torch.randn(32, 32))
        for one, other in itertools.permutations((*DTYPES, torch.float64), 2):
            with pytest.raises(RuntimeError, match="dtype"):
                linear(torch.randn(4, 32).to(one), torch.randn(32, 32).to(other))
    assert not made


@pytest.mark.parametrize("number", range(1, 60, 5))
@pytest.mark.usefixtures("small_kernel")
def test_ensembles_that_multiply_by_the_kernel_equal_the_oracle(number, kernel, made):
    assert_equal(random_case(number))
    assert len(made) > 10


@pytest.mark.slow
def test_its_threads_are_those_of_torch():
    """It brings no other OpenMP along: with two there are twice as many threads as cores."""
    code = """
import re, torch
def loaded():
    return set(re.findall(r"/\\S*lib(?:gomp|i?omp)[^/\\s]*", open("/proc/self/maps").read()))
from hf_adafuse.kernels import native_product
before = loaded()
print(native_product.kernel_name(), before and loaded() == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(kernel_name()), "True"]


def test_a_library_that_cannot_be_used_is_told(tmp_path, monkeypatch):
    """One that is broken, and one of another source."""
    messages = []
    monkeypatch.setattr(native_product.logger, "warning", messages.append)
    monkeypatch.setattr(native_product, "__file__", str(tmp_path / "native_product.py"))
    monkeypatch.setattr(native_product, "_FUNCTION", "native_product_0")
    name = f"kernel_{CAPABILITY}{sysconfig.get_config_var('EXT_SUFFIX')}"
    libraries = [b"no library", *(path.read_bytes() for path in Path(small_batch_linear.__file__).parent.glob(name))]
    for library in libraries:
        (tmp_path / name).write_bytes(library)
        native_product._kernel.cache_clear()
        assert kernel_name() is None and not can_multiply(16, 16)
    assert len(messages) == len(libraries) == (2 if HAS_COMPILER and CAPABILITY in SETS else 1)
    assert all("Install hf_adafuse anew" in message for message in messages)
    assert "native_product_0" in messages[-1] or len(messages) == 1
    native_product._kernel.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["gcc", "false"])
def test_the_package_is_built_with_a_compiler_and_without(compiler, tmp_path):
    kept_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*.so", "tests", "notebooks")
    shutil.copytree(ROOT, tmp_path / "source", ignore=kept_out)
    build = [sys.executable, "-m", "pip", "wheel", str(tmp_path / "source"), "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"CC": compiler}
    subprocess.run([*build, "-q", "-w", str(tmp_path)], check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    built = [name for name in names if name.endswith(".so")]
    assert len(built) == (2 if HAS_COMPILER and compiler == "gcc" else 0)
    assert "hf_adafuse/kernels/small_batch_linear.py" in names
