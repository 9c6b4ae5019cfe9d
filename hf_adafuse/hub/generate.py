"""The entry of `custom_generate/` in a repository: what transformers calls in the place of a model's `generate()`.
Works without the package, on any model, and leaves the model as it is.
"""

from __future__ import annotations

import sys
from typing import Any

from ..call.sampling import warn_of_a_pipelines_default
from ..generation import adafuse_class, plain_class
from ..transformers_compat import repository_in_call
from .repository import Repository, code_revision, with_settings

# transformers' own, of loading the code; they arrive here with the arguments of the call.
_LOADING = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def generate(inputs: Any = None, *args: Any, model: Any, **kwargs: Any) -> Any:
    """
    `model.generate(inputs, *args, **kwargs)` with the ensemble of this repository.

    Args:
        inputs (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*): as in `generate()`.
        model (`PreTrainedModel`): the main model.
        args, kwargs: of [`AdaFuseGenerationMixin`]'s `generate()`. `adafuse_config=False` gives the ordinary one.

    Raises:
        ValueError: arguments that cannot be honoured, or an assistant that does not load.
        AdaFuseDecodingError: a member failed during decoding; carries the text committed so far.
    """
    explicit = _named_in_the_call()
    base = plain_class(type(model))
    if kwargs.get("custom_generate") is not None:  # other code than this is asked for
        return base.generate(model, inputs, *args, **kwargs)
    if explicit is not None:
        loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
        explicit = Repository(explicit.name, {**loading, **code_revision()})
    generation_config = args[0] if args else kwargs.get("generation_config")
    settings = with_settings(model, generation_config, kwargs, explicit)
    if settings["adafuse_config"] is not False:
        warn_of_a_pipelines_default(kwargs, generation_config, model.generation_config, is_bound=False)
    return _view(model, base).generate(inputs, *args, **settings)


def _view(model: Any, base: Any) -> Any:
    """A second face of the same model, weights and all, whose class has the mixin."""
    cls = adafuse_class(base)
    view = cls.__new__(cls)
    # `generate` of the model may be this very function.
    view.__dict__.update({name: value for name, value in vars(model).items() if name != "generate"})
    return view


def _named_in_the_call() -> Repository | None:
    """The repository of `model.generate(custom_generate=...)`, when this is such a call."""
    # Its assistants may lie in its folders. transformers passes the name neither to the code nor to the model, and of a
    # local path the folder of the cached code has only the last part: the caller's frame alone has the name.
    name = repository_in_call(sys._getframe(2))
    return None if name is None else Repository(name)
