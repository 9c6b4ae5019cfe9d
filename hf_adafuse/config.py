"""The settings of AdaFuse and their presets, checked once."""

from __future__ import annotations

import json
import numbers
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .settings.config_checks import check, without_use
from .settings.old_fields import with_new_names

# Settings by name. A call that names no settings gets `robust`. It was chosen by the measurements of docs/quality.md.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "robust": {
        "method": "words",
        "method_options": {"mean": "root", "part": "weighted", "allow_blank": False},
        "model_weights": "examples_or_content",
        "prompt_sharpness": 20.0,
        "online_rate": 1.0,
    },
}


@dataclass(frozen=True)
class AdaFuseConfig:
    """
    Settings of adaptive word-level ensemble decoding (AdaFuse, arXiv 2601.06022, section 3).

    `AdaFuseConfig()` is the paper's algorithm with the paper's values. It is not what a call gets that names no
    settings: that is [`AdaFuseConfig.robust`], which keeps the text of good models good.

    To keep settings with a model, save them beside its weights in a fresh generation config. One that transformers has
    derived from the model's config will not do: it drops what it does not know when it is loaded again.

    ```python
    >>> from transformers import GenerationConfig

    >>> GenerationConfig(adafuse_config={"num_branches": 5}).save_pretrained("my-model")
    >>> GenerationConfig.from_pretrained("my-model").adafuse_config
    {'num_branches': 5}

    ```

    Args:
        margin_threshold (`float`, *optional*, defaults to 0.7):
            The paper's tau. A word is confident where its first token has p(1) - p(2) >= tau: the member takes it
            greedily and goes on to the next word. At a word below tau the member tries `num_branches` first tokens, and
            its span ends there. 0 never branches. A value above 1 always does.
        max_words (`int`, *optional*, defaults to 3):
            The paper's M: the most words that one round commits.
        num_branches (`int`, *optional*, defaults to 3):
            The paper's B: how many first tokens are tried at an uncertain word. With 1 the candidate is the greedy one.
        max_word_tokens (`int`, *optional*, defaults to 32):
            A word also ends at this many tokens, but never inside a UTF-8 character.
        word_boundary (`str`, *optional*, defaults to `"whitespace"`):
            Where words end. `"whitespace"`: before whitespace. `"unicode"`: by the word segmentation of UAX #29, for
            Chinese, Japanese and Thai (needs the `unicode` extra).
        model_weights (`list[float]` or `str`, *optional*):
            How much each member counts when candidates are compared, the main model first.

            - `[0.6, 0.4]`: one positive number per member.
            - `None`: all members count alike.
            - `"prompt"`: members count by how well they predict the prompt. The weights are the softmax of
              `-prompt_sharpness` times each member's NLL of the prompt, in nats per byte (PackLLM).
            - `"examples"`: members count by how well they predict the answers in a few-shot prompt. An answer is the
              text that follows, in an earlier line, the words with which the prompt ends (`Answer:`). Without examples
              all members count alike, and in chats, where earlier answers are most often the ensemble's own.
            - `"examples_or_content"`: as `"examples"`. Where the prompt has no examples, members count by how far its
              content moves their next token: the Kullback-Leibler divergence, in nats, of that token's distribution
              from the one behind the prompt without its content. Of a text the first word of each line, and the last
              word, are left. A chat is replaced by a chat whose only message is "...". The weights are
              min(divergence, m) ** (2 m). Here m is the length of the content in bytes, divided by 40, but at least 4
              and at most 8. Where the divergence is not known of a member, as of one behind a server, all members count
              alike.

            A member with nearly all the weight judges the proposals of all members. With `unite`, `gac` and `majority`
            the text is that member's own. With `words` a member that begins with less than a twentieth of the largest
            weight is not asked, and one that is asked alone writes its own text.
        nll_normalization (`str`, *optional*, defaults to `"token"`):
            The unit of the mean NLL. `"token"`: nats per token of the member that scores. `"byte"`: nats per UTF-8 byte
            of the text, where the end of the text counts as one byte.
        commitment (`str`, *optional*, defaults to `"adaptive"`):
            How long spans are. `"adaptive"`: up to the first uncertain word. `"fixed"`: always `max_words` greedy
            words, without margins and branches (the paper's Figure 2).
        exploration (`str`, *optional*, defaults to `"diverse"`):
            How branches are found. `"diverse"`: the likeliest first tokens, each extended greedily. `"beam"`: a
            token-level beam search up to the end of the word (Appendix F).
        prompt_sharpness (`float`, *optional*, defaults to 1.0):
            How strongly weights favour the member that predicts the prompt, or the examples, better. 0: these say
            nothing. It is of no use for weights by the prompt's content.
        online_rate (`float`, *optional*, defaults to 0.0):
            How quickly weights follow each member's NLL of the text so far. After each round the weight of a member is
            multiplied by exp(-`online_rate` times its NLL of the committed text), in nats per byte. 0: never.
        switch_margin (`float`, *optional*, defaults to 0.0):
            In nats. Another candidate replaces the main model's own only where its score is lower by more than this.
            Infinite: the main model's own candidate always wins; with `exploration="beam"` that is not its greedy text.
        certainty_gate (`float`, *optional*):
            A probability. Words whose first token has at least this probability under the main model are committed
            without asking the other members. `None`: the others are always asked.
        do_sample (`bool`, *optional*):
            `True`: each word is drawn from the weighted mixture of the members' word distributions. Then
            `adafuse` and `words` use of the fields above only `max_word_tokens`, `word_boundary`, `model_weights` and
            `prompt_sharpness`. `False`: nothing is drawn.
            `None`: words are drawn where the call of `generate()` asks for `do_sample=True`. A default in the model's
            own generation config does not count.
        method (`str`, *optional*, defaults to `"adafuse"`):
            How the members decode together: AdaFuse, another method of `docs/methods.md`, or one of your own
            ([`register_strategy`]). Each has options of its own. A call refuses fields that its method does not use.
        method_options (`dict`, *optional*):
            The options of the method by name, as its class in `hf_adafuse.decoding.strategies` has them. In a dict of
            settings they stand beside the fields: `{"method": "unite", "top_k": 10}`.

    Raises:
        ValueError: a field is out of its range, or of no use with the others.
    """

    margin_threshold: float = 0.7
    max_words: int = 3
    num_branches: int = 3
    max_word_tokens: int = 32
    word_boundary: str = "whitespace"
    model_weights: tuple[float, ...] | str | None = None
    nll_normalization: str = "token"
    commitment: str = "adaptive"
    exploration: str = "diverse"
    prompt_sharpness: float = 1.0
    online_rate: float = 0.0
    switch_margin: float = 0.0
    certainty_gate: float | None = None
    do_sample: bool | None = None
    method: str = "adafuse"
    method_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        values = {one.name: _pythons_own(getattr(self, one.name)) for one in fields(self)}
        options, weights = values["method_options"], values["model_weights"]
        if options is None or isinstance(options, Mapping):
            values["method_options"] = {name: _pythons_own(value) for name, value in (options or {}).items()}
        if hasattr(weights, "__iter__") and not isinstance(weights, (str, bytes, Mapping)):
            values["model_weights"] = tuple(map(_pythons_own, weights))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        check(self)
        if isinstance(self.model_weights, tuple):
            object.__setattr__(self, "model_weights", tuple(float(weight) for weight in self.model_weights))

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, the method's options beside them."""
        values: dict[str, Any] = _plain(asdict(self))
        values |= values.pop("method_options")
        return values

    @classmethod
    def robust(cls) -> AdaFuseConfig:
        """
        The recommended settings. On few-shot tasks their text came nearest to that of the better member, whichever
        member is the main model. `adafuse_config="robust"`, `adafuse_config=True` and no `adafuse_config` mean the
        same.

        The method is `words`: candidates are compared word by word, by the root mean of the members' probabilities. A
        member counts by how well it predicts the examples in the prompt, or without examples by what it makes of the
        prompt's content (see `model_weights`), and less by how well it predicts the text so far. The more one weight
        outgrows the others, the more of a word is judged by the tokens that tell the candidates apart. A word that ends
        the text at once wins only where every member with at least half of the largest weight finds it likeliest.
        """
        return cls(**PRESETS["robust"])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], base: AdaFuseConfig | None = None) -> AdaFuseConfig:
        """
        Settings as people write them, in a dict, a file or a request: `{"preset": "robust", "num_branches": 1}`. This
        also reads what `to_dict` gives, and fields of earlier versions (`fusion`, `word_mean`, `word_part`,
        `empty_text`) with a `FutureWarning` that says what to write instead.

        Args:
            values (`dict`): fields, and options of the method. They change the preset that stands beside them as
                `preset`.
            base (`AdaFuseConfig`, *optional*): the settings that they change where they name no preset. The paper's
                values by default.

        Raises:
            ValueError: a field is out of its range, there is no such preset, field or option, or they do not go
                together.
        """
        values = _as_dict(values)
        name = values.get("preset")
        named = {field: value for field, value in values.items() if field != "preset"}
        if name is None:
            return cls._of(with_new_names(named)) if base is None else base.changed(named)
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(
                f"`preset` must be one of {list(PRESETS)}, but is {name!r}. Check the spelling. 'mixed' is gone: "
                "take 'robust'."
            )
        return cls(**PRESETS[name]).changed(named)

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> AdaFuseConfig:
        """The settings in a dict that holds fields and options of the method side by side."""
        known = [one.name for one in fields(cls)]
        given = {name: value for name, value in values.items() if name in known}
        options = {name: value for name, value in values.items() if name not in known}
        beside = given.get("method_options")
        if options and (beside is None or isinstance(beside, Mapping)):  # else it is refused
            given["method_options"] = {**(beside or {}), **options}
        return cls(**given)

    def changed(self, values: Mapping[str, Any]) -> AdaFuseConfig:
        """
        These settings with some fields changed.

        Args:
            values (`dict`): the new fields and options, as [`AdaFuseConfig.from_dict`] reads them, without `preset`.
                Fields that have no use beside them become the defaults. Where `values` names another method, all other
                fields and options become the defaults.

        Raises:
            ValueError: as of [`AdaFuseConfig.from_dict`].
        """
        values = _as_dict(values)
        named = with_new_names(values, self.method)
        is_other, is_old = named.get("method", self.method) != self.method, "fusion" in values
        if is_other and not is_old:
            return self._of(named)
        base = self.to_dict()
        if isinstance(named.get("method_options"), Mapping):
            named |= named.pop("method_options")
        if is_old:  # an earlier field, which changes how candidates are compared, and leaves the other fields
            gone = self.method_options if is_other else {"horizon"}
            base = {name: value for name, value in base.items() if name not in gone}
        changed = {**base, **named}
        dropped = without_use(changed, {one.name: one.default for one in fields(self)}).keys() - values.keys()
        return self._of({name: value for name, value in changed.items() if name not in dropped})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> tuple[AdaFuseConfig, list[str]]:
        """
        Settings in a file in JSON, and the members that they were fitted to.

        Args:
            path (`str`): a file that `hf-adafuse fit` wrote, or one with a JSON object of fields, which may name a
                `preset`.

        Returns:
            the settings, and the members' names, the main model's first. The list is empty where the file names none.

        Raises:
            ValueError: it cannot be read, or holds no settings.
        """
        rule = "`adafuse_config` must be a file in JSON that holds settings"
        if not isinstance(path, (str, os.PathLike)):
            raise ValueError(f"{rule}, but is {path!r}. Give its name.")
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{rule}, but {os.fspath(path)!r} cannot be read: {error}. Check its name, and correct it."
            ) from None
        settings = found.get("adafuse_config", found) if isinstance(found, Mapping) else None
        if not isinstance(settings, Mapping):
            raise ValueError(f"{rule}, but {os.fspath(path)!r} has no JSON object of them. Write one.")
        members = found.get("members")
        if members is not None and not (isinstance(members, list) and all(isinstance(one, str) for one in members)):
            raise ValueError(
                f"`members` must be a list of names in the file {os.fspath(path)!r}, but is {members!r}. Put each name "
                "in the list, or leave it out."
            )
        return cls.from_dict(settings), members or []

    @classmethod
    def coerce(
        cls, value: AdaFuseConfig | Mapping[str, Any] | str | os.PathLike[str] | bool | None
    ) -> AdaFuseConfig | None:
        """
        The settings that a value of the argument `adafuse_config` means.

        Args:
            value (`AdaFuseConfig`, `dict`, `str`, `bool` or `None`): `None` and `False` give `None`. `True` gives the
                recommended preset `robust`. The name of a preset gives that preset, and the name of a JSON file what
                the file holds ([`~AdaFuseConfig.from_file`]). A dict holds fields, over those of the preset that it
                names (`{"preset": "robust", "num_branches": 1}`), or else over the paper's values.
        """
        if value is None or isinstance(value, bool):
            return cls.robust() if value else None
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, str) and value in PRESETS:
            return cls(**PRESETS[value])
        if is_file(value):
            config, members = cls.from_file(value)  # type: ignore[arg-type]
            if len(members) == 1:
                warnings.warn(
                    f"{os.fspath(value)!r} is for {members[0]!r} alone: the main model answers alone. "  # type: ignore[arg-type]
                    "Make that one the main model.",
                    UserWarning,
                    stacklevel=3,
                )
            return config
        raise ValueError(
            f"`adafuse_config` must be an AdaFuseConfig, a dict, one of {list(PRESETS)}, a file like 'adafuse.json', "
            f"True or False, but is {value!r}. Pass True for the recommended preset."
        )


def is_file(value: Any) -> bool:
    """Whether settings are given by the name of a file in JSON."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json"))


def _as_dict(values: Any) -> dict[Any, Any]:
    """Settings by name, with Python's own numbers. Raises `ValueError` where they are no dict."""
    if not isinstance(values, Mapping):
        raise ValueError(
            f"`adafuse_config` must be a dict of fields and options, but is {values!r}. Name each of them, like "
            '{"num_branches": 1}.'
        )
    return {name: _pythons_own(value) for name, value in values.items()}


def _pythons_own(value: Any) -> Any:
    """A number of another library's types, like numpy's and torch's, as Python's own, and an array as a list. Anything
    else stays as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _plain(value: Any) -> Any:
    """A value of the types that JSON knows, where it is of subclasses of these, like numpy's."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    kind = next((one for one in (bool, int, float, str) if isinstance(value, one)), None)
    return value if kind is None else kind(value)
