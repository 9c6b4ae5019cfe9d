"""Checks the package on a GPU and measures it there. Run by hand; pytest runs the same parts on CPU with tiny sizes.

    python tests/on_gpu.py --minutes 8 --out on_gpu.json
    python tests/on_gpu.py --parts "compiled: both small" --out compiled.json
    python tests/on_gpu.py --device cpu

The parts are run in order of importance, each with a time limit of its own, in a process of their own: a part that
fails, hangs or kills its process costs no other part. Each part's rows are printed as they come, all of them in a table
at the end, and the file is written anew after each part. So a run that is cut off still leaves most.

Needs transformers, torch and accelerate, no network and no installed package: all models are in the repository.
"""

# ruff: noqa: E402, T201
from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]  # from a bare checkout

import torch
from support.cases import assert_equal, random_case
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available, logging

from hf_adafuse import AdaFuseEnsemble, demo
from hf_adafuse.demo.tables import aligned
from hf_adafuse.lab.benchmarks import instruments, report
from hf_adafuse.lab.benchmarks import members as prose
from hf_adafuse.lab.benchmarks.measuring import GREEDY, METHODS, BenchJob
from hf_adafuse.lab.benchmarks.results import OURS
from hf_adafuse.lab.benchmarks.workload import Combination, Workload

HAS_ICU = importlib.util.find_spec("icu4py") is not None


@dataclass(frozen=True)
class Sizes:
    """
    How much the parts do.

    Attributes:
        cases, questions, prompts (`int`): how many are read.
        new_tokens, timed_tokens (`int`): how many are written after each prompt, and where the time is taken.
        large, small (`int`): the parameters of the members whose speed is measured.
        prompt_tokens, batch_sizes (`tuple[int]`): with which it is measured.
        pass_tokens (`tuple[int]`): the tokens of the single passes that are measured.
    """

    cases: int = 60
    questions: int = 200
    prompts: int = 32
    new_tokens: int = 48
    timed_tokens: int = 32
    large: int = 8_000_000_000
    small: int = 1_000_000_000
    prompt_tokens: tuple[int, ...] = (20, 1000)
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    pass_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)


TINY = Sizes(
    *(4, 8, 3, 12, 8), large=3_000_000, small=2_000_000, prompt_tokens=(5, 30), batch_sizes=(1, 2), pass_tokens=(1, 8)
)


class Place(NamedTuple):
    """Where the parts are run (`"cuda"` or `"cpu"`), and how much they do there."""

    device: str
    sizes: Sizes


PLACES = {
    "cuda": Place("cuda", Sizes()),
    "cpu": Place("cpu", TINY),
}


class Row(NamedTuple):
    """
    What a part has found. A later row of the same name takes the place of the earlier one.

    Attributes:
        what (`str`): its name.
        found (`dict`): plain JSON values by name. `right`: whether it is as it must be, where that is known. What
            `details` holds is written to the file only.
    """

    what: str
    found: dict[str, Any]


@dataclass
class Result:
    """
    What came of a part.

    Attributes:
        part (`str`): its name.
        ended (`str`): `"done"`, or what stopped it.
        seconds (`float`): which it took.
        rows (`dict`): what its rows found, by their names.
    """

    part: str
    ended: str = "not reached"
    seconds: float = 0.0
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return self.ended == "done" and all(found.get("right", True) for found in self.rows.values())


class Part(NamedTuple):
    """A part: its name, the seconds it may take, and the function that yields its rows at a place."""

    name: str
    seconds: float
    rows: Callable[[Place], Iterator[Row]]


# What the parts do.


def machine(place: Place) -> Iterator[Row]:
    """The card, the versions, and what is installed."""
    yield Row("on", {"machine": report.format_machine().strip(), "flash_attention": is_flash_attn_2_available()})
    if place.device == "cuda":
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        yield Row("cards", {card.name: f"{card.total_memory / 2**30:.0f} GiB" for card in cards})


