"""The entry of `auto_map` in a repository: every causal language model of transformers, under its own name, with the
`generate()` of the repository. Works without the package.
"""

from __future__ import annotations

import os
from typing import Any

import transformers

from .generate import generate
from .repository import load_assistants, write_custom_generate


class AdaFuseRepositoryGenerationMixin:  # transformers looks for "GenerationMixin" in the name
    """Generates with the ensemble of the repository, and takes the repository along when it is saved."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the weights are those of transformers' class. As custom code, GPT-NeoX would load without its head."""
        return False

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """transformers would lay a second copy of the code beside the weights when it saves: `save_pretrained` below
        keeps all of it in `custom_generate/`."""

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return generate(inputs, *args, model=self, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """
        As in transformers; the code, in `custom_generate/`, and the assistants in folders are added.
        To upload, use `push_to_hub()`: with `save_pretrained(push_to_hub=True)` these would come too late.

        Raises:
            ValueError: `push_to_hub` is set.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError("`push_to_hub` must be False here, but is True. Call `model.push_to_hub(name)` instead.")
        assistants = load_assistants(self)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            write_custom_generate(save_directory, architecture=type(self).__name__)
            for name, (model, tokenizer) in assistants.items():
                folder = os.path.join(save_directory, name)
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)


def __getattr__(name: str) -> Any:
    # One file for every architecture: the class has the name of transformers' own, which pipelines look for.
    base = getattr(transformers, name, None) if not name.startswith("_") else None
    if not isinstance(base, type) or not issubclass(base, transformers.PreTrainedModel):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    body = {"__module__": __name__, "__qualname__": name, "__doc__": base.__doc__, "_adafuse_base": base}
    cls = type(name, (AdaFuseRepositoryGenerationMixin, base), body)
    globals()[name] = cls
    return cls
