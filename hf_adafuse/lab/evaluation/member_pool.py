"""`MemberPool`: members that are loaded once, and asked batches of prompts alone or as any ensemble of them.

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
from ...ensemble import AdaFuseEnsemble
from ...members.vocabulary import vocabulary_of
from .candidates import Contestant


@dataclass(frozen=True)
class GenerationArgs:
    """
    How every contestant is asked.

    Args:
        max_new_tokens (`int`, *optional*, defaults to 128): the most new tokens of an answer.
        stop (`list[str]`, *optional*): the stop texts. An answer ends before the first of them.
        chat (`bool`): whether a prompt is a user's message in each member's chat template.
    """

    max_new_tokens: int = 128
    stop: Sequence[str] | None = None
    chat: bool = False


class MemberPool:
    """
    Members that are loaded once.

    Args:
        members (`list[tuple]`): each member's model and tokenizer.
        asking (`GenerationArgs`): how they are asked.

    Raises:
        ValueError: prompts are chats, but a tokenizer has no chat template.
    """

    def __init__(self, members: Sequence[tuple[Any, Any]], asking: GenerationArgs) -> None:
        self._members = list(members)
        self._ensembles: dict[tuple[int, ...], AdaFuseEnsemble] = {}
        self._asking = asking
        if asking.chat:
            self._ensemble(range(len(members))).encode(["?"], chat=True)

    def ask(self, candidate: Contestant, prompts: Sequence[str]) -> list[str]:
        """A contestant's answers to a batch of prompts."""
        ensemble = self._ensemble(candidate.members)
        inputs = ensemble.encode(list(prompts), self._asking.chat)
        length = {"max_new_tokens": self._asking.max_new_tokens, "stop_strings": self._asking.stop or None}
        if candidate.is_alone:
            model = ensemble.model
            tokenizer = ensemble.tokenizers[0]
            # This is the member's ordinary `generate()`, which needs its own cache.
            settings = {"adafuse_config": False, "use_cache": True, "return_dict_in_generate": False}
            made = ensemble.output(inputs, **length, **settings, do_sample=False)
            texts = [_text(row.tolist(), model, tokenizer) for row in made[:, inputs["input_ids"].shape[1] :]]
        else:
            output = ensemble.output(inputs, **length, adafuse_config=candidate.config, do_sample=False)
            texts = ["".join(committed.text for committed in rounds) for rounds in output.rounds]
        return [cut_at(text, self._asking.stop) for text in texts]

    def _ensemble(self, members: Sequence[int]) -> AdaFuseEnsemble:
        key = tuple(members)
        if key not in self._ensembles:
            self._ensembles[key] = AdaFuseEnsemble([self._members[member] for member in key])
        return self._ensembles[key]


def _text(new: list[int], model: Any, tokenizer: Any) -> str:
    """The text of new ids, decoded as a continuation, up to the end of the sequence. Padding follows that."""
    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    length = next((at for at, token in enumerate(new) if token in ends), len(new))
    return vocabulary_of(tokenizer).text(new[:length])
