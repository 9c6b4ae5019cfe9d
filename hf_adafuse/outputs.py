"""What a call returns: the output, its rounds and its counts, as plain values."""

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
        text (`str`): the text of the span with its leading whitespace, like `" Paris"`. It is empty where the candidate
            only ends the text.
        words (`list[str]`): the words of the text. Joined, they give `text`.
        ends (`bool`): whether the text ends after the candidate.
        proposers (`list[int]`): the numbers of the members that proposed it, in ascending order; 0 is the main model.
            The list is empty where the method wrote the candidate itself (a fused answer).
        nlls (`list[float]`): the candidate's NLL under each member, in nats per token, or per byte with
            `nll_normalization="byte"`. `None` stands for a member that did not score it.
        score (`float`): the method's score of the candidate: the fused score (equation 5) with `adafuse`. With `words`
            it is that of all words of the candidate, while the winner is found word by word. It is infinite where the
            candidate was forbidden or dropped, and minus infinity for a fused answer, which is taken before all others.
        lossy (`list[int]`): the members whose tokenizer cannot represent the text. They score the text that their
            tokens decode to.
        dropped (`str`): why the candidate left the pool. `None`: it did not.
        decided_by (`list[float]`): the numbers by which the candidate was compared with the others; the round's
            `criterion` names the quantity. One number, or with method `words` one for each word until the candidate
            lost. Empty where the candidate was not compared. [`AdaFuseRound`] shows an example.
        note (`str`): another reason that decided, like `"it is blank, and not all members want that"`. `None`: there
            was none.
        features (`list[float]`): the numbers by which a method that selects among answers judged this one, described
            in `hf_adafuse.confidence.features`. `None` stands for a number that is not known. Other methods leave the
            list empty.
        ratings (`list[float]`): each member's rating of the answer, from 1 to the method's `max_score`. `None` stands
            for a member that gave none. Methods without ratings leave the list empty.
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

    ```text
    text        decided_by  note  score  nlls
    " Lima"     [0.210]     None  1.562  [0.373, 0.710]
    " Nairobi"  [0.112]     None  2.191  [7.251, 0.221]
    ```

    Here `criterion` is `"root mean probability"` and `highest_wins` is `True`: `" Lima"` wins, for it has the highest
    value in `decided_by`. That value is exp(-`score`), as the candidates have one word. With method `adafuse`
    `criterion` is `"fused NLL"` and `highest_wins` is `False`: then `decided_by` is `[score]`, and the lowest wins.

    Attributes:
        text (`str`): the text that was committed. It is shorter than the winner's text where generation stopped inside
            it.
        words (`list[str]`): the words of that text. Joined, they give `text`.
        ends (`bool`): whether an end-of-sequence token was committed after the text.
        proposer (`int`): the first member that proposed the winner. `None`: the method wrote the winner itself.
        winner (`int`): the index of the winner in `candidates`. `None`: every candidate was forbidden, and the main
            model's greedy word was committed.
        candidates (`list[AdaFuseCandidate]`): all candidates, in the order in which ties are broken.
        margins (`list[list[float]]`): per member, the margin p(1) - p(2) at the start of each word that it proposed.
        num_tokens (`int`): the number of the main model's tokens that were committed, with the end-of-sequence token.
        is_whole (`bool`): whether the winner was committed to its end.
        weights (`list[float]`): how much each member counted, as shares of 1. Where the main model was certain and the
            others were not asked (`certainty_gate`), its share is 1.
        criterion (`str`): the name of the quantity by which the winner was found, like `"fused NLL"`.
        highest_wins (`bool`): whether the candidate with the highest value of that quantity wins. `False`: the one with
            the lowest.
        confidences (`list[float]`): per committed word, the weighted mean of the members' probabilities of the word,
            from 0 to 1. `None` stands for a word that no member scored. Methods over tokens give one per token.
        confidence (`float`): the probability that a whole answer is right, where the method is calibrated. Else `None`.
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
        """The round as plain JSON values. The score and the NLLs of a candidate that was forbidden may be infinite."""
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
            The main model's cache of `sequences[:, :-1]`. It carries the assistants' caches too. A later call that gets
            it goes on as one longer call would. There are two exceptions: `unite`, `deepen` and `safe` read words anew
            where the text was cut inside a word, and `safe` where it was cut inside a draft. A main model without keys
            gives a cache of ids alone: a later AdaFuse call takes it and reads the text again. It is `None` with
            `use_cache=False`, and where the model's `forward` takes no cache (RWKV, GPT-1; Mamba before 5.24).
        rounds (`AdaFuseRoundsBatch`):
            The rounds of each prompt. They are lists that print as text and show as a table in a notebook.
        stats (`dict`):
            `rounds`: their number over all prompts. `words_per_round`: the mean number of words that they committed,
            where the end of a text counts as a word. `shares`: by such a number, the share of the rounds. `members`:
            per member `name`, `forward_passes`, `tokens_run`, `proposals` and `wins`. The class of a method says what
            the method counts beside these.
        confidence (`list[float]`):
            Per prompt, how sure the members are of the text, from 0 to 1: the product of the `confidences` of its n
            words to the power of 1 / root of n. `None` stands for a text whose words have no confidences. This is a
            score. It is the probability that the answer is right only where the method is calibrated.
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
