"""Toy models whose outcome is derived by hand: the next-token probabilities depend on the last token alone."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_adafuse import enable_adafuse
from support.releases import with_cache


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    num_hidden_layers = 1


class Toy(PreTrainedModel, GenerationMixin):
    """p(next | last token) from a table; what the table leaves out shares the rest evenly."""

    config_class = ToyConfig
    base_model_prefix = ""

    def __init__(self, config, table):
        super().__init__(config)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.forwards = 0

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None, use_cache=None, **_
    ):
        self.forwards += 1
        cache = past_key_values if cache is None else cache  # transformers before 5.24 says `past_key_values`
        if cache is not None:
            keys = input_ids[:, None, :, None].float()
            cache.update(keys, keys, 0)
        return CausalLMOutputWithPast(logits=self.table[input_ids], **with_cache(cache))


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per word, the space in front (`"▁"` in the vocabulary)."""
    vocab = {token: index for index, token in enumerate(["<unk>", "</s>", *("▁" + word for word in words)])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


def toy(tokenizer: PreTrainedTokenizerFast, probabilities: dict[str, dict[str, float]]) -> Toy:
    size = len(tokenizer)
    table = torch.full((size, size), 1.0 / size)
    name = {word: tokenizer.convert_tokens_to_ids(word if word == "</s>" else "▁" + word) for row in
            [*probabilities.values(), dict.fromkeys(probabilities)] for word in row}  # fmt: skip
    for last, row in probabilities.items():
        rest = (1.0 - sum(row.values())) / (size - len(row))
        table[name[last]] = rest
        for word, probability in row.items():
            table[name[last], name[word]] = probability
    config = ToyConfig(vocab_size=size, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
    model = Toy(config, table.log()).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def run(members, config, prompt="So It", max_new_tokens=8, **kwargs):
    (main, tokenizer), *others = members
    return enable_adafuse(main).generate(
        **tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
        tokenizer=tokenizer,
        assistant_models=[model for model, _ in others],
        assistant_tokenizers=[tok for _, tok in others],
        adafuse_config=config,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        **kwargs,
    )


def texts(output):
    return [committed.text for committed in output.rounds[0]]
