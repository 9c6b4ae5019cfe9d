"""
Real models and tokenizers, where the folders with them are at hand: `HF_ADAFUSE_SHARED`, or `../shared`, has questions,
tokenizers and small models. `HF_ADAFUSE_REAL` has pretrained models, one folder each; on two CPU cores the tests that
need them take ten minutes a model.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import unicodedata
from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.tiny import eos_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble
from hf_adafuse.lab.evaluation.metrics import contains, exact_match
from hf_adafuse.members.vocabulary import vocabulary_of
from hf_adafuse.trees.backend_probe import choose_backend

SHARED = Path(os.environ.get("HF_ADAFUSE_SHARED", Path(__file__).parents[2] / "shared"))
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")

REAL = Path(os.environ.get("HF_ADAFUSE_REAL", "there is none"))
REAL_MODELS = sorted(path for path in REAL.iterdir() if path.is_dir()) if REAL.is_dir() else []

TEXTS = [
    "def f(x):\n    if x:\n\treturn x  # two  spaces\n\n\nclass A: pass",
    "Größe, Übermaß, ähnlich – „Zitat“ … naïve café",
    "😀 👨‍👩‍👧 🇩🇪 ok",
    "今天天气很好，我们去公园。\n第二行",
    "a\r\nb\tc   d \n",
    "price: $3.14, 1,000,000 <b>x</b> </s> <|endoftext|> [INST]",
]


def load(name):
    folder = SHARED / "models" / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("order", [("stories260K", "babyllama-tok361"), ("babyllama-tok361", "stories260K")])
def test_stories_equal_the_oracle(order, branches):
    models, tokenizers = zip(*map(load, order), strict=True)
    prompt = "Once upon a time"
    for tokenizer in tokenizers:
        tokenizer.pad_token = tokenizer.eos_token
    case = Case(list(models), list(tokenizers), AdaFuseConfig(num_branches=branches), [prompt], 200)
    rows, _, _ = case.main_ids()
    members = case.ref_members()
    for member in members:
        member.eos = eos_ids(member.tokenizer)
    from support.reference import reference_decode

    expected, texts = reference_decode(members, case.member_prompts(rows[0]), case.config, 200)
    if len(expected) < 200 and expected[-1] != tokenizers[0].eos_token_id:
        with pytest.warns(UserWarning, match="outgrows"):
            output = case.fast()
    else:
        output = case.fast()
    assert output.sequences[0, len(rows[0]) :].tolist() == expected
    story = "".join(committed.text for committed in output.rounds[0])
    assert story == "".join(texts)[: len(story)]
    words = story.split()
    assert len(words) > 30 and sum(word.strip(".,!?\"'").isalpha() for word in words) / len(words) > 0.9


def shared_tokenizer(name):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def real_tokenizers():
    return sorted(path.name for path in (SHARED / "tokenizers").iterdir()) if SHARED.is_dir() else []


@needs_shared
@pytest.mark.parametrize("name", real_tokenizers())
def test_real_tokenizers_round_trip(name):
    vocabulary = vocabulary_of(AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name))
    texts = list(TEXTS)
    for file in sorted((SHARED / "data").glob("*.jsonl")):
        texts += [json.loads(line)["question"] for line in file.read_text("utf-8").splitlines()[:60]]
    for text in texts:
        for span in (text, " " + text, "\n\n" + text, text + " "):
            encoding = vocabulary.encode(span)
            composed = unicodedata.normalize("NFC", span) == span  # Qwen's tokenizer composes characters
            assert encoding.exact or not composed, span
            if encoding.exact:
                assert vocabulary.text(encoding.ids) == span
                assert b"".join(map(vocabulary.piece, encoding.ids)).decode() == span


@pytest.mark.slow
@needs_shared
def test_real_tokenizers_on_random_models():
    """Each of the four as the main one, over half of the questions, in batches: no crash, and the text is the ids'."""
    tokenizers = [AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name) for name in real_tokenizers()]
    models = []
    for seed, tokenizer in enumerate(tokenizers):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        models.append(LlamaForCausalLM(config).eval())
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    for k in range(len(models)):
        order = [k, *(j for j in range(len(models)) if j != k)][: 2 + k % 3]
        for file in sorted((SHARED / "data").glob("*.jsonl"))[k % 2 :: 2]:
            prompts = [json.loads(line)["question"][:200] for line in file.read_text("utf-8").splitlines()[k : k + 2]]
            config = AdaFuseConfig(num_branches=2, margin_threshold=0.05)
            case = Case([models[j] for j in order], [tokenizers[j] for j in order], config, prompts, 8)
            output, (rows, ids, _) = case.fast(), case.main_ids()
            for row, prompt in enumerate(rows):
                count = sum(committed.num_tokens for committed in output.rounds[row])
                new = output.sequences[row, ids.shape[1] : ids.shape[1] + count].tolist()
                decoded = [tokenizers[k].decode(x, skip_special_tokens=True) for x in (prompt, prompt + new)]
                assert decoded[0] + "".join(r.text for r in output.rounds[row]) == decoded[1]


