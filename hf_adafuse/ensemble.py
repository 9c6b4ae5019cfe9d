"""An ensemble as one object: members by name or loaded, here or behind servers. Knows how to make a call of
`generate()`; decodes nothing.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .call.arguments import member_tokenizers
from .config import AdaFuseConfig
from .generation import enable_adafuse
from .host_internals import execution_device
from .members.chat import chat_inputs
from .members.loading import check_options, find_tokenizer, load_model, load_tokenizer
from .members.prompt_inputs import text_inputs
from .outputs import AdaFuseRound


class AdaFuseEnsemble:
    """
    Several language models that decode together.

    ```python
    >>> from hf_adafuse import AdaFuseEnsemble
    >>> from hf_adafuse.demo import load_pair

    >>> ensemble = AdaFuseEnsemble(load_pair(), adafuse_config="robust")
    >>> len(ensemble.texts(["kim has 3 red apples", "sam has 2"], max_new_tokens=4))
    2

    ```

    Args:
        members (`list`): the main model first. Each a model, its Hub name or folder, a [`ServedModel`] or its name like
            `"vllm:http://localhost:8000#model"`, or a pair of one of these and its tokenizer.
        adafuse_config (`AdaFuseConfig`, `dict`, `str` or `bool`, *optional*): as of `generate()`.
        options: of `from_pretrained`, for members by name; for those by the name of a server of [`ServedModel`], like
            `allow_http` and `api_key_env`.

    Attributes:
        model (`PreTrainedModel`): the main model, enabled, the others bound to it; with the weights of the one given,
            which stays as it is.
        tokenizers (`list`): of the members.

    Raises:
        ValueError: a member that does not load, or members that do not go together.
    """

    def __init__(
        self,
        members: Sequence[Any],
        adafuse_config: AdaFuseConfig | Mapping[str, Any] | str | bool | None = None,
        **options: Any,
    ) -> None:
        check_members(members)
        models = [member[0] if isinstance(member, (tuple, list)) else member for member in members]
        check_options([os.fspath(model) for model in models if isinstance(model, (str, os.PathLike))], options)
        pairs = [_pair(index, member, options) for index, member in enumerate(members)]
        self.tokenizers = [tokenizer for _, tokenizer in pairs]
        (main, tokenizer), *others = pairs
        stored = getattr(getattr(main, "generation_config", None), "adafuse_config", None)
        config = next(given for given in (adafuse_config, stored, True) if given is not None)
        # A view of the same weights: other ensembles of this model, and the caller, keep theirs.
        self.model = enable_adafuse(
            copy.copy(main), [model for model, _ in others], self.tokenizers[1:], tokenizer, config
        )

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """
        The main model's `generate()`.

        Args:
            inputs (`str`, `list[str]` or `torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
                prompts, as texts or in the main model's ids.
            kwargs: of `generate()`.

        Returns:
            what `generate()` returns.
        """
        if isinstance(inputs, (str, list, tuple)):
            prompts = [inputs] if isinstance(inputs, str) else list(inputs)
            kwargs = {**self._encode(prompts, False, self._tokenizers_of(kwargs)), **kwargs}
            inputs = None
        return self.model.generate(inputs, **kwargs)

    def texts(self, prompts: str | Sequence[str], **kwargs: Any) -> list[str]:
        """
        What comes after each prompt.

        Args:
            prompts (`str` or `list[str]`)
            kwargs: of `rounds()`.
        """
        made = self.rounds([prompts] if isinstance(prompts, str) else prompts, **kwargs)
        return ["".join(committed.text for committed in rounds) for rounds in made]

    def rounds(self, prompts: Sequence[str], chat: bool = False, **kwargs: Any) -> list[list[AdaFuseRound]]:
        """
        The rounds of each prompt.

        Args:
            prompts (`list[str]`)
            chat (`bool`, *optional*, defaults to `False`): whether each is a user's message, in each member's own chat
                template.
            kwargs: of `generate()`.
        """
        tokenizers = self._tokenizers_of(kwargs)
        padding = [token for token in (tokenizers[0].pad_token_id, tokenizers[0].eos_token_id) if token is not None]
        inputs = self._encode(prompts, chat, tokenizers)
        # Not to use a cache is not to hand it out.
        kwargs = {"pad_token_id": padding[0] if padding else None, "use_cache": False, **inputs, **kwargs}
        output = self.model.generate(return_dict_in_generate=True, **kwargs)
        return list(output.rounds)

    def encode(self, prompts: Sequence[str], chat: bool = False) -> Mapping[str, Any]:
        """Prompts in every member's own ids, as of [`text_inputs`]; with `chat` as users' messages, as of
        [`chat_inputs`]."""
        return self._encode(prompts, chat, self.tokenizers)

    def _tokenizers_of(self, kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The tokenizers of the members that a call of `generate()` is made with: it may name others."""
        if not any(kwargs.get(name) for name in ("assistant_models", "assistant_tokenizers", "tokenizer")):
            return self.tokenizers
        found = member_tokenizers(self.model, kwargs, kwargs.get("generation_config"), self.tokenizers[0])
        return self.tokenizers if found is None else found

    def _encode(self, prompts: Sequence[str], chat: bool, tokenizers: Sequence[Any]) -> Mapping[str, Any]:
        wrong = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
        if wrong is not None or not prompts:
            raise ValueError(f"`inputs` must be texts or a tensor of ids, but holds {wrong!r}. Pass texts.")
        if chat:
            inputs = chat_inputs([[{"role": "user", "content": prompt}] for prompt in prompts], tokenizers)
        else:
            inputs = text_inputs(prompts, tokenizers)
        encoded: Mapping[str, Any] = inputs.to(execution_device(self.model))
        return encoded


def check_members(members: Any) -> None:
    """Raises `ValueError` where they are no list of at least one."""
    if isinstance(members, str) or not isinstance(members, Sequence) or not members:
        raise ValueError(f"`members` must be a list of at least one model, but is {members!r}. Put them in a list.")


def _pair(index: int, member: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """A member's model and tokenizer, loaded."""
    model, tokenizer = member if isinstance(member, (tuple, list)) else (member, None)
    argument = f"members[{index}]"
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer), argument)
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        known = {} if tokenizer is None else {"tokenizer": tokenizer}
        try:
            model = load_model(name, **{"dtype": "auto", **options, **known})
        except (OSError, KeyError, TypeError) as error:  # TypeError: an option that it does not take
            raise ValueError(
                f"`{argument}` must be a model, its Hub name, a folder or a server, but {name!r} does not load "
                f"({type(error).__name__}: {error}). Check the name, and the options."
            ) from error
    return model, find_tokenizer(model, argument) if tokenizer is None else tokenizer
