"""Decides four things: which nodes a pass computes beside those that are needed; which member's pass is next; how many
rounds are proposed ahead; whether members propose side by side. The functions take numbers and opaque nodes. They
change costs, never a result: a node that nobody asks for is computed in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .pass_costs import PassCosts


class Policy:
    """The constants for a CPU. Each is the best of several values by the command beside it, on two CPU cores in
    float32."""

    # A pass takes likely nodes along up to a size that costs at most this many times what it costs anyway, and up to
    # this many tokens. Useful ones, which a round has named, come along whenever the pass is of several tokens.
    # hf-adafuse bench --parameters 80M --prompt-tokens 20 --batch 1 --against greedy
    worthwhile_ratio = 1.8
    prefetched_tokens = 8
    # Longest draft from n-gram lookup: at most `longest_draft` tokens are proposed by repeating what followed the same
    # n-gram earlier, and only by n-grams of a length by which at least the share `least_right` of the guesses was
    # right. The same command, with a pair of models that agree little: --model A --assistant B.
    longest_draft = 4
    least_right = 0.5
    # With a prompt alone nodes are prefetched, and rounds are proposed ahead, until its tree holds `most_held_nodes`,
    # or one node for every `tokens_per_held_node` tokens of its prefix, whichever is more. More nodes would enlarge
    # the cache, which the KV column of the same command shows.
    most_held_nodes = 14
    tokens_per_held_node = 12
    # In a batch each prompt may have this many nodes more than it needs. hf-adafuse bench --parameters 80M --batch 8
    batch_extra = 1
    # Where shorter rows are filled up, a pass costs by the token from here on. A prompt has this many at least, and as
    # many as half of the prompts that wait need: whole answers are read in few passes.
    padded_pass_tokens = 32
    padded_width = 4
    # With more columns than this each prompt has a row of the cache of its own: more costs attention to other prompts'.
    # hf-adafuse bench --parameters 80M --prompt-tokens 20,500 --batch 8,16
    # (Tried: attention by the prompt over tokens packed in one row, which needs no fillers: 0.96 to 1.18 of the time
    # with 8 and 16 prompts of 20 to 600 tokens, since many small products take as long as few large ones.)
    most_shared_columns = 3072
    # A pass over prompts reads this many tokens at most: the activations of more would take more memory than the keys
    # and values of long prompts.
    # python tests/measure_memory.py MODEL MODEL --data FILE --prompt-tokens 980 --new-tokens 20
    most_prompt_tokens = 2**11
    # A compiled model is run with few shapes: this many columns, or 2, 4, 8 ... times as many; where filled up, 1, 2,
    # 4 ... tokens in each row. hf-adafuse bench --compile --batch 4
    least_static_columns = 128
    is_filled_up = False
    # What prompts begin with is read once for all where that saves this many tokens: a pass more costs about as much.
    # hf-adafuse bench --parameters 80M --prompt-tokens 20 --batch 8
    least_shared_tokens = 64
    # A member goes on while more than this share of the waiting prompts waits for it. Each counts by this power of the
    # tokens that it has left to do. hf-adafuse bench --batch 8,16
    keeping_share = 0.4
    urgency_power = 2
    # The most rounds that the first member proposes ahead.
    max_rounds_ahead = 2
    # How many passes a member takes to propose, and the share of its proposals that another member has proposed before
    # it in the same round. Both are means over the traces of the README's pair of models.
    passes_to_propose = 2.0
    agreement = 0.5


class AcceleratorPolicy(Policy):
    """The constants for a device on which a pass of 32 tokens costs as much as one of a single token: there the number
    of passes counts. No accelerator was at hand. The values were found by counting passes on CPU, with such costs
    assumed."""

    prefetched_tokens = 32
    longest_draft = 8
    least_right = 0.25
    most_held_nodes = 64
    batch_extra = 4
    padded_pass_tokens = 2**30  # no bound
    is_filled_up = True


POLICIES: dict[str, type[Policy]] = {"cpu": Policy}


def policy_for(device: torch.device) -> type[Policy]:
    """The constants for a device."""
    return POLICIES.get(device.type, AcceleratorPolicy)


@dataclass(frozen=True)
class PromptNeeds:
    """
    The nodes of one prompt that a pass could compute.

    Args:
        needed (`list`): the nodes that somebody waits for, each once.
        useful (`list`, *optional*): nodes that a round has named, for example the ends of candidates. They come along
            wherever the pass may have more nodes than it needs.
        likely (`Callable`, *optional*): guesses which nodes the member will be asked for next, n-gram drafts among
            them. It is called only where there is room for them.
        num_held (`int`, *optional*): how many nodes the prompt's tree holds already.
        prefix_length (`int`, *optional*): how many tokens the prompt's prefix has.
    """

    needed: list[Any]
    useful: Iterable[Any] = ()
    likely: Callable[[], Iterable[Any]] = tuple
    num_held: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class PassLimits:
    """
    The limits of a backend.

    Args:
        policy (`type[Policy]`): the constants for its device.
        can_prefetch (`bool`, *optional*, defaults to `True`): whether more nodes than needed can cost little.
        is_padded (`bool`, *optional*, defaults to `False`): whether prompts with fewer nodes are filled up to the one
            with most.
    """

    policy: type[Policy]
    can_prefetch: bool = True
    is_padded: bool = False


def plan_pass(needs: Mapping[int, PromptNeeds], costs: PassCosts, limits: PassLimits) -> dict[int, list[Any]]:
    """
    The nodes of one pass.

    Args:
        needs (`dict[int, PromptNeeds]`): by the index of each prompt that is not finished, the nodes that it needs.
        costs (`PassCosts`): how long passes of the model take.
        limits (`PassLimits`): what the backend can do.

    Returns:
        per prompt, the nodes to run: first what is needed, not all of it where that is more than a pass should hold.
    """
    is_alone = len(needs) == 1
    policy = limits.policy
    most = None
    if limits.is_padded:
        lengths = sorted(len(prompt.needed) for prompt in needs.values() if prompt.needed) or [0]
        of_half = lengths[(len(lengths) - 1) // 2]
        most = max(policy.padded_width, policy.padded_pass_tokens // len(needs), of_half)
    planned = {prompt_index: prompt.needed[:most] for prompt_index, prompt in needs.items()}
    longest = max(map(len, planned.values()))
    for prompt_index, prompt in needs.items():
        needed = planned[prompt_index]
        width = _width(longest if limits.is_padded else len(needed), len(needs), costs, limits)
        room = room_in_tree(prompt.num_held, prompt.prefix_length, policy) if is_alone else width
        if width and room > len(needed):
            likely = list(prompt.likely())[: width - len(needed)] if width > len(needed) else []
            planned[prompt_index] = _each_once([*needed, *prompt.useful, *likely])[:room]
    return planned


def _width(num_needed: int, num_prompts: int, costs: PassCosts, limits: PassLimits) -> int:
    """How many nodes each prompt may have; 0 where there shall be none but those needed."""
    policy = limits.policy
    if not limits.can_prefetch:
        return 0
    if num_prompts == 1:
        width = max(num_needed, worthwhile_size(num_needed, costs, policy))
        return width if width > 1 else 0
    extra = 0 if limits.is_padded else policy.batch_extra
    return max(num_needed + extra, policy.prefetched_tokens // num_prompts)


def worthwhile_size(num_needed: int, costs: PassCosts, policy: type[Policy]) -> int:
    """The size to which a pass of this many tokens is worth filling up: `prefetched_tokens` at most."""
    bound = policy.worthwhile_ratio * costs.seconds(num_needed)
    sizes = range(num_needed, policy.prefetched_tokens + 1)
    return max((size for size in sizes if costs.seconds(size) <= bound), default=num_needed)


def room_in_tree(num_held: int, prefix_length: int, policy: type[Policy]) -> int:
    """How many more nodes that nobody needs yet the tree of a single prompt may hold; negative where it holds too
    many."""
    return max(policy.most_held_nodes, prefix_length // policy.tokens_per_held_node) - num_held


def urgency(num_left: int | None, policy: type[Policy]) -> int:
    """The weight of a prompt with this many tokens left, where that is known. A batch lasts as long as its longest
    prompt."""
    return 1 if num_left is None else max(1, num_left) ** policy.urgency_power


def next_member(waiting: list[int], current: int, keeping_share: float) -> int:
    """The member whose pass is next, given the weights of the prompts that wait for each: `current` while more than
    `keeping_share` of them waits for it, else the most wanted."""
    if waiting[current] > keeping_share * sum(waiting):
        return current
    return waiting.index(max(waiting))


def pays_ahead(win_probability: float, turn_cost: float, saved: float) -> bool:
    """
    Whether the member that goes first should propose one more round ahead.

    Args:
        win_probability (`float`): the probability that each round up to it takes that member's best candidate.
        turn_cost (`float`): the seconds of its turn: lost when they do not.
        saved (`float`): the seconds in which the other members read what it proposes: saved when they do.
    """
    return win_probability * saved - (1 - win_probability) * turn_cost > 0


def pays_side_by_side(seconds: Sequence[Sequence[float]], policy: type[Policy]) -> bool:
    """
    Whether members should propose at the same time, instead of each after it has scored what the others propose.

    Side by side nobody waits to propose, but each reads what the others propose in a pass of its own, also where it
    would have proposed the same; one after another it is scored with the pass that begins its own proposal.

    Args:
        seconds (`list[list[float]]`): per device, how long a pass of one token takes each member there, in the order
            of their turns. Members on one device work one after another.
        policy (`type[Policy]`): the constants for the device of the member that goes first.
    """
    # In turn, the first member proposes. Each later one scores what is there, and proposes only where it disagrees.
    # Then all but the last score in one more pass what came after their turn.
    # Side by side, each proposes and then scores. One device does its members' work in sequence: the slowest counts.
    proposing = policy.passes_to_propose
    scoring = 1.0
    in_order = [one for of_device in seconds for one in of_device]
    later = scoring + (1 - policy.agreement) * proposing
    in_turn = proposing * in_order[0] + later * sum(in_order[1:]) + scoring * sum(in_order[:-1])
    together = (proposing + scoring) * max(map(sum, seconds))
    return together < in_turn


def _each_once(nodes: Iterable[Any]) -> list[Any]:
    return list({id(node): node for node in nodes}.values())
