"""Libraries that call `generate()` with criteria and processors of their own: in a batch, each row as it is alone."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
import warnings

import pytest
import torch
from support.tiny import TOKENIZERS, tiny_model
from transformers import LogitsProcessorList

from hf_adafuse import AdaFuseConfig, enable_adafuse

with warnings.catch_warnings():
    # What they, and what they import, are warned of by others is not ours.
    warnings.simplefilter("ignore")
    import xgrammar
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from pydantic import BaseModel
    from xgrammar.contrib.hf import LogitsProcessor as XGrammarProcessor

MEMBERS = [("llama", "byte_level", 0), ("gpt2", "characters", 0)]
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "She",
    "there was a cat on the tree. The",
    "Question: what is",
    "I'm sure you think so",
    "the cat, and there was a big tree in the park.",
    "def f(x):",
]


def tokenizer_of(name):
    """One's own: a library may set things."""
    return copy.deepcopy(TOKENIZERS[name]())


def enabled(likely="", by=0.0):
    """The members, assistants bound; `likely` is what all find likelier than they would."""
    models = []
    for architecture, tokenizer, seed in MEMBERS:
        model, size = copy.deepcopy(tiny_model(architecture, tokenizer, seed)), len(TOKENIZERS[tokenizer]())
        bias = torch.zeros(size)
        bias[TOKENIZERS[tokenizer]().encode(likely, add_special_tokens=False)] = by
        model.get_output_embeddings().bias = torch.nn.Parameter(bias)
        models.append(model)
    tokenizers = [TOKENIZERS[tokenizer]() for _, tokenizer, _ in MEMBERS]
    return enable_adafuse(
        models[0],
        assistant_models=models[1:],
        assistant_tokenizers=tokenizers[1:],
        tokenizer=tokenizers[0],
        adafuse_config=AdaFuseConfig(max_words=2, num_branches=2, max_word_tokens=3),
    )


# lm-evaluation-harness


@pytest.fixture(scope="module")
def answers():
    """By batch size, what the harness makes of a task of two kinds of questions."""
    model, prompts = enabled("\n", by=7.0), [f"{prompt}{end}" for end in ("", " a") for prompt in PROMPTS] + ["and"]
    requests = [
        Instance("generate_until", {}, (prompt, {"until": until, "max_gen_toks": 10}), index)
        for index, (prompt, until) in enumerate((prompt, until) for until in (["\n"], ["e", "t"]) for prompt in prompts)
    ]
    found = {}
    for batch_size in (1, 8, 16):
        harness = HFLM(pretrained=model, tokenizer=tokenizer_of("byte_level"), batch_size=batch_size)
        found[batch_size] = harness.generate_until(requests, disable_tqdm=True)
    return model, requests, found


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 16])
def test_lm_eval_answers_alike_in_a_batch(batch_size, answers):
    _, _, found = answers
    assert found[batch_size] == found[1]


@pytest.mark.slow
def test_lm_evals_answers_are_the_texts_up_to_a_stop(answers):
    model, requests, found = answers
    tokenizer, num_cut = tokenizer_of("byte_level"), 0
    for request, answer in zip(requests, found[1], strict=True):
        prompt, settings = request.args
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        free = model.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        whole = tokenizer.decode(free, skip_special_tokens=True)
        ends = [whole.index(stop) for stop in settings["until"] if stop in whole]
        assert answer == whole[: min(ends, default=None)] if ends else answer == whole
        num_cut += bool(ends)
    assert len(requests) // 4 < num_cut < len(requests)


def figure(harness, folder):
    """What the harness reports of a task over a file: the share of answers that are the expected ones, and each."""
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "words.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e", "t"], "max_gen_toks": 10},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = simple_evaluate(harness, tasks=[task], bootstrap_iters=0, log_samples=True, verbosity="ERROR")
    answers = {sample["doc"]["prompt"]: sample["filtered_resps"][0] for sample in results["samples"]["words"]}
    return results["results"]["words"]["exact_match,none"], answers


