"""`ServedModel`: stands in for a loaded model where the model is behind a server.

It is a transformers model without weights. So `generate()`, pipelines and the commands take it like any other. Its
`forward` cannot be called: log-probabilities come from the server.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from .daemon_threads import map_at_once
from .kinds import APIS, is_served_name
from .queries import GreedyStep, Query
from .transport import Connection, RetryPolicy

# Texts of which a server is asked for the log-probabilities at a time.
_TEXTS_AT_A_TIME = 8

# A model that is worth a server is larger than those beside it: it goes last, where nobody says how large it is.
_UNKNOWN_SIZE = 7_000_000_000


class ServedConfig(PreTrainedConfig):
    """The config of a model behind a server, as far as it is known."""

    model_type = "adafuse_served"
    num_hidden_layers = 1  # `generate()` makes a cache by it, which stays empty


class ServedModel(PreTrainedModel, GenerationMixin):
    """
    A model behind a server, as the main model or an assistant.

    Args:
        url (`str`): the server's address, like `http://localhost:8000`.
        kind (`str`, *optional*, defaults to `"vllm"`): the program that serves: `"vllm"`, `"sglang"` or `"llamacpp"`.
        model (`str`, *optional*): the model's name at the server. By default the model that it serves.
        tokenizer (`PreTrainedTokenizerBase` or `str`, *optional*): the model's tokenizer, or its Hub name or folder. By
            default the one of the name from which the server loaded the model. The generation config beside it counts,
            as for a model in this process.
        eos_token_id (`int` or `list[int]`, *optional*): the ids that end a text. By default those of the generation
            config.
        trust_remote_code (`bool`, *optional*, defaults to `False`): whether the code of the repository may run that
            `tokenizer` names. Code of the repository that the server names is never run.
        api_key_env (`str`, *optional*): the environment variable that holds the key. The key itself is kept nowhere.
        allow_http (`bool`, *optional*, defaults to `False`): whether a server on another host may be asked without
            encryption.
        timeout (`float`, *optional*, defaults to 60): in seconds. An attempt has failed when no byte has come for this
            long.
        deadline (`float`, *optional*, defaults to 300): in seconds. A request has failed when all its attempts have
            taken this long, while the server was away or busy.
        retries (`int`, *optional*, defaults to 5): how often a request is repeated after an answer that cannot be
            right, or after a first question without an answer.
        num_parameters (`int`, *optional*): the number of the model's parameters. Members propose in the order of their
            sizes.
        num_steps (`int`, *optional*, defaults to 4): how many tokens a greedy walk asks for in its first requests. A
            larger number saves requests, a smaller one saves tokens that nobody needs. A walk of twice as many tokens
            asks for twice as many at a time.
        most_difference (`float`, *optional*, defaults to 0.05): in nats. The server's log-probabilities may differ by
            this much between requests of different shapes before a warning says so. When it has been away, they may
            differ by twice as much, but at most 1 nat, or by twice what it was found to differ from itself; beyond that
            it is taken for another model.

    Raises:
        ValueError: an argument cannot be used.
        ServerError: the server does not answer.
        ImportError: httpx is not installed.
    """

    config_class = ServedConfig
    main_input_name = "input_ids"
    generation_config: Any

    def __init__(
        self,
        url: str,
        kind: str = "vllm",
        model: str | None = None,
        tokenizer: Any = None,
        api_key_env: str | None = None,
        allow_http: bool = False,
        timeout: float = 60.0,
        deadline: float = 300.0,
        retries: int = 5,
        num_parameters: int | None = None,
        num_steps: int = 4,
        most_difference: float = 0.05,
        eos_token_id: int | Sequence[int] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if not isinstance(kind, str) or kind not in APIS:
            raise ValueError(f"`kind` must be one of {list(APIS)}, but is {kind!r}. Choose the server's.")
        for name, value in {"num_steps": num_steps, "num_parameters": num_parameters}.items():
            is_left_out = value is None and name == "num_parameters"
            if not is_left_out and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be a whole number of at least 1, but is {value!r}. Leave it out.")
        for name, value in {"allow_http": allow_http, "trust_remote_code": trust_remote_code}.items():
            if not isinstance(value, bool):
                raise ValueError(f"`{name}` must be True or False, but is {value!r}. Choose one.")
        _check(tokenizer, most_difference, eos_token_id)
        connection = Connection(url, api_key_env, RetryPolicy(timeout, deadline, retries), allow_http)
        api = APIS[kind](connection, model)
        about = api.about()
        api.model = about.model
        trust_remote_code = trust_remote_code and isinstance(tokenizer, (str, os.PathLike))
        source = about.source if tokenizer is None else _source(tokenizer, about.source)
        tokenizer = _tokenizer(tokenizer, about.source, trust_remote_code)
        _check_ids(eos_token_id, len(tokenizer))
        # The last token that a text may have must leave room for the one that is asked for.
        length = None if about.max_length is None else about.max_length - 1
        eos = tokenizer.eos_token_id
        super().__init__(
            ServedConfig(
                vocab_size=len(tokenizer), max_position_embeddings=length, eos_token_id=eos, is_decoder=True,
                bos_token_id=tokenizer.bos_token_id, pad_token_id=tokenizer.pad_token_id,
                name_or_path=f"{kind}:{connection.url}#{about.model}",
            )
        )  # fmt: skip
        self.api = api
        self.tokenizer = tokenizer
        self._num_parameters = num_parameters or _UNKNOWN_SIZE
        self.num_steps = num_steps
        self.most_difference = most_difference
        self._take_generation_config(source, eos_token_id, trust_remote_code)
        self.register_buffer("_adafuse_here", torch.empty(0, device="cpu"), persistent=False)

    @property
    def device(self) -> torch.device:
        """The CPU: its ids are kept here."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def _take_generation_config(
        self, source: str | None, eos_token_id: int | Sequence[int] | None, trust_remote_code: bool
    ) -> None:
        """The one beside the weights, where it is at hand, as a model here has it; with what a server cannot do in it,
        the model is refused as the main one. What it does not name is the tokenizer's."""
        found = None if source is None else _generation_config(source, trust_remote_code)
        if found is None and eos_token_id is None:
            warnings.warn(
                f"No generation config of {self.config.name_or_path} is at hand: its texts end with "
                f"{self.tokenizer.eos_token!r} only. Pass `eos_token_id` if with other tokens too.",
                UserWarning,
                stacklevel=3,
            )
        found = found or GenerationConfig()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(found, name) is None:
                setattr(found, name, getattr(self.generation_config, name))
        if eos_token_id is not None:
            found.eos_token_id = eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id)
        self.generation_config = found

    def ask(self, queries: Sequence[Query], num_top: int) -> list[list[GreedyStep]]:
        """The steps that answer each query; see [`ServerApi.ask`]. Where the server has been away, it must still be the
        same one."""
        found = self.api.ask(queries, num_top)
        self.api.check_same()
        return found

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Per text, the log-probability (nats) of each id but the first; several are asked for at a time."""
        read, texts = self.api.prompt_log_probs, [[int(token) for token in ids] for ids in prompts]
        found = map_at_once(lambda ids: read(ids) if len(ids) > 1 else [], texts, _TEXTS_AT_A_TIME)
        self.api.check_same()
        return found

    def room(self, num_ids: int) -> int:
        """The number of tokens that fit into the model's context after a text of this length."""
        most = self.config.max_position_embeddings
        return sys.maxsize if most is None else most + 1 - num_ids

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters of the model behind the server, as given to the constructor."""
        return self._num_parameters

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Raises an error: there is no model here to call."""
        raise NotImplementedError(
            "A model behind a server cannot be called. Pass it to `generate()` as a member, or use `AdaFuseEnsemble`."
        )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error: there are no weights here to save."""
        raise ValueError("The model must have its weights here to be saved, but is behind a server. Save its URL.")

    @classmethod
    def from_name(cls, name: str, **options: Any) -> ServedModel:
        """
        The model of a name `kind:url` or `kind:url#model`, as commands and `assistant_models` take it.

        Raises:
            ValueError: it is no such text.
        """
        if not is_served_name(name):
            raise ValueError(f"`name` must be like vllm:http://localhost:8000#model, but is {name!r}. Correct it.")
        kind, _, rest = name.partition(":")
        url, _, model = rest.partition("#")
        return cls(url, kind, model or None, **options)


def _check(tokenizer: Any, most_difference: Any, eos_token_id: Any) -> None:
    """Raises `ValueError` for arguments that no server is asked about."""
    is_one = callable(tokenizer) and not isinstance(tokenizer, type)
    if tokenizer is not None and not isinstance(tokenizer, (str, os.PathLike)) and not is_one:
        raise ValueError(
            f"`tokenizer` must be a tokenizer, its Hub name or a folder, but is {tokenizer!r}. Load the model's."
        )
    is_number = isinstance(most_difference, (int, float)) and not isinstance(most_difference, bool)
    if not is_number or not most_difference >= 0:
        raise ValueError(f"`most_difference` must be at least 0 nats, but is {most_difference!r}. Leave it out.")
    _check_ids(eos_token_id, sys.maxsize)


def _check_ids(eos_token_id: Any, num_tokens: int) -> None:
    """Raises `ValueError` where there are others than ids of a vocabulary of this size."""
    ids = eos_token_id if isinstance(eos_token_id, (list, tuple)) else [eos_token_id]
    is_id = eos_token_id is None or all(type(token) is int and 0 <= token < num_tokens for token in ids)
    if not is_id or not ids:
        raise ValueError(
            "`eos_token_id` must be a token's id or a list of them, as the tokenizer has them, but is "
            f"{eos_token_id!r}. Correct it."
        )


def _source(tokenizer: Any, at_the_server: str) -> str | None:
    """From where a tokenizer was loaded, beside which the generation config is; else the folder that the server names,
    if it is also here. Not a name that the server may have from anywhere."""
    own = tokenizer if isinstance(tokenizer, (str, os.PathLike)) else getattr(tokenizer, "name_or_path", "")
    if own:
        return os.fspath(own)
    return at_the_server if os.path.isdir(at_the_server) else None


def _generation_config(source: str, trust_remote_code: bool) -> GenerationConfig | None:
    """As `from_pretrained` of a model finds it: a file of its own, or what the model's config says."""
    try:
        return GenerationConfig.from_pretrained(source)
    except (OSError, ValueError):
        pass
    try:
        return GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        )
    except (OSError, ValueError, KeyError):
        return None


def _tokenizer(given: Any, at_the_server: str, trust_remote_code: bool) -> Any:
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    name = at_the_server if given is None else os.fspath(given)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        found, advice = f"{name!r} does not load", "Check the name."
        if given is None:
            found = f"is None, and none loads from the server's name of the model, {name!r}"
            advice = (
                "Name the tokenizer (`--served-tokenizer` on the command line): code of a repository that the server "
                "names is not run."
            )
        raise ValueError(
            f"`tokenizer` must be the tokenizer of the served model, its Hub name or a folder, but {found} "
            f"({type(error).__name__}: {error}). {advice}"
        ) from error
