"""An ensemble as one object: members by name or loaded, here or behind servers."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import BatchEncoding
from transformers.utils import logging

from .call.arguments import check_callback, check_time, member_handles, resolve_handles
from .call.planning import planning
from .call.sampling import requested_sampling
from .call.score import read_answers, score_call
from .confidence.answer_score import AnswerScore
from .config import AdaFuseConfig
from .decoding.progress import AdaFuseDecodingError
from .decoding.strategies.strategy import check_switch
from .generation import enable_adafuse
from .members.chat import chat_inputs, takes_system
from .members.loading import check_options, find_tokenizer, load_model, load_tokenizer
from .members.model_handle import ModelHandle
from .members.prompt_inputs import padding_id, text_inputs
from .members.thinking import thinking_format
from .members.thoughts import ThinkingError, check_chat_arguments, thinking_inputs
from .members.tools import Offer, with_tools
from .rounds.round_lists import AdaFuseRoundsBatch
from .servers.served_model import ServedModel
from .trees.adapters import AdaptedModel
from .trees.model_call import device_of

logger = logging.get_logger(__name__)


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
        members (`list`): the members, the main model first. Each is a model, its Hub name or folder, a [`ServedModel`]
            or its name like `"vllm:http://localhost:8000#model"`, or a pair of one of these and a tokenizer. Of an
            exported ensemble name the folder and those in it: `["my-ensemble", "my-ensemble/assistant_1"]`.
        adafuse_config (`AdaFuseConfig`, `dict`, `str` or `bool`, *optional*): the settings, as
            [`AdaFuseConfig.coerce`] reads them.
        options: arguments of `from_pretrained` for members that are given by name, like `dtype`. For members behind
            servers they are arguments of [`ServedModel`], like `allow_http` and `api_key_env`.

    Attributes:
        model (`PreTrainedModel`): the main model with the `generate()` of [`AdaFuseGenerationMixin`], to which the
            other members are bound. It shares the weights of the model that was given, which stays as it is.
        tokenizers (`list[PreTrainedTokenizerBase]`): one per member.

    Raises:
        ValueError: a member does not load, or the members do not go together.
    """

    def __init__(
        self,
        members: Sequence[Any],
        adafuse_config: AdaFuseConfig | Mapping[str, Any] | str | bool | None = None,
        **options: Any,
    ) -> None:
        check_members(members)
        check_options(names_of(members), options)
        pairs = [_pair(index, member, options) for index, member in enumerate(members)]
        self.tokenizers = [tokenizer for _, tokenizer in pairs]
        (main, tokenizer), *others = pairs
        assistants = [model for model, _ in others]
        own = getattr(main, "generation_config", None)
        if not others and (names := getattr(own, "assistant_models", None)):
            logger.warning_once(
                f"The model's generation config names {names}, which take no part: `members` has the main model alone. "
                "Name them in `members` too."
            )
        stored = getattr(own, "adafuse_config", None)
        config = next(given for given in (adafuse_config, stored, True) if given is not None)
        # A view of the same weights: other ensembles of this model, and the caller, keep theirs.
        self.model = enable_adafuse(copy.copy(main), assistants, self.tokenizers[1:], tokenizer, config)

    def generate(
        self,
        inputs: Any = None,
        chat: bool = False,
        thinking: str | None = None,
        max_thinking_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        The main model's `generate()`.

        Args:
            inputs (`str`, `list`, `Mapping` or `torch.LongTensor` of shape `(batch_size, sequence_length)`,
                *optional*): prompts as texts, as [`~AdaFuseEnsemble.encode`] returns them, or in the main model's ids.
                With `chat` each prompt is a user's message, or a conversation: a list of messages like
                `{"role": "user", "content": "Who wrote Faust?"}`.
            chat (`bool`, *optional*, defaults to `False`): whether each member reads the prompts in its own chat
                template.
            thinking (`str`, *optional*, defaults to `"apart"`): for chats with thinking models, whose templates mark
                thoughts, like `<think>`. `"apart"`: each of them writes its own thoughts alone, and the answer behind
                them is fused. `"main"`: only the main model thinks. `"off"`: none does.
            max_thinking_tokens (`int`, *optional*, defaults to 1024): the most tokens of one member's thoughts, which
                are cut off there.
            template_kwargs (`dict`, *optional*): for chats, further arguments of [`chat_inputs`], like variables of
                the templates: `{"reasoning_effort": "low"}`.
            tools (`list`, *optional*): for chats, functions with type hints and a docstring, or descriptions of tools
                as OpenAI's API has them. All members are told of them in one form, so that they can write a call
                together. A grammar holds that a call that begins is whole and valid (it needs the `structured` extra).
                With members behind servers there is no grammar.
            tool_choice (`str` or `dict`, *optional*, defaults to `"auto"`): `"auto"`, `"none"`, `"required"`, or the
                name of the tool that must be called.
            kwargs: further arguments of `generate()`, those of [`AdaFuseGenerationMixin`] among them.

        Returns:
            what `generate()` returns: ids of shape `(batch_size, sequence_length)`, or an [`AdaFuseOutput`] with
            `return_dict_in_generate=True`. Its `rounds` hold the `thoughts` and `tool_calls` of each prompt.

        Raises:
            ValueError: prompts or settings cannot be used.
            AdaFuseDecodingError: a member failed.
        """
        check_switch("chat", chat)
        others = {"tools": tools, "tool_choice": tool_choice}
        check_chat_arguments(chat, thinking, max_thinking_tokens, template_kwargs, **others)
        members = self._members_of(kwargs)
        tokenizers = [member.tokenizer for member in members]
        if not chat:
            if isinstance(inputs, torch.Tensor) and inputs.dim() != 2:
                shape = tuple(inputs.shape)
                raise ValueError(
                    f"`inputs` must be ids of shape (batch_size, sequence_length), but is of shape {shape}. Pass "
                    "`ids[None]` for one prompt."
                )
            if inputs is None or isinstance(inputs, torch.Tensor):
                return self.model.generate(inputs, **kwargs)
            if isinstance(inputs, Mapping):
                _check_encoded(inputs, kwargs)
            else:
                inputs = self._encode(inputs, False, tokenizers)
            return self.model.generate(**{**self._placed(inputs), **kwargs})
        variables = dict(template_kwargs or {})
        chats = as_chats(inputs)
        offer = Offer.of(tools, tool_choice)
        if offer is not None:
            if kwargs.get("structured") is not None:
                raise ValueError("`structured` must be left out with `tools`, but is given. Drop one of the two.")
            if offer.forced or all(member.is_local for member in members):
                kwargs["structured"] = offer.structured
        # Earlier calls and their results are texts for all members, whether tools are offered again or not.
        chats = [with_tools(chat, offer, offer is None or takes_system(tokenizers)) for chat in chats]
        if thinking != "off" and any(map(thinking_format, tokenizers)):
            self._check_settings(chats, members, kwargs, variables)
        sampling, max_time = self._sampling_of(kwargs), check_time(self._setting_of(kwargs, "max_time"))
        end = math.inf if max_time is None else time.monotonic() + max_time
        try:
            made, thoughts = thinking_inputs(chats, members, thinking, max_thinking_tokens, sampling, end, variables)
        except ThinkingError as error:
            texts, sequences = [""] * len(chats), [list[int]() for _ in chats]
            raise AdaFuseDecodingError(error.member, error.reason, 0, texts, sequences) from (error.__cause__ or error)
        if max_time is not None:
            kwargs["max_time"] = max(end - time.monotonic(), 0.0)
        num_returned = self._setting_of(kwargs, "num_return_sequences") or 1

        def finish(row: int, rounds: Any) -> None:
            of_members = thoughts[row // num_returned]
            rounds.thoughts = [one.text for one in of_members]
            rounds.num_thinking_tokens = [one.num_tokens for one in of_members]
            rounds.tool_calls = [] if offer is None else offer.read(rounds.text)[1]

        kwargs = {**self._placed(made), **kwargs}
        if kwargs.get("on_answer") is not None:
            kwargs["on_answer"] = _after(finish, check_callback("on_answer", kwargs["on_answer"]))
        output = self.model.generate(**kwargs)
        rows = getattr(output, "rounds", [])
        for row, rounds in enumerate(rows):
            finish(row, rounds)
        return output

    def texts(self, prompts: Any, **kwargs: Any) -> list[str]:
        """
        The text that the ensemble writes after each prompt.

        Args:
            prompts (`str` or `list`), kwargs: as of [`~AdaFuseEnsemble.generate`].

        Returns:
            `list[str]`: one text per prompt, with its leading whitespace: `[" Lima"]`.
        """
        return [rounds.text for rounds in self.rounds(prompts, **kwargs)]

    def rounds(self, prompts: Any, **kwargs: Any) -> AdaFuseRoundsBatch:
        """
        The rounds of each prompt.

        Args:
            prompts (`str` or `list`), kwargs: as of [`~AdaFuseEnsemble.generate`].

        Returns:
            [`AdaFuseRoundsBatch`]: one [`AdaFuseRounds`] per prompt. Each has a `text` and a `finish_reason`, prints as
            a trace, and makes a page by `to_html()`.
        """
        chat = kwargs.get("chat", False)
        check_switch("chat", chat)
        inputs = prompts if chat else _as_texts(prompts)
        rounds: AdaFuseRoundsBatch = self.output(inputs, **kwargs).rounds
        return rounds

    def output(self, inputs: Any = None, **kwargs: Any) -> Any:
        """
        The [`AdaFuseOutput`] of a call of [`~AdaFuseEnsemble.generate`], without a cache to go on with. The main
        tokenizer needs no padding token.

        Args:
            inputs, kwargs: as of [`~AdaFuseEnsemble.generate`].

        Returns:
            [`AdaFuseOutput`]: its `rounds` hold the texts, and its `stats` count rounds and forward passes.

        Raises:
            ValueError: as of [`~AdaFuseEnsemble.generate`], and where `adafuse_config=False` turns the ensemble off.
        """
        if self.model._adafuse_arguments(kwargs, kwargs.get("generation_config")) is None:
            raise ValueError(
                "`adafuse_config` must be settings where rounds are asked for, but is False. Pass settings or True, or "
                "call `generate()`, which returns the ids of the main model alone."
            )
        if kwargs.get("return_dict_in_generate", True) is not True:
            raise ValueError(
                "`return_dict_in_generate` must be True where rounds are asked for, but is "
                f"{kwargs['return_dict_in_generate']!r}. Leave it out, or call `generate()`, which returns ids."
            )
        settings = {
            "pad_token_id": padding_id(self._members_of(kwargs)[0].tokenizer),
            "use_cache": False,  # which is: do not hand it out
            "return_dict_in_generate": True,
        }
        return self.generate(inputs, **{**settings, **kwargs})

    def score(
        self,
        prompts: Any,
        answers: Any,
        chat: bool = False,
        ends: bool = False,
        max_batch_size: int = 8,
        on_scores: Callable[[int, list[AnswerScore]], Any] | None = None,
    ) -> list[list[AnswerScore]]:
        """
        The log-likelihood of given answers under every member. It serves to rerank answers, to filter data, and to find
        words that no member believes. Each member reads a prompt once, and all its answers behind it in one pass, where
        a common beginning of answers is read once. Very many tokens take further passes.

        ```python
        >>> from hf_adafuse import AdaFuseEnsemble
        >>> from hf_adafuse.demo import load_pair

        >>> ensemble = AdaFuseEnsemble(load_pair())
        >>> (scores,) = ensemble.score("Question: What is the capital of Peru?\\nAnswer:", [" Lima", " Oslo"])
        >>> max(scores, key=lambda score: sum(score.log_likelihoods)).text
        ' Lima'

        ```

        Args:
            prompts (`str` or `list`): as of [`~AdaFuseEnsemble.rounds`].
            answers (`list[list[str]]`): per prompt the texts that may follow it, each with the space between prompt and
                text (`" Lima"` behind `"Answer:"`). A single prompt may have the list of its texts alone.
            chat (`bool`, *optional*, defaults to `False`): whether each member reads the prompts in its own chat
                template. Members that think do not think here: their answer follows at once.
            ends (`bool`, *optional*, defaults to `False`): whether to score the end of the text after each answer too.
            max_batch_size (`int`, *optional*, defaults to 8): the most prompts that are read at a time.
            on_scores (`Callable`, *optional*): called as `on_scores(row, scores)` when all members have read the prompt
                of that row.

        Returns:
            `list[list[AnswerScore]]`: one per prompt and answer. Logits processors, temperature and stopping criteria
            play no part in it.

        Raises:
            ValueError: prompts or answers cannot be used. Nothing has been run then.
            AdaFuseDecodingError: a member failed.
        """
        check_switch("chat", chat)
        check_switch("ends", ends)
        check_callback("on_scores", on_scores)
        chats: list[Any] = as_chats(prompts) if chat else _as_texts(prompts)
        rows = read_answers(answers, len(chats), ends)
        encoded = thinking_inputs(chats, self.handles, "off")[0] if chat else text_inputs(chats, self.tokenizers)
        settings = {"adafuse_config": self._scoring_config(), "max_batch_size": max_batch_size}
        with planning() as plans:
            self.output(encoded, **settings, max_new_tokens=1, do_sample=False)
        return score_call(plans[0], rows, ends, on_scores)

    def _scoring_config(self) -> AdaFuseConfig:
        """What of the settings says what a word is and how much each member counts."""
        _, config = self.model._adafuse_arguments({}) or (None, AdaFuseConfig())
        sharpness = config.prompt_sharpness if isinstance(config.model_weights, str) else 1.0
        return AdaFuseConfig(
            max_word_tokens=config.max_word_tokens,
            word_boundary=config.word_boundary,
            model_weights=config.model_weights,
            prompt_sharpness=sharpness,
        )

    def encode(self, prompts: Any, chat: bool = False) -> Mapping[str, Any]:
        """
        Prompts in every member's own ids.

        Args:
            prompts (`str` or `list`): as of [`~AdaFuseEnsemble.generate`].
            chat (`bool`, *optional*, defaults to `False`): whether each member reads the prompts in its own chat
                template.

        Returns:
            `BatchEncoding`: `input_ids` and `attention_mask` of shape `(batch_size, sequence_length)` for the main
            model, and `assistant_inputs`, a list of the same for each assistant.
        """
        check_switch("chat", chat)
        return self._encode(prompts, chat, self.tokenizers)

    @functools.cached_property
    def handles(self) -> list[ModelHandle]:
        """The members as a call holds them: checked, each with its name, vocabulary and device."""
        return resolve_handles(self.model, self.model._adafuse_bound)

    def _check_settings(
        self, chats: Sequence[Any], members: Sequence[ModelHandle], kwargs: Mapping[str, Any], variables: Any
    ) -> None:
        """Raises what a call that cannot be made raises, before members think. Nothing is run."""
        if self.model._adafuse_arguments(kwargs, kwargs.get("generation_config")) is None:
            return
        made = self._placed(thinking_inputs(chats, members, "off", template_kwargs=variables)[0])
        with planning(), torch.random.fork_rng(devices=()):
            self.model.generate(**{**made, **kwargs, "streamer": None})  # a streamer would be told the prompt

    def _members_of(self, kwargs: Mapping[str, Any]) -> list[ModelHandle]:
        """The members that a call of `generate()` is made with: it may name others."""
        generation_config = kwargs.get("generation_config")
        given = [kwargs.get(name) for name in ("assistant_models", "assistant_tokenizers", "tokenizer")]
        if all(one is None for one in (*given, getattr(generation_config, "assistant_models", None))):
            return self.handles
        found = member_handles(self.model, kwargs, generation_config, self.tokenizers[0])
        return self.handles if found is None else found

    def _setting_of(self, kwargs: Mapping[str, Any], name: str) -> Any:
        """A setting of a call: its argument, or that of its generation config, or of the model's own."""
        configs = (kwargs.get("generation_config"), self.model.generation_config)
        given = [kwargs.get(name), *(getattr(one, name, None) for one in configs)]
        return next((value for value in given if value is not None), None)

    def _sampling_of(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `generate()` by which members draw their thoughts in a call: as they draw words."""
        generation_config = kwargs.get("generation_config")
        asked = requested_sampling(kwargs, generation_config, self.model.generation_config)
        arguments = self.model._adafuse_arguments(kwargs, generation_config)
        samples = asked.do_sample if arguments is None else asked.under(arguments[1])
        return {"do_sample": True, **asked.settings} if samples and not asked.is_greedy else {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "handles"}  # found again from the rest

    def _encode(self, prompts: Any, chat: bool, tokenizers: Sequence[Any]) -> Mapping[str, Any]:
        made = chat_inputs(as_chats(prompts), tokenizers) if chat else text_inputs(_as_texts(prompts), tokenizers)
        return self._placed(made)

    def _placed(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Encoded prompts on the main model's device; each assistant's go to its own when they are read."""
        placed: Mapping[str, Any] = BatchEncoding(dict(inputs)).to(device_of(self.model))
        return placed


def _after(finish: Callable[[int, Any], None], on_answer: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """`on_answer`, told rounds that are finished."""

    def tell(row: int, rounds: Any) -> Any:
        finish(row, rounds)
        return on_answer(row, rounds)

    return tell


def _check_encoded(inputs: Mapping[Any, Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `ValueError` where encoded prompts are none."""
    if not {"inputs", "input_ids", "inputs_embeds"}.intersection([*inputs, *kwargs]):
        raise ValueError(
            f"`inputs` must be prompts, or have their `input_ids`, but has {list(inputs)}. Pass texts, or what "
            "`encode()` returns."
        )


def as_chats(prompts: Any) -> list[Any]:
    """
    Prompts as conversations: a text is a user's message.

    Args:
        prompts (`str` or `list`): a text, a conversation (a list of messages), or a list of these.

    Raises:
        ValueError: anything else.
    """
    if isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], Mapping):
        prompts = [prompts]
    chats = [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in _as_list(prompts)]
    for chat in chats:
        if not isinstance(chat, (list, tuple)):
            raise ValueError(f"`prompts` must be texts or conversations, but hold {chat!r}. Pass a list of messages.")
        for message in chat:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                raise ValueError(
                    f"`prompts` must be of messages with a `role`, but hold {message!r}. "
                    'A message is {"role": ..., "content": ...}.'
                )
            if not isinstance(message.get("tool_calls"), (list, tuple, type(None))):
                raise ValueError(
                    f"`tool_calls` of a message must be a list, but is {message['tool_calls']!r}. Put the calls in one."
                )
    return chats


def _as_texts(prompts: Any) -> list[str]:
    texts = _as_list(prompts)
    for one in texts:
        if not isinstance(one, str):
            parts = one if isinstance(one, (list, tuple)) else [one]
            is_chat = any(isinstance(part, Mapping) for part in parts)
            advice = "Pass `chat=True`." if is_chat else "Pass texts."
            raise ValueError(f"`prompts` must be texts, but hold {one!r}. {advice}")
    return texts


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    # A column of a dataset or of a table is a sequence, too.
    is_sequence = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")
    is_sequence = is_sequence and not isinstance(prompts, (Mapping, bytes)) and not hasattr(prompts, "columns")
    is_sequence = is_sequence and getattr(prompts, "ndim", 1) > 0  # one value of an array has no length
    if not is_sequence or not len(prompts):
        raise ValueError(f"`prompts` must be a text or a list of texts, but is {prompts!r}. Pass texts.")
    return list(prompts)


def names_of(members: Sequence[Any]) -> list[str]:
    """The names of those members that are given by name."""
    models = [member[0] if isinstance(member, (tuple, list)) else member for member in members]
    return [os.fspath(model) for model in models if isinstance(model, (str, os.PathLike))]


def check_members(members: Any) -> None:
    """Raises `ValueError` where they are no list of at least one, or one is neither a model, nor the name of one, nor
    one of these with a tokenizer."""
    if isinstance(members, str) or not isinstance(members, Sequence) or not members:
        raise ValueError(f"`members` must be a list of at least one model, but is {members!r}. Put them in a list.")
    for index, member in enumerate(members):
        is_pair = isinstance(member, (tuple, list))
        model = member[0] if is_pair and len(member) == 2 else member
        # A tuple in a pair is a model with the name of an adapter.
        kinds = (str, os.PathLike, torch.nn.Module, ServedModel, AdaptedModel, *((tuple,) if is_pair else ()))
        if (is_pair and len(member) != 2) or not isinstance(model, kinds):
            shown = f"of {len(member)} parts" if is_pair and len(member) != 2 else repr(model)
            raise ValueError(
                f"`members[{index}]` must be a model, its Hub name, a folder or a server, or a pair of one of these "
                f"and a tokenizer, but is {shown}. Write `model` or `(model, tokenizer)`."
            )


def _pair(index: int, member: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """A member's model and tokenizer, loaded."""
    model, tokenizer = member if isinstance(member, (tuple, list)) else (member, None)
    argument, trusted = f"members[{index}]", options.get("trust_remote_code")
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer), argument, trusted)
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
    return model, find_tokenizer(model, argument, trusted) if tokenizer is None else tokenizer