@pytest.mark.slow
def test_lm_evals_figure_is_that_of_batch_1(tmp_path):
    model, prompts = enabled("\n", by=7.0), [*PROMPTS, *(f"{prompt} a" for prompt in PROMPTS), "and"]
    alone, found = HFLM(pretrained=model, tokenizer=tokenizer_of("byte_level"), batch_size=1), {}
    requests = [
        Instance("generate_until", {}, (prompt, {"until": ["e", "t"], "max_gen_toks": 10}), index)
        for index, prompt in enumerate(prompts)
    ]
    answers = alone.generate_until(requests, disable_tqdm=True)
    lines = [  # two of three as they come, the others not
        json.dumps({"prompt": prompt, "answer": answer if index % 3 else f"not {answer}"})
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    (tmp_path / "words.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for batch_size in (1, 16):
        harness = HFLM(pretrained=model, tokenizer=tokenizer_of("byte_level"), batch_size=batch_size)
        found[batch_size] = figure(harness, tmp_path)
    assert found[16] == found[1]
    assert found[1] == (pytest.approx(11 / 17), dict(zip(prompts, answers, strict=True)))


# xgrammar

# Short, so that tiny models come to their ends.
REGEXES = [r"\[[0-9]{2}\]", r"(yes|no|perhaps)", r"[a-d]{2,4}!", r"-?[0-9]\.[0-9]"]


@functools.cache
def compiled(tokenizer, regex):
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZERS[tokenizer](), vocab_size=len(TOKENIZERS[tokenizer]()))
    return xgrammar.GrammarCompiler(info).compile_regex(regex)


ASSISTANTS = "assistant_logits_processor"


def output_of(model, prompts, **options):
    inputs = TOKENIZERS["byte_level"]()(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **options)


def texts_of(model, prompts, **options):
    return ["".join(committed.text for committed in rounds) for rounds in output_of(model, prompts, **options).rounds]


@pytest.mark.parametrize("regex", REGEXES)
def test_xgrammar_in_a_batch(regex):
    model = enabled()
    processor = XGrammarProcessor(compiled("byte_level", regex))
    rows = texts_of(model, PROMPTS, logits_processor=[processor])
    assert all(re.fullmatch(regex, row) for row in rows), rows
    assert processor.matchers == []  # the caller's is not called, and is good for another call
    assert [texts_of(model, [prompt], logits_processor=[processor])[0] for prompt in PROMPTS] == rows


def test_xgrammars_texts_follow_the_prompt():
    model = enabled()
    rows = [texts_of(model, PROMPTS, logits_processor=[XGrammarProcessor(compiled("byte_level", r"[a-d]{2,4}!"))])]
    assert len(set(*rows)) > 2


@pytest.mark.parametrize("batch", [2, 8])
def test_xgrammar_with_a_grammar_for_each_row(batch):
    model, prompts = enabled(), PROMPTS[:batch]
    regexes = [REGEXES[row % len(REGEXES)] for row in range(batch)]
    processor = XGrammarProcessor([compiled("byte_level", regex) for regex in regexes])
    rows = texts_of(model, prompts, logits_processor=LogitsProcessorList([processor]))
    assert all(re.fullmatch(regex, row) for regex, row in zip(regexes, rows, strict=True)), rows
    for prompt, regex, row in zip(prompts, regexes, rows, strict=True):
        alone = XGrammarProcessor(compiled("byte_level", regex))
        assert texts_of(model, [prompt], logits_processor=[alone]) == [row]


@pytest.mark.parametrize("batch", [1, 8])
def test_xgrammar_for_every_member(batch):
    """With a grammar of its own an assistant proposes what can win."""
    model, regex = enabled(), REGEXES[2]
    given = {
        "logits_processor": [XGrammarProcessor(compiled("byte_level", regex))],
        ASSISTANTS: [[XGrammarProcessor(compiled("characters", regex))]],
    }
    outputs = [output_of(model, PROMPTS[:batch], **options) for options in (given, {**given, ASSISTANTS: None})]
    for output in outputs:
        for rounds in output.rounds:
            assert re.fullmatch(regex, "".join(committed.text for committed in rounds))
    wins = [output.stats["members"][1]["wins"] for output in outputs]
    assert batch == 1 or wins[0] > wins[1]


# outlines


class Answer(BaseModel):
    ok: bool


@pytest.fixture(scope="module")
def outlines():
    """Only slow tests need it, so that it is not imported wherever tests are collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("outlines_core.kernels.torch")  # else in the middle of a call
        return importlib.import_module("outlines")


@pytest.fixture(scope="module")
def wrapped(outlines):
    before = torch._dynamo.config.suppress_errors  # outlines sets it for the whole process
    yield outlines.from_transformers(enabled(), tokenizer_of("byte_level"))
    torch._dynamo.config.suppress_errors = before


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["outlines_core", "xgrammar"])
@pytest.mark.parametrize("regex", REGEXES)
def test_outlines_regexes(regex, backend, wrapped, outlines):
    options = dict(max_new_tokens=16, do_sample=False, backend=backend)
    rows = wrapped.batch(PROMPTS, outlines.types.Regex(regex), **options)
    assert all(re.fullmatch(regex, row) for row in rows), rows
    assert [wrapped(prompt, outlines.types.Regex(regex), **options) for prompt in PROMPTS] == rows


@pytest.mark.slow
def test_outlines_models(wrapped):
    options = dict(max_new_tokens=40, do_sample=False)
    rows = wrapped.batch(PROMPTS, Answer, **options)
    assert all(isinstance(json.loads(row)["ok"], bool) and Answer.model_validate_json(row) for row in rows), rows
    assert [wrapped(prompt, Answer, **options) for prompt in PROMPTS] == rows
