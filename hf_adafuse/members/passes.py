"""Plans one forward pass of a member: the nodes that are needed, others that are useful, and how the pass is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..trees.backend import Backend
from ..trees.nodes import Node, missing_nodes
from ..trees.pass_costs import PassCosts
from ..trees.pass_policy import PassLimits, PromptNeeds, plan_pass


class Pass(NamedTuple):
    """
    A forward pass that has been planned.

    Attributes:
        work (`Callable`): runs it. For a member behind a server it touches no tree, so that another thread may run it.
        finish (`Callable`): `finish(result)` gives what `work` returned (`result()`) to the nodes, and returns those
            newly read.
    """

    work: Callable[[], Any]
    finish: Callable[[Callable[[], Any]], list[Node]]


def planned_pass(
    backend: Backend,
    costs: PassCosts,
    needs: Mapping[int, tuple[list[Node], list[Node]]],
    likely: Callable[[int, list[Node]], list[Node]],
) -> Pass:
    """
    Plan a pass.

    Args:
        backend (`Backend`): the member's backend.
        costs (`PassCosts`): how long the member's passes take.
        needs (`dict[int, tuple]`): as of [`Member`].begin_pass.
        likely (`Callable`): `likely(prompt_index, needed)` gives the nodes that may come along, given those of the
            prompt that are needed.
    """

    limits = PassLimits(backend.policy, backend.can_prefetch, backend.is_padded)
    prompts = {}
    for prompt_index in backend.active:
        needed, useful = needs.get(prompt_index, ([], []))
        tree = backend.trees[prompt_index]
        prompts[prompt_index] = PromptNeeds(
            needed=needed,
            useful=unread(useful),
            likely=partial(likely, prompt_index, needed),
            num_held=len(tree.unsettled()) if len(backend.active) == 1 else 0,
            prefix_length=tree.root.position,
        )
    planned = plan_pass(prompts, costs, limits)
    nodes = [node for of_prompt in planned.values() for node in of_prompt]
    forward, give_to_nodes = backend.plan(nodes)
    # A model runs the unread tokens before these nodes, too. A server is asked about no more than the nodes.
    num_tokens = len(missing_nodes(nodes)) if backend.can_prefetch else len(nodes)

    def work() -> Any:
        with costs.measured(num_tokens):
            return forward()

    return Pass(work, lambda result: give_to_nodes(result()))


def unread(nodes: Iterable[Node]) -> list[Node]:
    """The unread nodes among these, each once."""
    return list({id(node): node for node in nodes if node.logprobs is None}.values())
