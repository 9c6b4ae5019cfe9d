"""Images beside the prompts of the main model.

This module finds the arguments that hold them, checks that the model's class can take part with images, and runs the
pass in which the model reads text and images. The other members read the text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..transformers_compat import DynamicCache, cache_argument, returned_cache
from ..trees.adapters import base_model
from ..trees.backend import ForwardError
from ..trees.kv_cache import KeysValues, adopt_cache

# How the names of arguments begin that hold images, video or audio, over all classes of transformers.
# `mm_encoder_outputs` holds what an encoder has made of them.
_BEGINNINGS = ("pixel_", "image_", "video_", "patch_", "input_features", "input_values", "mm_encoder_outputs")
# Arguments with one value for each token, which say which tokens stand for an image.
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
# The names under which configs have the ids of tokens that stand for an image.
_TOKENS = ("image_token_id", "image_token_index")


@dataclass(frozen=True)
class Images:
    """
    The images of a call.

    Args:
        arguments (`dict`): as the model's `forward` takes them.
    """

    arguments: Mapping[str, Any]

    @torch.no_grad()
    def prefill(self, model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> KeysValues:
        """
        The keys and values of all but the last column of the prompts, which the model reads with the images.

        Args:
            model (`PreTrainedModel`): the main model.
            ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`), mask (the same, *optional*): left-padded.

        Raises:
            ForwardError: whatever the model raises.
            ValueError: it has kept other keys than one for each token.
        """
        parameters = inspect.signature(base_model(model).forward).parameters
        mask = torch.ones_like(ids) if mask is None else mask
        given = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
            **self.arguments,
        }
        for name in ("input_ids", "attention_mask", "position_ids", *_PER_TOKEN):
            if name in given:
                given[name] = given[name][:, :-1]
        name = cache_argument(parameters) or ""
        given |= {name: DynamicCache(), "use_cache": True, "return_dict": True, "logits_to_keep": 1}
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        try:
            output = model(**{key: value for key, value in given.items() if takes_all or key in parameters})
        except Exception as error:
            raise ForwardError(f"{type(error).__name__}: {error}") from error
        layers = adopt_cache(returned_cache(output, name), ids.shape[1] - 1)
        if any(keys.shape[2] != ids.shape[1] - 1 for keys, _ in layers):
            raise ValueError(
                f"The main model must keep keys for each token of the prompt, but {type(model).__name__} has kept "
                "others. Describe the images in the prompt instead."
            )
        return layers


def read_images(model: Any, call: Mapping[str, Any]) -> Images | None:
    """
    The images of a call of `generate()`; `None` where there are none.

    Raises:
        ValueError: the model is of a class that cannot take part with images.
    """
    given = {name: value for name, value in call.items() if name.startswith(_BEGINNINGS) and value is not None}
    given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) or len(value)}
    if not given:
        return None
    reason = _unfit(model, given, call)
    if reason is not None:
        raise ValueError(
            f"The inputs must be text alone with AdaFuse and {type(model).__name__}, but hold {sorted(given)}: {reason}"
            ". Leave them out, or describe the images in the prompt."
        )
    return Images({**given, **{name: call[name] for name in _PER_TOKEN if call.get(name) is not None}})


def without_images(call: Mapping[str, Any], images: Images) -> dict[str, Any]:
    """The arguments of a call without those of the images."""
    return {name: value for name, value in call.items() if name not in images.arguments}


def image_tokens(model: Any) -> set[int]:
    """The ids of the tokens that stand for images in the main model's prompt; the other members do not read them."""
    return {token for name in _TOKENS if isinstance(token := getattr(model.config, name, None), int)}


def _unfit(model: Any, given: Mapping[str, Any], call: Mapping[str, Any]) -> str | None:
    """Why a model cannot read the images `given` in a call; `None` where it can."""
    parameters = inspect.signature(base_model(model).forward).parameters
    parts = list(model.modules())
    if "mm_encoder_outputs" in given:
        return "they are encoded already"
    unknown = sorted(name for name in given if name not in parameters)
    if unknown:
        return f"its `forward` does not take {unknown}"
    if not any(hasattr(part, "get_image_features") for part in parts):
        return "only classes that turn images into embeddings of the prompt's tokens can take part"
    if any(hasattr(part, "get_rope_index") for part in parts):
        return "its tokens have positions on several axes"
    if any(name.startswith(("video_", "pixel_values_videos", "input_features", "input_values")) for name in given):
        return "only images can take part"
    if any(name.startswith("vision_") and value is not None for name, value in call.items()):
        return "how images are encoded cannot be changed in a call"
    if not image_tokens(model):
        return "its config does not say which token stands for an image"
    return None
