"""PairRM (LLM-Blender, arXiv 2306.02561): an encoder that reads a prompt and two answers and says which one is better.
The method `blender` calls it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model, DebertaV2PreTrainedModel, PreTrainedConfig

SOURCE, FIRST, SECOND = "<|source|>", "<|candidate1|>", "<|candidate2|>"
# The most tokens of the prompt and of each answer, where a checkpoint does not say.
SOURCE_MAXLENGTH, CANDIDATE_MAXLENGTH = 1224, 412


class PairScorer(DebertaV2PreTrainedModel):
    """
    DeBERTa and a head on three of its last states, those at the markers of the prompt and of both answers. Its names
    and sizes are those of the checkpoints.

    Args:
        config (`DebertaV2Config`): with `n_tasks`, how many logits the head gives.
    """

    base_model_prefix = "pretrained_model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.pretrained_model = DebertaV2Model(config)
        size = config.hidden_size
        # The identities stand where dropout is in training: parameters are named by their place.
        layers = [nn.Identity(), nn.Linear(2 * size, size), nn.Tanh(), nn.Identity(), nn.Linear(size, config.n_tasks)]
        self.head_layer = nn.Sequential(*layers)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, markers: torch.Tensor) -> torch.Tensor:
        """
        By how much the first answer is better.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): without padding.
            markers (`torch.LongTensor` of shape `(3,)`): the places of the three markers, the same in every row.

        Returns:
            `torch.FloatTensor` of shape `(batch_size,)`: logits, the mean over tasks.
        """
        states = self.pretrained_model(input_ids=input_ids).last_hidden_state
        source, first, second = states[:, markers].unbind(1)
        better = self.head_layer(torch.cat([source, first], -1)) - self.head_layer(torch.cat([source, second], -1))
        return better.mean(-1)  # type: ignore[no-any-return]


class PairRanker:
    """
    Compares answers to a prompt in pairs.

    Args:
        model (`PairScorer`), tokenizer (`PreTrainedTokenizerBase`): the ranker of LLM-Blender.
        source_maxlength (`int`), candidate_maxlength (`int`): the most tokens of the prompt, and of each answer; what a
            prompt leaves of its own goes to the two answers.
    """

    def __init__(self, model: Any, tokenizer: Any, source_maxlength: int, candidate_maxlength: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._source_maxlength = source_maxlength
        self._total_maxlength = source_maxlength + 2 * candidate_maxlength
        self._ids = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in (SOURCE, FIRST, SECOND)}

    @torch.no_grad()
    def __call__(self, source: str, candidates: Sequence[str]) -> list[list[float]]:
        """
        Each answer against each other one, both ways round: N (N - 1) passes.

        Args:
            source (`str`): the prompt.
            candidates (`list[str]`): the answers.

        Returns:
            `list[list[float]]` of shape `(N, N)`: logits; above 0 where the row's answer, read first, is the better
            one. 0 on the diagonal.

        Raises:
            RuntimeError: a logit is no number.
        """
        head = self._encode(SOURCE, source, self._source_maxlength)
        room = (self._total_maxlength - len(head)) // 2
        bodies = [self._encode(FIRST, candidate, room) for candidate in candidates]
        table = [[0.0] * len(bodies) for _ in bodies]
        for i, j in itertools.combinations(range(len(bodies)), 2):
            table[i][j] = self._logit(head, bodies[i], bodies[j])
            table[j][i] = self._logit(head, bodies[j], bodies[i])
        return table

    def _encode(self, marker: str, text: str, max_length: int) -> list[int]:
        """`[CLS] marker text [SEP]`. What is spelled like a marker in a text is not one."""
        for token in (self._tokenizer.sep_token, *self._ids):
            text = text.replace(token, " ")
        return list(self._tokenizer(marker + text, max_length=max_length, truncation=True)["input_ids"])

    def _logit(self, head: list[int], first: list[int], second: list[int]) -> float:
        markers = [head.index(self._ids[SOURCE]), len(head) + first.index(self._ids[FIRST])]
        markers.append(len(head) + len(first) + second.index(self._ids[FIRST]))
        ids = [*head, *first, *second]
        ids[markers[2]] = self._ids[SECOND]
        device = self._model.device
        logit = float(self._model(torch.tensor([ids], device=device), torch.tensor(markers, device=device)))
        if logit != logit:
            raise RuntimeError("The logits of a ranker must be numbers, but one is NaN. Check its weights.")
        return logit


@functools.cache
def load_pair_ranker(name: str, device: torch.device) -> PairRanker:
    """
    A PairRM by its name, loaded once per process.

    Two layouts are known, by their `config.json`: that of the authors' own code (`llm-blender/PairRM`: `ranker_type`;
    the encoder's config is that of another model, `model_name`), and that of transformers (`llm-blender/PairRM-hf`: one
    config for all). Their weights have the same names.

    Args:
        name (`str`): a Hub name or a folder.
        device (`torch.device`): where it runs.

    Raises:
        ValueError: it does not load, or is no PairRM.
    """
    try:
        values, _ = PreTrainedConfig.get_config_dict(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.add_tokens([SOURCE, FIRST, SECOND])  # those that it has stay as they are
        config = _encoder_config(values, len(tokenizer))
        model, info = PairScorer.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it has no {sorted(info['missing_keys'])[0]!r}")
    except Exception as error:  # files can be broken in many ways
        raise ValueError(
            f'`ranker` must be "nll", or the Hub name or a folder of a PairRM, but {name!r} does not load '
            f"({type(error).__name__}: {error}). Check the name."
        ) from error
    limits = values.get("source_maxlength", SOURCE_MAXLENGTH), values.get("candidate_maxlength", CANDIDATE_MAXLENGTH)
    return PairRanker(model.eval().to(device), tokenizer, *limits)


def _encoder_config(values: Mapping[str, Any], num_tokens: int) -> Any:
    """The config of the encoder and its head, by either layout."""
    if values.get("ranker_type") == "pairranker":
        config = DebertaV2Config.from_pretrained(values["model_name"])
        config.vocab_size = num_tokens  # the markers were added to the encoder's own
    elif "DebertaV2PairRM" in (values.get("architectures") or []):
        config = DebertaV2Config.from_dict(dict(values))
    else:
        raise ValueError(
            'its config.json has neither `"ranker_type": "pairranker"` nor `"architectures": ["DebertaV2PairRM"]`'
        )
    if config.vocab_size < num_tokens:
        raise ValueError(f"its tokenizer has {num_tokens} tokens, its model {config.vocab_size}")
    config.n_tasks = values.get("n_tasks", 1)
    return config