def trivia():
    lines = (SHARED / "data" / "triviaqa_dev.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["question"], row["answer"] if isinstance(row["answer"], list) else [row["answer"]]) for row in rows]


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODELS, reason=f"{REAL} has no pretrained models")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("folder", REAL_MODELS, ids=lambda folder: folder.name)
def test_the_quickest_backend_is_found_in_any_precision(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    assert choose_backend(model, torch.device("cpu")) == "tree-attention"


@pytest.mark.slow
@needs_shared
@pytest.mark.skipif(not REAL_MODELS, reason=f"{REAL} has no pretrained models")
@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "few-shot"])
@pytest.mark.parametrize("folder", REAL_MODELS, ids=lambda folder: folder.name)
def test_copies_of_a_model_answer_as_well_as_the_model_alone(folder, is_chat):
    """The recommended preset, 50 questions, B = 1 and 3: no worse by more than the standard error of the difference,
    and the same text on nearly all: a batch rounds otherwise than a prompt alone, which decides near ties."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if is_chat and tokenizer.chat_template is None:
        pytest.skip(f"{folder.name} has no chat template")
    questions = trivia()
    shots = "".join(f"Question: {question}\nAnswer: {answers[0]}\n\n" for question, answers in questions[:5])
    asked, metric = questions[100:150], contains if is_chat else exact_match
    prompts = [question if is_chat else f"{shots}Question: {question}\nAnswer:" for question, _ in asked]
    asked_for = {"chat": is_chat, "max_new_tokens": 24 if is_chat else 16, "max_batch_size": 10}
    asked_for |= {} if is_chat else {"stop_strings": ["\n"]}

    def texts_of(num_copies, **settings):
        ensemble = AdaFuseEnsemble([(model, tokenizer)] * num_copies)
        return [text.strip() for text in ensemble.texts(prompts, **asked_for, **settings)]

    def right(texts):
        return [metric(text, answers) for text, (_, answers) in zip(texts, asked, strict=True)]

    alone = []
    for prompt in prompts:
        if is_chat:
            chat = [{"role": "user", "content": prompt}]
            encoded = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = tokenizer(prompt, return_tensors="pt")
        ids = encoded["input_ids"]
        stops = {} if is_chat else {"stop_strings": ["\n"], "tokenizer": tokenizer}
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=asked_for["max_new_tokens"], **stops,
        )  # fmt: skip
        alone.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
    for branches in (1, 3):
        together = texts_of(2, adafuse_config={"preset": "robust", "num_branches": branches})
        differences = [a - b for a, b in zip(right(together), right(alone), strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        num_same = sum(a == b for a, b in zip(together, alone, strict=True))
        summary = (
            f"{folder.name}, B = {branches}: right {sum(right(alone)):.0f} alone, {sum(right(together)):.0f} as two, "
        )
        summary += f"difference {statistics.mean(differences):+.3f} +- {error:.3f}, the same text {num_same} of 50"
        logging.getLogger(__name__).info(summary)
        assert statistics.mean(differences) >= -error, summary
        assert num_same >= 45, summary
