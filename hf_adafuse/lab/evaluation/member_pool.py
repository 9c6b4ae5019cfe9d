"""The members, loaded once: any of them alone, or any ensemble of them, asked a batch of prompts. Writes no file.

```python
>>> from hf_adafuse.demo import load_pair
>>> from hf_adafuse.lab.evaluation.member_pool import GenerationArgs, MemberPool
>>> from hf_adafuse.lab.evaluation.candidates import Contestant

>>> pool = MemberPool(load_pair(), GenerationArgs(max_new_tokens=16))
>>> prompt = "Question: What is the capital of Peru?\\nAnswer:"
>>> pool.ask(Contestant((1,)), [prompt]), pool.ask(Contestant((1, 0), "words", {"method": "words"}), [prompt])
([' Nairobi'], [' Lima'])

```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...call.answering import cut_at
from ...generation import enable_adafuse
from ...members.chat import chat_inputs
from ...members.prompt_inputs import text_inputs
from ...members.vocabulary import vocabulary_of
from ...transformers_compat import execution_device
from .candidates import Contestant


@dataclass(frozen=True)
class GenerationArgs:
    """
    How every candidate is asked.

    Args:
        max_new_tokens (`int`): per answer.
        stop (`list[str]`, *optional*): an answer ends before the first of these texts.
        chat (`bool`): whether a prompt is a user's message in each member's chat template.
    """

    max_new_tokens: int = 128
    stop: Sequence[str] | None = None
    chat: bool = False


class MemberPool:
    """
    The members.

    Args:
        members (`list[tuple]`): each a model and its tokenizer; the models' class is AdaFuse's from here on.
        asking (`GenerationArgs`): how they are asked.

    Raises:
        ValueError: a chat, but a tokenizer without a template.
    """

    def __init__(self, members: Sequence[tuple[Any, Any]], asking: GenerationArgs) -> None:
        self._members = [(enable_adafuse(model), tokenizer) for model, tokenizer in members]
        self._asking = asking
        if asking.chat:
            self._inputs(["?"], [tokenizer for _, tokenizer in members])

    def ask(self, candidate: Contestant, prompts: Sequence[str]) -> list[str]:
        """The texts that a candidate answers a batch of prompts with."""
        taking = [self._members[member] for member in candidate.members]
        (model, tokenizer), *assistants = taking
        inputs = self._inputs(prompts, [tokenizer for _, tokenizer in taking])
        padding = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None]
        options: dict[str, Any] = {"adafuse_config": False}
        if not candidate.is_alone:
            options = {
                "assistant_models": [assistant for assistant, _ in assistants],
                "assistant_tokenizers": [other for _, other in assistants],
                "adafuse_config": candidate.config,
                "return_dict_in_generate": True,
            }
        made = model.generate(
            **inputs.to(execution_device(model)),
            tokenizer=tokenizer,
            max_new_tokens=self._asking.max_new_tokens,
            stop_strings=self._asking.stop or None,
            do_sample=False,
            pad_token_id=padding[0] if padding else None,
            **options,
        )
        if candidate.is_alone:
            texts = [_text(row.tolist(), model, tokenizer) for row in made[:, inputs["input_ids"].shape[1] :]]
        else:
            texts = ["".join(committed.text for committed in rounds) for rounds in made.rounds]
        return [cut_at(text, self._asking.stop) for text in texts]

    def _inputs(self, prompts: Sequence[str], tokenizers: Sequence[Any]) -> Any:
        """For the main model and, where there are some, for the assistants."""
        if not self._asking.chat:
            inputs = text_inputs(prompts, tokenizers)
        else:
            inputs = chat_inputs([[{"role": "user", "content": prompt}] for prompt in prompts], tokenizers)
        if len(tokenizers) == 1:
            del inputs["assistant_inputs"]
        return inputs


def _text(new: list[int], model: Any, tokenizer: Any) -> str:
    """The new ids as a continuation, up to an end of sequence, behind which there is padding."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    length = next((at for at, token in enumerate(new) if token in ends), len(new))
    return vocabulary_of(tokenizer).text(new[:length])
