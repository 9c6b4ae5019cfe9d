"""The ensemble as a function of batches, for what cuts data into them: Ray Data, `datasets`, Spark. Must not know any
of these, nor how an answer is decoded: a batch is a dict of columns or a DataFrame.

```python
# Ray Data: one ensemble per actor
settings = dict(members=["A", "B"], adafuse_config="robust", template="Question: {question}\\nAnswer:")
actors = ray.data.ActorPoolStrategy(size=4)
ds.map_batches(AdaFusePredictor, fn_constructor_kwargs=settings, batch_size=16, num_gpus=1, compute=actors)

# datasets
dataset.map(AdaFusePredictor(["A", "B"]), batched=True, batch_size=16)

# Spark: loaded by the workers, once per partition, not by the driver
schema = "prompt string, text string, words long, finish_reason string, error string"
df.mapInPandas(AdaFusePredictor(["A", "B"], lazy=True).map_in_pandas, schema)
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .call.answering import BATCHES_A_CALL, Answer, answer_each
from .call.batch_columns import column_names, column_values, with_columns
from .config import AdaFuseConfig
from .decoding.strategies.registry import make_strategy
from .decoding.strategies.strategy import check_switch
from .ensemble import AdaFuseEnsemble, check_members, names_of
from .members.structured import read_structured
from .members.templates import PromptTemplate
from .members.thoughts import check_chat_arguments
from .trees.shared_prefix import KeptPrefixes, prefix_caching

# What is added after the text, with its types; and what all of them are of an answer.
_ADDED = {"words": "int64", "finish_reason": "str", "error": "str"}
_SOURCES = ("text", "num_words", "finish_reason", "reason")


class AdaFusePredictor:
    """
    An ensemble that answers batches.

    ```python
    >>> from hf_adafuse import AdaFusePredictor
    >>> from hf_adafuse.demo import load_pair

    >>> predictor = AdaFusePredictor(load_pair(), template="Question: {question}\\nAnswer:")
    >>> batch = predictor({"id": [7], "question": ["What is the capital of Peru?"]})
    >>> batch["text"], batch["words"], batch["finish_reason"], batch["error"]
    ([' Lima'], [1], ['stop'], [''])

    ```

    The predictor adds four columns to a batch, with the same types in every batch:

    - the text, without the stop text that ended it,
    - `words`: how many words were generated,
    - `finish_reason`: `"stop"`, `"length"` or `"error"`,
    - `error`: why there is no answer. It is empty where there is one.

    Greedy texts do not depend on how prompts are cut into batches. In half precision they may.

    The beginning that the prompts of all batches share is read once, so the models must not be changed between batches.
    A pickled predictor takes along its arguments, and not the models that it has loaded. A copy loads models that were
    given by name again, at its first batch.

    Args:
        members (`list`): the members, as of [`AdaFuseEnsemble`]. Give names, so that each process loads its own.
        adafuse_config (`AdaFuseConfig`, `dict` or `str`, *optional*): the settings, as of `generate()`.
        prompt_column (`str`, *optional*, defaults to `"prompt"`): the column that holds the prompts.
        template (`str`, *optional*): makes the prompt of any columns, and takes the place of `prompt_column`:
            `"Question: {question}\\nAnswer:"`.
        chat (`bool`, *optional*, defaults to `False`): whether a prompt is a user's message, in each member's own chat
            template.
        thinking (`str`, *optional*), max_thinking_tokens (`int`, *optional*): for chats, which members think before an
            answer, and how much, as of [`~AdaFuseEnsemble.generate`].
        output_column (`str`, *optional*, defaults to `"text"`): the column that gets the texts.
        max_new_tokens (`int`, *optional*, defaults to 128): the most tokens of an answer, in the main model's tokens.
        stop (`str` or `list[str]`, *optional*): texts to stop after.
        structured (`dict`, *optional*): the form that the texts must have, as of `generate()`.
        seed (`int`, *optional*, defaults to 0): where words are sampled, a text follows from the seed and its prompt.
        batch_size (`int`, *optional*, defaults to 16): the most prompts that are decoded at a time. Longer batches are
            cut.
        on_error (`str`, *optional*, defaults to `"record"`): `"record"`: a prompt that cannot be answered gets an
            `error` and the text until there, and the others of its batch go on. A job that is resumed does not ask it
            again. `"raise"`: the batch fails.
        lazy (`bool`, *optional*, defaults to `False`): whether the members are loaded at the first batch, not now.
        options: as of [`AdaFuseEnsemble`]. By default members that are given by name are on the GPU where there is one.

    Raises:
        ValueError: an argument cannot be used (nothing has been loaded then), a member does not load, or the members do
            not go together.
    """

    def __init__(
        self,
        members: Sequence[Any],
        adafuse_config: AdaFuseConfig | Mapping[str, Any] | str | None = None,
        *,
        prompt_column: str = "prompt",
        template: str | None = None,
        chat: bool = False,
        thinking: str | None = None,
        max_thinking_tokens: int | None = None,
        output_column: str = "text",
        max_new_tokens: int = 128,
        stop: str | Sequence[str] | None = None,
        structured: Mapping[str, Any] | None = None,
        seed: int = 0,
        batch_size: int = 16,
        on_error: str = "record",
        lazy: bool = False,
        **options: Any,
    ) -> None:
        check_members(members)
        check_switch("chat", chat)
        check_switch("lazy", lazy)
        _check_number("max_new_tokens", max_new_tokens, 1)
        _check_number("batch_size", batch_size, 1)
        _check_number("seed", seed, 0)
        for name, column in [("prompt_column", prompt_column), ("output_column", output_column)]:
            if not isinstance(column, str) or not column:
                raise ValueError(f"`{name}` must be the name of a column, but is {column!r}. Give its name.")
        if not (isinstance(on_error, str) and on_error in ("record", "raise")):
            raise ValueError(f'`on_error` must be "record" or "raise", but is {on_error!r}. Choose one of the two.')
        self._members = list(members)
        self._config = _checked(adafuse_config)
        self._options = options
        self._template = PromptTemplate.of_field(prompt_column) if template is None else PromptTemplate(template)
        self._added = {output_column: "str", **_ADDED}
        if output_column in (*_ADDED, *self._template.fields):
            raise ValueError(
                f"`output_column` must be a new column, but is {output_column!r}. Choose a name that is not taken."
            )
        read_structured(structured)
        check_chat_arguments(chat, thinking, max_thinking_tokens)
        self._call: dict[str, Any] = {"chat": chat, "thinking": thinking, "max_thinking_tokens": max_thinking_tokens}
        self._call |= {"max_new_tokens": max_new_tokens, "stop_strings": _stops(stop)}
        self._call |= {"structured": structured, "do_sample": False}
        self._seed = seed
        self._batch_size = batch_size
        self._raises = on_error == "raise"
        self._loaded: AdaFuseEnsemble | None = None
        self._prefixes = KeptPrefixes()
        if not lazy:
            self.load()

    def load(self) -> AdaFuseEnsemble:
        """The ensemble of the members, which are loaded where that has not been done."""
        if self._loaded is None:
            placed = {"device_map": "cuda"} if torch.cuda.is_available() and names_of(self._members) else {}
            ensemble = AdaFuseEnsemble(self._members, self._config, **{**placed, **self._options})
            if self._call["chat"]:
                ensemble.encode(["?"], chat=True)  # a template that is missing is found before the first prompt
            self._loaded = ensemble
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None, "_prefixes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _prefixes=KeptPrefixes())

    def __call__(self, batch: Any) -> Any:
        """
        A batch with its answers.

        Args:
            batch (`dict` or `pandas.DataFrame`): columns by name; in a dict lists or numpy arrays.

        Returns:
            a new one of the same kind: all of its columns, and those of the answers.

        Raises:
            ValueError: a column is missing or taken; with `on_error="raise"`, a prompt that cannot be answered.
            AdaFuseDecodingError: with `on_error="raise"`, a member that failed.
        """
        self._check_columns(column_names(batch))
        answers = self._answers(list(self._prompts(batch)))
        sources = zip(self._added, _SOURCES, strict=True)
        values = {name: [getattr(one, of) for one in answers] for name, of in sources}
        return with_columns(batch, values, self._added)

    def map_in_pandas(self, frames: Iterable[Any]) -> Iterator[Any]:
        """
        The frames with the columns of the answers, for Spark's `mapInPandas`. Its schema names the columns of the
        frames and those of the answers.

        Args:
            frames (`Iterator[pandas.DataFrame]`): batches of prompts.
        """
        return map(self, frames)

    def _check_columns(self, have: Sequence[Any]) -> None:
        problems = [f"have {name!r}" for name in self._template.fields if name not in have]
        problems += [f"have {name!r} once" for name in self._template.fields if list(have).count(name) > 1]
        problems += [f"not have {name!r}" for name in self._added if name in have]
        if problems:
            raise ValueError(
                f"The columns of a batch must {problems[0]}, but are: {', '.join(map(str, have)) or 'none'}. Rename "
                "one, or name others in `prompt_column`, `template` or `output_column`."
            )

    def _prompts(self, batch: Any) -> Iterator[str | ValueError]:
        """The prompts of the rows; of a row that makes none, the error."""
        columns = {name: column_values(batch[name]) for name in self._template.fields}
        for row in zip(*columns.values(), strict=True):
            try:
                yield self._template.fill(dict(zip(columns, row, strict=True)))
            except ValueError as error:
                if self._raises:
                    raise
                yield error

    def _answers(self, prompts: Sequence[str | ValueError]) -> list[Answer]:
        """What became of each prompt. One that comes more than once is asked once: what is sampled, too, follows from
        the seed and the prompt alone."""
        asked = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        made: dict[str, Answer] = {}
        self.load()  # here, where no failure is one of a prompt
        with prefix_caching(self._prefixes), torch.random.fork_rng(devices=[]):
            size = BATCHES_A_CALL * self._batch_size
            for start in range(0, len(asked), size):
                some = asked[start : start + size]
                tell = lambda prompt, rounds: made.update({prompt: Answer.of(rounds, self._call["stop_strings"])})  # noqa: E731
                for prompt, error in answer_each(some, self._ask, tell):
                    if self._raises:
                        raise error
                    made[prompt] = Answer.of(error)
        return [made[prompt] if isinstance(prompt, str) else Answer.of(prompt) for prompt in prompts]

    def _ask(self, prompts: Sequence[str], on_answer: Callable[[int, Any], None]) -> None:
        torch.manual_seed(self._seed)
        self.load().rounds(prompts, max_batch_size=self._batch_size, on_answer=on_answer, **self._call)


def _checked(adafuse_config: Any) -> AdaFuseConfig | None:
    if adafuse_config is False:
        raise ValueError("`adafuse_config` must not be False, but is. Leave it out for the defaults.")
    config = AdaFuseConfig.coerce(adafuse_config)
    if config is not None:
        make_strategy(config)  # a method that there is not is found here
    return config


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r}. Give one.")


def _stops(stop: Any) -> list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stops, (list, tuple)) and bool(stops)
    if stops is not None and not (is_list and all(isinstance(text, str) and text for text in stops)):
        raise ValueError(
            f"`stop` must be a text or a list of texts, none empty, but is {stop!r}. Leave it out for none."
        )
    return None if stops is None else list(stops)
