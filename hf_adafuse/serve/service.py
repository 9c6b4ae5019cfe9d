"""`Service`: takes a request to its reply, whole or as a stream of chunks.

It plans the calls of a request, puts them into the engine's queue, and waits for their texts. `app` calls it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from ..call.plan import CallPlan
from ..call.planning import UnknownPlanError
from ..members.prompts import assistant_prompts
from ..trees.model_facts import unchanged_models
from .answers import GrowingText
from .calls import Call, CallEvents, as_api_error, make_plan, may_be_at_once, takes_long
from .engine import Engine, QueueFullError
from .ensembles import ServedEnsemble
from .errors import ApiError
from .fairness import FairPool
from .metrics import Metrics
from .replies import (
    Reply,
    ReplyChoice,
    Request,
    head,
    last_chunks,
    num_prompt_tokens,
    opening_chunks,
    text_chunks,
    usage,
    whole_choices,
)
from .requests import ChatRequest, CompletionRequest
from .turns import StoppedError, Turns


class ClientGoneError(Exception):
    """The client does not wait for its reply any more."""


class Service:
    """
    Answers requests with ensembles.

    Args:
        served (`list[ServedEnsemble]`): the ensembles, each with a name of its own.
        engine (`Engine`): decodes the calls. The caller starts and stops it.
        default_tokens (`int`): the most new tokens of a request that names no number.

    Raises:
        ValueError: two ensembles have the same name.
    """

    def __init__(self, served: Sequence[ServedEnsemble], engine: Engine, default_tokens: int = 512) -> None:
        names = [one.name for one in served]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"The names of what is served must differ, but two are {twice!r}. Choose another name.")
        self.served = {one.name: one for one in served}
        self.engine = engine
        self.default_tokens = default_tokens
        self.metrics = Metrics()
        # The identifiers of replies: a name for this run of the server, and a number.
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        for one in served:
            engine.of(one.servers)
        # Requests that are planned soon do not wait for members that think, for compiled grammars, or for servers.
        self._quick = FairPool(1, "hf-adafuse plans")
        self._long = {one: FairPool(engine.max_batch_size, "hf-adafuse thoughts") for one in engine.all}

    def close(self) -> None:
        """Plan no more requests."""
        for planner in (self._quick, *self._long.values()):
            planner.close()

    def find(self, name: str) -> ServedEnsemble:
        """
        The ensemble of a name.

        Raises:
            ApiError: there is none.
        """
        if name not in self.served:
            known = ", ".join(self.served)
            raise ApiError(404, f"`model` must be one of {known}, but is {name[:100]!r}.", "model_not_found", "model")
        return self.served[name]

    async def begin(self, request: Request, client: str = "") -> Reply:
        """
        Make the calls of a request, and put them into the queue.

        Args:
            request (`ChatRequest` or `CompletionRequest`): the request.
            client (`str`): an identifier of the client, like its address. Clients take turns.

        Raises:
            ApiError: the request cannot be honoured, or there is no place in the queue.
        """
        began = time.monotonic()
        served = self.find(request.model)
        is_chat = isinstance(request, ChatRequest)
        prompts: list[Any] = [request] if is_chat else list(request.prompts)  # type: ignore[union-attr]
        number = request.n or 1
        samples = self._samples(request, served)
        seed = request.seed or 0
        if samples and request.seed is None:
            seed = secrets.randbelow(2**31)
        targets: list[tuple[ServedEnsemble, Any, int, list[int]]] = []
        alone: list[tuple[ServedEnsemble, Any, int, list[int]]] = []
        for row, prompt in enumerate(prompts):
            indices = list(range(row * number, (row + 1) * number))
            first = prompts[:row].count(prompt) * number  # each text of equal prompts is a sample of its own
            for k, own in enumerate([[index] for index in indices] if samples else [indices], first):
                targets.append((served, prompt, seed_of(seed, k), own))
            for k, one in enumerate(served.alone if request.options.alone else []):
                alone.append((one, functools.partial(_for_member, served, k, prompt), seed_of(seed, first), indices))
        events = CallEvents(bool(request.stream))
        choices = await self._submit(request, client, [*targets, *alone], samples, events)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{self._name}{next(self._numbers):08x}"
        parts = choices[: len(targets)], choices[len(targets) :]
        return Reply(name, int(time.time()), request, served, *parts, events, began)

    async def whole(self, answer: Reply) -> dict[str, Any]:
        """
        The body of a whole reply.

        Raises:
            ApiError: a call has failed.
        """
        async for _ in self._texts(answer):
            pass
        self._count(answer)
        choices = [one for choice in answer.choices for one in whole_choices(answer, choice)]
        choices.sort(key=lambda one: int(one["index"]))
        return {**head(answer, ""), "choices": choices, "usage": usage(answer)}

    async def chunks(self, answer: Reply) -> AsyncIterator[list[dict[str, Any]]]:
        """
        The chunks of a streamed reply, in lists of those that are ready at the same time.

        Raises:
            ApiError: a call has failed.
        """
        if isinstance(answer.request, ChatRequest):
            yield opening_chunks(answer)
        is_first = True
        async for texts, is_over in self._texts(answer):
            ready = [made for choice, text in texts.items() for made in text_chunks(answer, choice, text)]
            if ready and is_first:
                self.metrics.first_token.add(time.monotonic() - answer.began)
                is_first = False
            if is_over:
                self._count(answer)
                ready += last_chunks(answer)
            if ready:
                yield ready

    async def _texts(self, answer: Reply) -> AsyncIterator[tuple[dict[ReplyChoice, str], bool]]:
        """
        Yields new text by choice, as it comes, and whether it is the last of the reply. The text that comes with the
        end of a choice may be empty.

        Raises:
            ApiError: a call has failed.
        """
        choices = {one.call: one for one in (*answer.choices, *answer.alone)}
        left = len(choices)
        while left:
            texts = dict[ReplyChoice, str]()
            for call, event in await answer.events.next():
                if isinstance(event, Exception):
                    if texts:
                        yield texts, False
                    raise event
                choice = choices[call]
                texts[choice] = texts.get(choice, "") + choice.take(event)
                if event is None:
                    left -= 1
            yield texts, left == 0

    def abandon(self, answer: Reply) -> None:
        """Cancel the calls of a client that is gone."""
        for call in answer.calls:
            if call.rounds is None:
                self.engine.of(call.served.servers).cancel(call)
                answer.events.tell(call, ClientGoneError())

    def _samples(self, request: Request, served: ServedEnsemble) -> bool:
        """Whether tokens are sampled: as the request says, or the settings where it names no temperature."""
        try:
            config = served.settings(request.options.settings, request.options.drawn)
        except ValueError as error:
            raise as_api_error(error) from error
        return request.samples or (request.temperature is None and bool(config.do_sample))

    async def _submit(
        self,
        request: Request,
        client: str,
        targets: Sequence[tuple[ServedEnsemble, Any, int, list[int]]],
        samples: bool,
        events: CallEvents,
    ) -> list[ReplyChoice]:
        most = self.engine.max_batch_size + self.engine.max_waiting
        engines = Counter(self.engine.of(served.servers) for served, *_ in targets)
        if (number := max(engines.values())) > most:
            raise ApiError(
                400,
                f"A request must be of at most {most} texts here, those of `alone` included, but is of {number}. Ask "
                "for less.",
            )
        _reserve(engines, client)
        choices: list[ReplyChoice] = []
        turns = None
        try:
            for served, prompt, seed, indices in targets:
                work = functools.partial(self._plan, served, prompt, request, seed, self.default_tokens)
                plan = None
                if may_be_at_once(served, request, samples):
                    with suppress(UnknownPlanError):
                        plan = work()
                if plan is None:
                    turns = turns or Turns(self.engine)
                    is_long = takes_long(served, request)
                    planner = self._long[self.engine.of(served.servers)] if is_long else self._quick
                    plan = await asyncio.wrap_future(planner.submit(client, functools.partial(work, turns)))
                echo = ""
                if isinstance(request, CompletionRequest) and request.echo and not callable(prompt):
                    echo = prompt if isinstance(prompt, str) else served.ensemble.tokenizers[0].decode(prompt)
                call = Call(plan, served, request.num_top, events, client)
                offer = request.offer if isinstance(request, ChatRequest) else None
                choices.append(ReplyChoice(indices, echo, call, GrowingText(request.stops, served.members, offer)))
        except BaseException:
            if turns is not None:
                turns.cancel()
            _release(engines, client)
            raise
        for choice in choices:
            self.engine.of(choice.call.served.servers).submit(choice.call)
        return choices

    def _plan(self, *arguments: Any) -> CallPlan:
        with unchanged_models(self.engine.facts):
            return make_plan(*arguments)

    def _count(self, answer: Reply) -> None:
        self.metrics.duration.add(time.monotonic() - answer.began)
        self.metrics.prompt_tokens += num_prompt_tokens(answer)
        self.metrics.prompt_tokens += sum(one.call.num_prompt_tokens for one in answer.alone)
        for call in answer.calls:
            self.metrics.tokens += call.num_tokens
            self.metrics.words += sum(len(one.words) for one in call.rounds or [])


def _for_member(served: ServedEnsemble, member_index: int, prompt: Any) -> Any:
    """A prompt of an ensemble for one of its members by itself: ids of the main model are others of another one."""
    if not isinstance(prompt, list) or member_index == 0:
        return prompt
    main, other = served.ensemble.handles[0], served.ensemble.handles[member_index]
    (rows,) = assistant_prompts([main, other], [prompt], None)
    return rows[0]


def _reserve(engines: Counter[Engine], client: str) -> None:
    """Reserve places in the queues of these engines: in each as many as its count, or none in any of them."""
    reserved = Counter[Engine]()
    try:
        for engine, number in engines.items():
            engine.reserve(number, client)
            reserved[engine] = number
    except QueueFullError as error:
        _release(reserved, client)
        wait = str(error.seconds)
        message = f"The server is busy: too many requests wait. Try again in {wait} s."
        raise ApiError(429, message, "queue_full", headers={"Retry-After": wait}) from error
    except StoppedError as error:
        _release(reserved, client)
        raise as_api_error(error) from error


def _release(engines: Counter[Engine], client: str) -> None:
    for engine, number in engines.items():
        engine.release(number, client)


def seed_of(seed: int, number: int) -> int:
    """The seed of a text of a request: the first has the request's own, and none has that of another request."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")
