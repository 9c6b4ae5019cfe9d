"""A tiny PairRM in both layouts, and a tiny fuser: made here, saved as the real ones are, and computed plainly. The
plain computations share no code with the package.
"""

from __future__ import annotations

import functools
import json

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import DebertaV2Config, DebertaV2Model, T5Config, T5ForConditionalGeneration

from support.tiny import CORPUS, TOKENIZERS, _wrap

LAYOUTS = ("own", "hf")
MARKERS = ["<|source|>", "<|candidate1|>", "<|candidate2|>", "<|candidate|>"]
SIZE = 16


def pair_tokenizer():
    """DeBERTa's special tokens around characters; then the markers, as `add_tokens` of the authors' code gives them."""
    seen = sorted({char for line in CORPUS for char in line if ord(char) < 256})
    vocab = {token: index for index, token in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *seen])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = _wrap(backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", pad_token="[PAD]")
    tokenizer.add_tokens(MARKERS)
    return tokenizer


def encoder_config(vocab_size):
    return DebertaV2Config(
        vocab_size=vocab_size, hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, relative_attention=True, position_buckets=8, max_relative_positions=-1,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        type_vocab_size=0, initializer_range=0.6, pad_token_id=0,
    )  # fmt: skip


@functools.cache
def pair_weights(seed, num_tasks):
    torch.manual_seed(seed)
    encoder = DebertaV2Model(encoder_config(len(pair_tokenizer())))
    weights = {f"pretrained_model.{name}": value for name, value in encoder.state_dict().items()}
    weights |= {"head_layer.1.weight": torch.randn(SIZE, 2 * SIZE) * 0.5, "head_layer.1.bias": torch.randn(SIZE)}
    return weights | {"head_layer.4.weight": torch.randn(num_tasks, SIZE), "head_layer.4.bias": torch.randn(num_tasks)}


def save_pair_rm(folder, layout="hf", seed=0, num_tasks=1, weights=None, **changes):
    """A folder as `llm-blender/PairRM` ("own") or `llm-blender/PairRM-hf` ("hf") has it; returns its name."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = pair_tokenizer()
    tokenizer.save_pretrained(folder)
    save_file(pair_weights(seed, num_tasks) if weights is None else weights, folder / "model.safetensors")
    if layout == "hf":
        values = encoder_config(len(tokenizer)).to_dict() | {"architectures": ["DebertaV2PairRM"]}
        ids = tokenizer.convert_tokens_to_ids(MARKERS)
        names = ("source_prefix_id", "cand1_prefix_id", "cand2_prefix_id", "cand_prefix_id")
        values |= dict(zip(names, ids)) | {"n_tasks": num_tasks, "drop_out": 0.05}
    else:
        base = folder.parent / f"{folder.name}-base"
        encoder_config(len(tokenizer) + 7).save_pretrained(base)  # as of deberta-v3, whose vocabulary is padded
        values = {"ranker_type": "pairranker", "model_type": "deberta", "model_name": str(base), "n_tasks": num_tasks}
        values |= {"source_maxlength": 1224, "candidate_maxlength": 412, "drop_out": 0.05, "fp16": True}
    (folder / "config.json").write_text(json.dumps(values | changes))
    return str(folder)


class PlainPairRM:
    """One logit of one pair at a time, from the file's weights."""

    def __init__(self, folder, source_maxlength=1224, candidate_maxlength=412):
        weights = load_file(f"{folder}/model.safetensors")
        prefix = "pretrained_model."
        self.tokenizer = pair_tokenizer()
        self.encoder = DebertaV2Model(encoder_config(len(self.tokenizer))).eval()
        self.encoder.load_state_dict({k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)})
        self.head = {k: v for k, v in weights.items() if not k.startswith(prefix)}
        self.lengths = source_maxlength, candidate_maxlength

    def segment(self, marker, text, most):
        """[CLS] marker text [SEP], cut before the last."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids[: most - 3]
        return [1, self.tokenizer.convert_tokens_to_ids(marker), *ids, 2]

    def ids(self, source, first, second):
        head = self.segment(MARKERS[0], source, self.lengths[0])
        most = (self.lengths[0] + 2 * self.lengths[1] - len(head)) // 2
        return head + self.segment(MARKERS[1], first, most) + self.segment(MARKERS[2], second, most)

    @torch.no_grad()
    def logit(self, source, first, second):
        ids = self.ids(source, first, second)
        states = self.encoder(torch.tensor([ids])).last_hidden_state[0]
        at = [states[ids.index(self.tokenizer.convert_tokens_to_ids(marker))] for marker in MARKERS[:3]]
        left, right = (self.score(torch.cat([at[0], of_answer])) for of_answer in at[1:])
        return (left - right).mean().item()

    def score(self, both):
        hidden = torch.tanh(self.head["head_layer.1.weight"] @ both + self.head["head_layer.1.bias"])
        return self.head["head_layer.4.weight"] @ hidden + self.head["head_layer.4.bias"]

    def scores(self, source, answers):
        """Of every answer, the mean over all others, equal ones too."""
        known = {(a, b): self.logit(source, a, b) for a in set(answers) for b in set(answers)}
        means = []
        for i, mine in enumerate(answers):
            rest = [other for j, other in enumerate(answers) if j != i]
            means.append(sum(known[mine, b] - known[b, mine] for b in rest) / max(len(rest), 1))
        return means


def fuser_tokenizer():
    """T5's special tokens around the words of a unigram model."""
    tokenizer = TOKENIZERS["unigram"].__wrapped__()
    tokenizer.add_tokens([f"<extra_id_{index}>" for index in range(8)], special_tokens=True)
    return tokenizer


def save_fuser(folder, seed=5):
    tokenizer = fuser_tokenizer()
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, initializer_factor=2.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    T5ForConditionalGeneration(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
