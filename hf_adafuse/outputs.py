"""What a call returns: the output, its rounds and its counts. Values only; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass(frozen=True)
class AdaFuseCandidate:
    """
    One candidate of a round.

    Attributes:
        text (`str`): the span, leading whitespace and all; empty when the text just ends.
        words (`list[str]`): the words of it, as its first proposer walked them; joined they give `text`.
        ends (`bool`): whether the sequence ends after it.
        proposers (`list[int]`): the members that proposed it (0: the main model), in order; empty where the method
            wrote it itself (a fused answer).
        nlls (`list[float]`): its NLL under each member, in nats per token (or byte); `None`: not scored.
        score (`float`): the fused score (with method `words` of all its words, each as a whole, while the winner is
            found from word to word), infinite when the candidate is forbidden or was dropped; minus infinity for a
            fused answer, which is taken before all others.
        lossy (`list[int]`): the members whose tokenizer cannot represent the text, which score what it gives instead.
        dropped (`str`): why the candidate left the pool; `None` when it did not.
        decided_by (`list[float]`): the quantities by which it was compared with the others, which the round's
            `criterion` names (see the example of [`AdaFuseRound`]): one, or, where candidates are compared word by
            word, one for each of its words until it lost; empty where it was not compared.
        note (`str`): what else decided about it, like `"it is blank, and not all members want that"`; `None` for
            nothing.
        features (`list[float]`): the numbers by which a method that selects answers has judged it, as
            `hf_adafuse.confidence.features` describes them; `None` among them: not known. Empty for other methods.
        ratings (`list[float]`): each member's rating of the answer, from 1 to the method's `max_score`; `None` of a
            member that gives none. Empty for methods in which members do not rate.
    """

    text: str
    words: list[str]
    ends: bool
    proposers: list[int]
    nlls: list[float | None]
    score: float
    lossy: list[int] = field(default_factory=list)
    dropped: str | None = None
    decided_by: list[float] = field(default_factory=list)
    note: str | None = None
    features: list[float | None] = field(default_factory=list)
    ratings: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class AdaFuseRound:
    """
    One round of one prompt.

    Two of five candidates in the first round of the demo's pair after "What is the capital of Peru?", with the preset
    `robust`:

        text        decided_by  note  score  nlls
        " Lima"     [0.210]     None  1.562  [0.373, 0.710]
        " Nairobi"  [0.112]     None  2.191  [7.251, 0.221]

    Here `criterion` is `"root mean probability"` and `highest_wins` is `True`: `" Lima"` wins, for it has the highest
    value in `decided_by`. That value is exp(-`score`), as the candidates have one word. With method `adafuse`
    `criterion` is `"fused NLL"` and `highest_wins` is `False`: then `decided_by` is `[score]`, and the lowest wins.

    Attributes:
        text (`str`): what was committed; shorter than the winner's text where generation stopped inside it.
        words (`list[str]`): the words committed; joined they give `text`.
        ends (`bool`): whether an end-of-sequence token was committed after the text.
        proposer (`int`): the first member that proposed it; `None` where the method wrote it itself.
        winner (`int`): the index of the winner in `candidates`, or `None` when every candidate was forbidden and the
            main model's greedy word was taken.
        candidates (`list[AdaFuseCandidate]`): in the order in which ties are broken.
        margins (`list[list[float]]`): per member, the margins it read at the starts of its words.
        num_tokens (`int`): the main model's tokens committed, the end-of-sequence token included.
        is_whole (`bool`): whether the winner was committed to its end.
        weights (`list[float]`): how much each member counted, as shares of 1.
        criterion (`str`): the quantity by which the winner was found: `"fused NLL"`, `"root mean probability"`.
        highest_wins (`bool`): whether the highest value of it wins, else the lowest.
        confidences (`list[float]`): per word committed, the weighted mean of the members' probabilities of the word,
            from 0 to 1; `None` of a word that no member has scored. Where tokens are fused, of the token.
        confidence (`float`): of a whole answer whose method is calibrated, the probability that it is right; else
            `None`.
    """

    text: str
    words: list[str]
    ends: bool
    proposer: int | None
    winner: int | None
    candidates: list[AdaFuseCandidate]
    margins: list[list[float]]
    num_tokens: int
    is_whole: bool
    weights: list[float] = field(default_factory=list)
    criterion: str = "fused NLL"
    highest_wins: bool = False
    confidences: list[float | None] = field(default_factory=list)
    confidence: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The round as plain JSON values."""
        return asdict(self)


@dataclass
class AdaFuseOutput(GenerateDecoderOnlyOutput):
    """
    The output of AdaFuse decoding with `return_dict_in_generate=True`.

    Args:
        sequences (`torch.LongTensor` of shape `(batch_size, sequence_length)`):
            The main model's ids: the prompt as given, then what was generated, padded on the right.
        scores (`tuple(torch.FloatTensor)`, *optional*, returned when `output_scores=True`):
            Processed logits of the main model, one `(batch_size, vocab_size)` per new token.
        logits (`tuple(torch.FloatTensor)`, *optional*, returned when `output_logits=True`):
            Unprocessed logits, likewise.
        cache (`AdaFuseCache`, *optional*), called `past_key_values` before transformers 5.24:
            The main model's cache of `sequences[:, :-1]`, with which a later call goes on as one longer call would (but
            for methods that read words anew, `unite`, `deepen` and `safe`, where the text was cut inside a word, and
            for `safe` where it was cut inside a draft); it
            carries the assistants' caches too. Where the main model keeps no keys it holds ids alone: a later AdaFuse
            call takes it, but reads the text again. `None` with `use_cache=False`, and where the model's `forward`
            takes no such argument (RWKV, GPT-1; Mamba before 5.24): then a later call reads the text anew for the
            assistants too.
        rounds (`AdaFuseRoundsBatch`): per prompt, its rounds; lists that print as text and, in a notebook, as a table.
        stats (`dict`): `rounds` (over all prompts), `words_per_round` (mean), `shares` (of rounds by number of words),
            and `members`: per member `name`, `forward_passes`, `tokens_run`, `proposals`, `wins`; what a method counts
            beside these, its class says.
        confidence (`list[float]`): per prompt, how sure the members are of the text, from 0 to 1: the product of
            the `confidences` of its n words to the power of 1 / root of n. This is a score. Only of a calibrated method
            it is the probability that the answer is right. `None` of a text whose words have no confidences.
    """

    rounds: Sequence[Sequence[AdaFuseRound]] | None = None
    stats: dict[str, Any] | None = None
    confidence: Sequence[float | None] | None = None


def cut_words(words: list[str], text: str) -> list[str]:
    """The words of the beginning `text` of a span of these words."""
    kept: list[str] = []
    rest = text
    for word in words:
        if not rest.startswith(word):
            break
        kept.append(word)
        rest = rest[len(word) :]
    return [*kept, rest] if rest else kept


def count_words(rounds: Sequence[Sequence[AdaFuseRound]]) -> dict[str, Any]:
    """The part of `stats` that the rounds tell."""
    sizes = [len(committed.words) + committed.ends for prompt in rounds for committed in prompt]
    return {
        "rounds": len(sizes),
        "words_per_round": sum(sizes) / len(sizes) if sizes else 0.0,
        "shares": {size: sizes.count(size) / len(sizes) for size in sorted(set(sizes))},
    }
