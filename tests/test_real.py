"""Real models and tokenizers, where the folder with them is at hand: `HF_ADAFUSE_SHARED`, or `../shared`."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.tiny import eos_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_adafuse import AdaFuseConfig
from hf_adafuse.members.vocabulary import vocabulary_of

SHARED = Path(os.environ.get("HF_ADAFUSE_SHARED", Path(__file__).parents[2] / "shared"))
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")

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