def oracle(place: Place) -> Iterator[Row]:
    """Random cases of the tests on the device, against the slow oracle, which is run on CPU."""
    numbers: dict[str, list[int]] = {"equal": [], "differ": [], "fail": []}
    details = ""
    for number in range(place.sizes.cases):
        case = random_case(number)
        if not HAS_ICU:
            case.config = replace(case.config, word_boundary="whitespace")
        expected = case.slow()
        case.models = [on(place.device, model) for model in case.models]
        try:
            assert_equal(case, expected)
            numbers["equal"].append(number)
        except Exception as error:
            numbers["differ" if isinstance(error, AssertionError) else "fail"].append(number)
            details = details or traceback.format_exc()
        if (number + 1) % 10 == 0 or number + 1 == place.sizes.cases:
            wrong = {name: numbers[name] for name in ("differ", "fail")}
            found = {"equal": f"{len(numbers['equal'])} of {number + 1}", **wrong}
            yield Row("cases", {**found, "right": not any(wrong.values()), "details": details})


def batches(place: Place) -> Iterator[Row]:
    """Prompts of different lengths, together and one by one: the same texts."""
    members = [(on(place.device, model), tokenizer) for model, tokenizer in prose.load_pair()]
    prompts = [prose.prompt(5 + 9 * index, members[0][1], index) for index in range(min(8, place.sizes.prompts))]
    for branches in (1, 3):
        ensemble = AdaFuseEnsemble(members, {"num_branches": branches})
        alone = [ensemble.texts([prompt], max_new_tokens=place.sizes.new_tokens)[0] for prompt in prompts]
        together = ensemble.texts(prompts, max_new_tokens=place.sizes.new_tokens)
        yield Row(f"batch and single, B = {branches}", agreement(together, alone))


def demo_accuracy(place: Place) -> Iterator[Row]:
    """The demo's questions, on the device and on CPU."""
    asked = demo.test_questions(place.sizes.questions)
    prompts = [question.prompt for question in asked]
    texts = {}
    for device in (place.device, "cpu"):
        members = [(on(device, model), tokenizer) for model, tokenizer in demo.load_pair()]
        texts[device] = AdaFuseEnsemble(members, "paper").texts(prompts, max_new_tokens=24)
    right = {
        device: sum(text.strip() == question.answer for text, question in zip(answers, asked, strict=True))
        for device, answers in texts.items()
    }
    found = agreement(texts[place.device], texts["cpu"])
    is_right = right[place.device] == right["cpu"]
    yield Row("answers", {**found, **{f"right_on_{device}": n for device, n in right.items()}, "right": is_right})


