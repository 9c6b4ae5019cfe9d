"""Chats, two members with a chat template each, and what `generate()` gives for one prompt, to compare with."""

from __future__ import annotations

import copy
import functools
import logging

from hf_adafuse import AdaFuseConfig, enable_adafuse
from support.tiny import TOKENIZERS, tiny_model

CONFIG = AdaFuseConfig(max_word_tokens=4)
PROMPTS = ["Once upon a time", "there was a cat on the tree. The", "She"]
QUESTION = [{"role": "user", "content": "what is the capital of Peru"}]
LONGER = [
    {"role": "user", "content": "was there a cat"},
    {"role": "assistant", "content": "there was a big cat"},
    {"role": "user", "content": "she was there"},
]
PREFILLED = [*QUESTION, {"role": "assistant", "content": "The capital of Peru is"}]
CHATS = [QUESTION, LONGER, QUESTION[:1] + LONGER[1:]]

# Tools, and calls of them as members write these.
CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Lima", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
LIMA = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'

# One that marks turns with a special token, one with plain text and the tokenizer's own beginning.
MARKED = (
    "{% for m in messages %}<|eot|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% if documents %}[{{ documents | length }} papers]{% endif %}"
    "{% if add_generation_prompt %}<|eot|>assistant: {% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[ask] {{ m['content'] }} [/ask]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}{{ mood or '' }}"
)


@functools.cache
def templated(name: str, template: str):
    tokenizer = copy.deepcopy(TOKENIZERS[name]())
    tokenizer.chat_template = template
    return tokenizer


def members(main: str = "byte_level", max_positions: int = 512):
    """Two members with a template each: fresh shallow copies of shared models, so that enabling changes nothing."""
    pair = [
        (copy.copy(tiny_model("llama", "byte_level", 0, max_positions=max_positions)), templated("byte_level", MARKED)),
        (
            copy.copy(tiny_model("qwen3", "sentencepiece", 1, max_positions=max_positions)),
            templated("sentencepiece", PLAIN),
        ),
    ]
    return pair if main == "byte_level" else pair[::-1]


def ensemble(pair):
    return dict(assistant_models=[pair[1][0]], assistant_tokenizers=[pair[1][1]], adafuse_config=CONFIG)


_DIRECT: dict[tuple, list[int]] = {}


def direct(pair, *, new=6, **inputs) -> list[int]:
    """The new ids that `generate()` gives for one prompt. Each is decoded once."""
    given = [inputs["input_ids"], *(each["input_ids"] for each in inputs.get("assistant_inputs") or [])]
    key = (pair[0][1], pair[1][1], new, *(tuple(ids[0].tolist()) for ids in given))
    if key not in _DIRECT:
        _DIRECT[key] = decode(pair, new, inputs)
    return _DIRECT[key]


def decode(pair, new, inputs) -> list[int]:
    (model, tokenizer), _ = pair
    output = enable_adafuse(copy.copy(model)).generate(
        **inputs, **ensemble(pair), tokenizer=tokenizer, max_new_tokens=new, do_sample=False
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def direct_prompt(pair, prompt, **more):
    inputs = pair[0][1](prompt, return_tensors="pt", return_token_type_ids=False)
    return direct(pair, **inputs, **more)


def by_hand(pair, chat, **options):
    """Each member's inputs for a chat, made with nothing but its own tokenizer."""
    options = {"add_generation_prompt": True, **options}
    made = [
        tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True, **options) for _, tokenizer in pair
    ]
    return dict(
        input_ids=made[0]["input_ids"],
        attention_mask=made[0]["attention_mask"],
        assistant_inputs=[{"input_ids": made[1]["input_ids"], "attention_mask": made[1]["attention_mask"]}],
    )


def new_ids(records, prompt_ids) -> list[int]:
    return records[0]["generated_token_ids"][len(prompt_ids) :]


def unpadded(ids, tokenizer):
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids = ids[:-1]
    return ids


class propagating:
    """transformers' logger keeps its records to itself: let them through to pytest."""

    def __enter__(self):
        self.logger = logging.getLogger("transformers")
        self.before = self.logger.propagate
        self.logger.propagate = True

    def __exit__(self, *_):
        self.logger.propagate = self.before
