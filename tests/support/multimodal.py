"""Tiny random models that see images, of the classes of the installed transformers."""

from __future__ import annotations

import functools

import torch
import transformers as hf

from support.tiny import TOKENIZERS, eos_ids

TOKENIZER = TOKENIZERS["byte_level"]()
_SIZE = len(TOKENIZER)
# Tokens that stand for images, beyond those of the tokenizer's words.
IMAGE, VIDEO, AUDIO, BEGIN, END = range(_SIZE - 5, _SIZE)
_SMALL = (
    dict.fromkeys(
        ("hidden_size", "d_model", "embed_dim", "out_hidden_size", "projection_dim", "vision_hidden_size"), 32
    )
    | dict.fromkeys(("intermediate_size", "ffn_dim"), 48)
    | dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "num_key_value_heads"), 2)
    | dict.fromkeys(("num_attention_heads", "num_heads"), 4)
    | dict.fromkeys(("image_token_id", "image_token_index"), IMAGE)
    | dict.fromkeys(("video_token_id", "video_token_index"), VIDEO)
    | dict.fromkeys(("boi_token_id", "vision_start_token_id", "image_start_token_id", "boi_token_index"), BEGIN)
    | dict.fromkeys(("eoi_token_id", "vision_end_token_id", "image_end_token_id", "eoi_token_index"), END)
    | dict(audio_token_id=AUDIO, head_dim=8, image_size=28, patch_size=14, max_position_embeddings=256)
    | dict(initializer_range=0.3, vocab_size=_SIZE, mm_tokens_per_image=4, scale_factor=2, image_seq_length=4)
)

# As main members and assistants, with text alone. Some have positions on three axes.
CLASSES = (
    "AriaForConditionalGeneration", "AyaVisionForConditionalGeneration", "FuyuForCausalLM",
    "Gemma3ForConditionalGeneration", "GotOcr2ForConditionalGeneration", "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration", "Lfm2VlForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "MllamaForConditionalGeneration", "Ovis2ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "SmolVLMForConditionalGeneration", "VideoLlavaForConditionalGeneration", "VipLlavaForConditionalGeneration",
)  # fmt: skip


def _shrink(config, depth=0):
    for name, value in _SMALL.items():
        now = getattr(config, name, None)
        if isinstance(now, (int, float)) and not isinstance(now, bool):
            setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PreTrainedConfig) and depth < 3:
            _shrink(value, depth + 1)
        elif name == "layer_types" and value:
            config.layer_types = value[:2]
    if config.model_type in ("qwen2_vl_text", "qwen2_5_vl_text"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 0, 2
    return config


@functools.cache
def tiny_with_images(name: str):
    """A random model of a class by its name. Do not change it: it is shared between tests."""
    cls = getattr(hf, name)
    torch.manual_seed(0)
    model = cls(_shrink(cls.config_class())).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # Gemma 3's way from images to texts
                parameter.normal_(std=0.3)
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape) * 1.5)
        head[[IMAGE, VIDEO, AUDIO, BEGIN, END]] = 0.0
    model.generation_config.eos_token_id = eos_ids(TOKENIZER)
    return model


def features_of(model, num_images=1):
    """Random pixels of images, and how many tokens stand for one of them."""
    pixels = torch.randn(num_images, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    if "Idefics" in type(model).__name__ or "SmolVLM" in type(model).__name__:
        pixels = pixels[:, None]  # each prompt has a list of images
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    found = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    return pixels, found.reshape(-1, found.shape[-1]).shape[0] // num_images