def devices(place: Place) -> Iterator[Row]:
    """Members on different devices, and such as accelerate has placed: the texts that they write on CPU."""
    prompts = [question.prompt for question in demo.test_questions(8)]
    on_cpu = demo.load_pair()
    expected = texts_of(on_cpu, prompts)

    def placed(*where: str) -> dict[str, Any]:
        members = [(on(device, model), tokenizer) for device, (model, tokenizer) in zip(where, on_cpu, strict=True)]
        return agreement(texts_of(members, prompts), expected)

    def mapped(*maps: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            members = [
                (load(name, device_map=device_map, offload_folder=folder), tokenizer)
                for name, device_map, (_, tokenizer) in zip(demo.NAMES, maps, on_cpu)
            ]
            return agreement(texts_of(members, prompts), expected)

    yield caught("both on the device", placed, place.device, place.device)
    yield caught("main on CPU, assistant on the device", placed, "cpu", place.device)
    yield caught("main on the device, assistant on CPU", placed, place.device, "cpu")
    yield caught('device_map="auto"', mapped, "auto", "auto")
    yield caught("main with two layers elsewhere", mapped, half_offloaded(place.device), place.device)
    if torch.cuda.device_count() > 1 and place.device == "cuda":
        yield caught("on two GPUs", placed, "cuda:0", "cuda:1")


def attentions(place: Place) -> Iterator[Row]:
    """Attention by one implementation and another: the same texts in float32."""
    prompts = [question.prompt for question in demo.test_questions(8)]
    expected = texts_of(demo.load_pair(), prompts)

    def texts_by(attention: str, dtype: torch.dtype) -> list[str]:
        loaded = [load(name, dtype=dtype, attn_implementation=attention) for name in demo.NAMES[:2]]
        members = [(on(place.device, model), tokenizer) for model, (_, tokenizer) in zip(loaded, demo.load_pair())]
        return texts_of(members, prompts)

    for attention in ("eager", "sdpa"):
        yield caught(attention, lambda name=attention: agreement(texts_by(name, torch.float32), expected))
    if is_flash_attn_2_available():  # in half precision alone, where texts may differ

        def compared() -> dict[str, Any]:
            half = [texts_by(attention, torch.bfloat16) for attention in ("flash_attention_2", "sdpa")]
            return {**agreement(*half), "right": True}

        yield caught("flash_attention_2, bfloat16, against sdpa", compared)


def precision(place: Place) -> Iterator[Row]:
    """Texts in bfloat16 against float32: how many differ, and by how many nats the float32 members like them less."""
    exact = [(on(place.device, model), tokenizer) for model, tokenizer in prose.load_pair()]
    rough = [(on(place.device, model).to(torch.bfloat16), tokenizer) for model, tokenizer in exact]
    prompts = [prose.prompt(20, exact[0][1], index) for index in range(place.sizes.prompts)]
    for name, count in {"main model alone": 1, "ensemble": 2}.items():
        pair = [texts_of(members[:count], prompts, place.sizes.new_tokens) for members in (exact, rough)]
        lost = [
            nats(exact[:count], prompt, other) - nats(exact[:count], prompt, text)
            for prompt, text, other in zip(prompts, *pair, strict=True)
            if text != other
        ]
        mean = sum(lost) / max(1, len(lost))
        found = {"differ": f"{len(lost)} of {len(prompts)}", "mean_nats_lost": round(mean, 3)}
        yield Row(f"bfloat16, {name}", {**found, "most_nats_lost": round(max(lost, default=0.0), 3)})


def methods(place: Place) -> Iterator[Row]:
    """The texts of the other methods, eight prompts at a time: those that they write on CPU."""
    prompts = [question.prompt for question in demo.test_questions(8)]
    on_cpu = demo.load_pair()
    on_device = [(on(place.device, model), tokenizer) for model, tokenizer in on_cpu]

    def compared(method: str) -> dict[str, Any]:
        pair = [
            AdaFuseEnsemble(members, {"method": method}).texts(prompts, max_new_tokens=12)
            for members in (on_device, on_cpu)
        ]
        return agreement(*pair)

    for method in METHODS:
        if method == "spans" and not HAS_ICU:
            yield Row(method, {"left_out": "icu4py is not installed"})
        else:
            yield caught(method, compared, method)


def single_passes(place: Place) -> Iterator[Row]:
    """
    What a pass of one prompt takes by its number of tokens, which `AcceleratorPolicy` and `PassCosts` guess at: until
    the device is done, and until the host may go on, which is what `PassCosts` measures.
    """
    workload = Workload(device=place.device, dtype="bfloat16")
    device = torch.device(place.device)
    for size in (place.sizes.large, place.sizes.small):
        job = workload.job(Combination((size,), place.sizes.prompt_tokens[0], 1, 1, ()))
        job.ensemble.meter.is_on = False
        model, done, let_go = job.ensemble.models[0], {}, {}
        for count in place.sizes.pass_tokens:
            ids = torch.ones((1, count), dtype=torch.long, device=device)
            times = [timed_pass(model, ids) for _ in range(6)][1:]
            let_go[str(count)], done[str(count)] = (round(1000 * min(column), 2) for column in zip(*times, strict=True))
        yield Row(f"a pass of {report.size_text(size)}, in ms", {"by_tokens": done, "until_the_host_goes_on": let_go})
        del job, model
        workload = Workload(device=place.device, dtype="bfloat16")


def speed(
    place: Place, names: tuple[str, str], most_rows: int | None = None, is_compiled: bool = False
) -> Iterator[Row]:
    """
    An ensemble of enlarged members in bfloat16 against its members alone, cheap shapes first.

    Args:
        place (`Place`)
        names (`tuple[str, str]`): the sizes of the members, `"large"` or `"small"`.
        most_rows (`int`, *optional*): the first shapes alone.
        is_compiled (`bool`): whether passes are compiled, on CUDA with CUDA graphs.
    """
    workload = Workload(
        device=place.device, dtype="bfloat16", compiled=is_compiled, new_tokens=place.sizes.timed_tokens
    )
    parameters = tuple(getattr(place.sizes, name) for name in names)
    shapes = list(itertools.product(place.sizes.prompt_tokens, place.sizes.batch_sizes, (1, 3)))
    shapes.sort(key=math.prod)
    # On CPU compiling takes minutes: there the same calls are made, and the compiled functions run as they are.
    stance = torch.compiler.set_stance("force_eager" if place.device == "cpu" else "default")
    with stance:
        for tokens, batch, branches in shapes[:most_rows]:
            members = " + ".join(map(report.size_text, parameters))
            what = f"{members}, {tokens} tokens, batch {batch}, B = {branches}"
            yield Row(what, {"state": "begun"})
            combination = Combination(parameters, tokens, batch, branches, (GREEDY,))
            yield caught(what, lambda combination=combination: figures(workload.job(combination)))
            gc.collect()  # what was too large for the GPU, if it was


def methods_speed(place: Place) -> Iterator[Row]:
    """What other methods take in a batch, in times of what the members take one after another."""
    workload = Workload(device=place.device, dtype="bfloat16", new_tokens=place.sizes.timed_tokens)
    batch = place.sizes.batch_sizes[1]
    for method in ("unite", "majority", "rerank"):

        def compared(method: str = method) -> dict[str, Any]:
            sizes = (place.sizes.small,)
            job = workload.job(Combination(sizes, place.sizes.prompt_tokens[0], batch, 1, (GREEDY, method)))
            measure(job)
            m = job.result
            ratio = m.seconds(method) / (m.greedy_seconds or math.nan)
            return {"seconds": round(m.seconds(method), 3), "over_members_in_turn": round(ratio, 2)}

        yield caught(f"{method}, batch {batch}", compared)


# What they have in common.


def measure(job: BenchJob) -> float:
    """Measure a job without counting its passes, for which the host would wait; the seconds of the warm-up."""
    job.ensemble.meter.is_on = False
    start = time.perf_counter()
    job.warm_up()
    seconds = time.perf_counter() - start
    job.measure_once(0)
    return seconds


def figures(job: BenchJob) -> dict[str, Any]:
    """What an ensemble takes, in seconds and in times of what it is held against."""
    warm_up = measure(job)
    m, ensemble = job.result, job.ensemble
    seconds, own = m.seconds(OURS), [m.seconds(name) for name in m.greedy]
    larger = max(range(len(own)), key=lambda index: m.parameters[index])
    with host_waits(ensemble.device) as waits:
        output = ensemble.generate(job.prompts[0], job.config, m.new_tokens, return_dict_in_generate=True)
    with host_waits(ensemble.device) as waits_alone:
        ensemble.run_alone(larger, job.prompts[0][larger], m.texts[0].own_tokens[larger])
    passes = [member["forward_passes"] for member in output.stats["members"]]
    reading = sum(count * size for count, size in zip(passes, m.weight_bytes, strict=True)) / m.bandwidth
    weights = sum(parameter.nbytes for model in ensemble.models for parameter in model.parameters())
    peak = m.memory_peak_bytes(OURS) or 0
    times = {
        "over_members_in_turn": seconds / sum(own),
        "over_larger_alone": seconds / own[larger],
        "over_reading_weights": seconds / reading,
        "larger_alone_over_reading_weights": own[larger] * m.bandwidth
        / (m.weight_bytes[larger] * m.texts[0].own_tokens[larger]),
        "passes_per_own_token": sum(passes) / sum(m.texts[0].own_tokens),
        "waits_per_pass": sum(waits.values()) / sum(passes),
        "waits_per_pass_alone": sum(waits_alone.values()) / m.texts[0].own_tokens[larger],
        "peak_over_weights_and_kv": peak / (weights + m.texts[0].own_kv_bytes),
    }  # fmt: skip
    found = {"seconds": round(seconds, 3), **{name: round(value, 2) for name, value in times.items()}}
    details = {
        "warm_up_seconds": warm_up, "parameters": m.parameters, "own_seconds": own, "passes": passes,
        "peak_bytes": peak, "agreement": m.agreement, "same_text": m.same_text,
        "bandwidth": m.bandwidth, "waits": dict(waits.most_common(12)),
        "waits_alone": dict(waits_alone.most_common(12)),
    }  # fmt: skip
    return {**found, "details": details}


@contextmanager
def host_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Counts, by file and line, how often the host waits for the GPU within."""
    found: Counter[str] = Counter()
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [f"{Path(one.filename).name}:{one.lineno}" for one in said if "called a synchronizing" in str(one.message)]
    found.update(lines)


@torch.no_grad()
def timed_pass(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """The seconds of a pass until the host may go on, and until the device is done."""
    instruments.synchronize(ids.device)
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    let_go = time.perf_counter() - start
    instruments.synchronize(ids.device)
    return let_go, time.perf_counter() - start


def on(device: str, model: Any) -> Any:
    """A copy of the model on a device."""
    return copy.deepcopy(model).to(device)


def load(name: str, **options: Any) -> Any:
    """A member of the demo, as `from_pretrained` loads it; in float32 where nothing else is said."""
    path = Path(demo.__file__).parent / "models" / name
    return AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **options}).eval()


def half_offloaded(device: str) -> dict[str, Any]:
    """Where the parts of the demo's first member are, a Llama of three layers, if two layers are brought for each pass
    from CPU memory, or where that is the device, from disk."""
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    elsewhere = "disk" if device == "cpu" else "cpu"
    return {**dict.fromkeys(parts, device), "model.layers.1": elsewhere, "model.layers.2": elsewhere}


def texts_of(members: Sequence[tuple[Any, Any]], prompts: list[str], new_tokens: int = 24) -> list[str]:
    """What an ensemble of these members writes after the prompts, by the paper's settings."""
    return list(AdaFuseEnsemble(members, "paper").texts(prompts, max_new_tokens=new_tokens))


def agreement(texts: Sequence[str], expected: Sequence[str]) -> dict[str, Any]:
    """How many texts are the expected ones; the others as details."""
    differ = [[one, other] for one, other in zip(texts, expected, strict=True) if one != other]
    return {"equal": f"{len(texts) - len(differ)} of {len(texts)}", "right": not differ, "details": differ}


@torch.no_grad()
def nats(members: Sequence[tuple[Any, Any]], prompt: str, text: str) -> float:
    """Minus the log-probability of a text after a prompt, the members' mean."""
    total = 0.0
    for model, tokenizer in members:
        start, ids = len(tokenizer(prompt).input_ids), tokenizer(prompt + text, return_tensors="pt").input_ids
        ids = ids.to(model.device)
        log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        total -= log_probs.gather(-1, ids[0, start:, None]).sum().item()
    return total / len(members)


def caught(what: str, check: Callable[..., dict[str, Any]], *arguments: Any) -> Row:
    """What a check finds; where it raises, that it does."""
    try:
        return Row(what, check(*arguments))
    except Exception as error:
        return Row(what, {"right": False, "error": short(error), "details": traceback.format_exc()})


def short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


PARTS = (
    Part("machine", 30, machine),
    Part("oracle", 120, oracle),
    Part("batches", 40, batches),
    Part("demo", 60, demo_accuracy),
    Part("devices", 60, devices),
    Part("attentions", 30, attentions),
    Part("precision", 60, precision),
    Part("single passes", 40, single_passes),
    Part("speed: large and small", 180, functools.partial(speed, names=("large", "small"))),
    Part("methods", 40, methods),
    Part("methods: speed", 60, methods_speed),
    Part("speed: both small", 60, functools.partial(speed, names=("small", "small"), most_rows=4)),
    Part("speed: both large", 60, functools.partial(speed, names=("large", "large"), most_rows=4)),
    # Last, since compiling may take all the time that is left.
    Part(
        "compiled: both small", 240, functools.partial(speed, names=("small", "small"), most_rows=3, is_compiled=True)
    ),
    Part(
        "compiled: large and small",
        240,
        functools.partial(speed, names=("large", "small"), most_rows=3, is_compiled=True),
    ),
)


# How they are run.


class Worker:
    """A process that runs parts, one after another, until one fails."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=work, args=(other,))
        self._process.start()
        other.close()
        self._is_idle = True

    def run(self, part: Part, place: Place, end: float, on_row: Callable[[Row], None]) -> str:
        """
        Run a part until it is done, or its time is up, or that of all parts.

        Args:
            part (`Part`), place (`Place`)
            end (`float`): the time at which all parts must be done, by `time.monotonic()`.
            on_row (`Callable`): told each row as it comes.

        Returns:
            `str`: `"done"`, or what stopped it.
        """
        self._pipe.send((part.rows, place))
        self._is_idle = False
        until = end
        while True:
            if not self._pipe.poll(max(0.0, until - time.monotonic())):
                return "cut off: its time was up" if until < end else "cut off: the time of all parts was up"
            try:
                message = self._pipe.recv()
            except (EOFError, ConnectionError):
                self._process.join(10)
                return f"its process died, exit code {self._process.exitcode}"
            if message is None:  # begun: what has passed was spent on loading the libraries, or the part before
                until = min(end, time.monotonic() + part.seconds)
            elif isinstance(message, str):
                self._is_idle = True
                return message
            else:
                on_row(Row(*message))

    def end(self) -> None:
        """End the process, also one that waits for a GPU that does not answer."""
        self._pipe.close()  # an idle one ends by itself
        self._process.join(5 if self._is_idle else 0)
        self._process.kill()
        self._process.join(10)


def work(pipe: Any) -> None:
    """What a worker does: it takes parts from the pipe, and sends their rows and how they ended."""
    torch.set_num_threads(1)  # what is run on CPU is tiny
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # no TF32
    torch.backends.cudnn.allow_tf32 = False
    while True:
        try:
            rows, place = pipe.recv()
        except EOFError:
            return
        pipe.send(None)
        try:
            for row in rows(place):
                pipe.send(tuple(row))
            ended = "done"
        except Exception:
            ended = traceback.format_exc()
        gc.collect()
        torch.cuda.empty_cache()  # does nothing where there is no CUDA
        pipe.send(ended)


def run(parts: Sequence[Part], place: Place, seconds: float, out: Path | None = None) -> list[Result]:
    """
    Run the parts in turn, and say what comes.

    Args:
        parts (`list[Part]`), place (`Place`)
        seconds (`float`): for all of them together.
        out (`Path`, *optional*): the file that is written after each part.
    """
    end = time.monotonic() + seconds
    results = [Result(part.name) for part in parts]
    worker = None
    try:
        for part, result in zip(parts, results, strict=True):
            start = time.monotonic()
            if end - start < 1:
                break
            print(f"\n{part.name}", flush=True)
            worker = worker or Worker()
            result.ended = worker.run(part, place, end, functools.partial(take, result))
            result.seconds = round(time.monotonic() - start, 1)
            if result.ended != "done":
                worker.end()
                worker = None
            print(f"  {result.ended} ({result.seconds} s)", flush=True)
            write(results, place, out)
    finally:
        if worker is not None:
            worker.end()
    write(results, place, out)
    return results


def take(result: Result, row: Row) -> None:
    result.rows[row.what] = row.found
    print(f"  {row.what}: {said(row.found)}", flush=True)


def said(found: dict[str, Any]) -> str:
    """What a row found, as text."""
    shown = {name: value for name, value in found.items() if name not in ("right", "details")}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def write(results: Sequence[Result], place: Place, out: Path | None) -> None:
    if out is not None:
        content = {"device": place.device, "sizes": asdict(place.sizes), "parts": [asdict(one) for one in results]}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(results: Sequence[Result]) -> str:
    """All rows, with whether each is right; a part that did not end has a row that says so."""
    rows: list[tuple[str, ...]] = [("part", "what", "right", "found")]
    for result in results:
        for what, found in result.rows.items():
            right = {True: "yes", False: "NO", None: ""}[found.get("right")]
            rows.append((result.part, what, right, said(found)))
        if result.ended != "done":
            rows.append((result.part, "the part itself", "NO", result.ended.strip().splitlines()[-1]))
    return "\n".join(aligned(rows, left=4))


def main() -> int:
    """0 where all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together (default: 8)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found there, as JSON")
    parser.add_argument("--device", choices=tuple(PLACES), default="cuda", help="on cpu all sizes are tiny")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="these alone")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` must be cpu, but is cuda: torch sees no GPU here. Pass `--device cpu`.")
    chosen = [part for part in PARTS if args.parts is None or part.name in args.parts]
    results = run(chosen, PLACES[args.device], 60 * args.minutes, args.out)
    print(f"\n{table(results)}", flush=True)
    return 0 if all(result.is_right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
