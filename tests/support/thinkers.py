"""Members that think before they answer, by words: what follows what, and what a thought makes likely."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from support.chats import templated
from support.releases import with_cache
from support.tiny import tiny_model
from support.toys import Toy, ToyConfig

WORDS = ["ask", "bot", "blue", "red", "dim", "sky", "rose", "gray", "far"]
# As of Qwen3: the model opens its thoughts itself, unless they are switched off.
QWEN = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}bot"
    "{% if enable_thinking is defined and enable_thinking is false %} <think></think>{% endif %}{% endif %}"
)
# As of DeepSeek-R1: the prompt opens the thoughts, and there is no switch.
OPENED = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }} {% endfor %}bot <think>"
PLAIN = "{% for m in messages %}{{ m['content'] }} {% endfor %}bot"


class Mindful(Toy):
    """p(next) from the last token and from all that stand before it: each word seen makes others more likely."""

    def __init__(self, config, table, seen):
        super().__init__(config, table)
        self.seen = torch.nn.Parameter(seen, requires_grad=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, cache=None, **_):
        cache = past_key_values if cache is None else cache
        keys = input_ids[:, None, :, None].float()
        if cache is not None:
            keys, _ = cache.update(keys, keys, 0)
        ids, width = keys[:, 0, :, 0].long(), input_ids.shape[1]
        if attention_mask is not None and attention_mask.dim() == 4:
            mask = attention_mask[:, 0, -width:, : ids.shape[1]]
            mask = (mask if mask.dtype == torch.bool else mask == 0).float()
        else:
            mask = torch.ones(width, ids.shape[1]).tril(ids.shape[1] - width)[None]
            if attention_mask is not None:
                mask = mask * attention_mask[:, None, : ids.shape[1]]
        logits = self.table[input_ids] + torch.einsum("bqk,bkv->bqv", mask, self.seen[ids])
        return CausalLMOutputWithPast(logits=logits, **with_cache(cache))


def words_tokenizer(template):
    names = ["<unk>", "</s>", "<think>", "</think>", *("▁" + word for word in WORDS)]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def member(template, script, seen):
    """A member by what follows what (log-odds), and what a word that stands anywhere before makes likely."""
    tokenizer = words_tokenizer(template)
    number = {name.strip("▁"): index for name, index in tokenizer.get_vocab().items()}
    table, by_seen = torch.zeros(len(number), len(number)), torch.zeros(len(number), len(number))
    for rows, values in ((table, script), (by_seen, seen)):
        for (before, after), odds in values.items():
            rows[number[before], number[after]] = odds
    config = ToyConfig(vocab_size=len(number), eos_token_id=1, pad_token_id=1)
    model = Mindful(config, table, by_seen).eval()
    model.generation_config.eos_token_id = 1
    return model, tokenizer


ANSWERS = {("</think>", "gray"): 12.0, ("bot", "gray"): 9.0, ("sky", "</s>"): 40.0, ("rose", "</s>"): 40.0}
ANSWERS |= {("gray", "</s>"): 40.0, ("dim", "</think>"): 30.0}
# A thinks of blue, then of dim, and says "sky" with more certainty than B, which thinks of red, says "rose".
A = {**ANSWERS, ("bot", "<think>"): 20.0, ("<think>", "blue"): 20.0, ("blue", "dim"): 30.0}
B = {**ANSWERS, ("bot", "<think>"): 20.0, ("<think>", "red"): 20.0, ("red", "dim"): 30.0}
A_SEEN, B_SEEN = {("blue", "sky"): 18.0}, {("red", "rose"): 15.0}
CHAT = [{"role": "user", "content": "ask"}]


def pair(first=QWEN, second=QWEN):
    return [member(first, A, A_SEEN), member(second, B, B_SEEN)]


def endless(beginning=""):
    """Random members whose thoughts never close, so that they are as long as they may be. `beginning`: of the
    template."""
    template = beginning + "{% for m in messages %}{{ m['content'] }}\n{% endfor %}<think>{# </think> #}"
    kinds = (("llama", "byte_level", 0), ("qwen3", "sentencepiece", 1))
    return [(tiny_model(*kind), templated(kind[1], template)) for kind in kinds]
