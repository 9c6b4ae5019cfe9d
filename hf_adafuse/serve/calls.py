"""Plans the calls of `generate()` of a request, and passes on their text as it comes. `service` calls it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import logging

from ..call.answering import reason_of
from ..call.plan import CallPlan
from ..call.planning import planning
from ..config import AdaFuseConfig
from ..decoding.progress import AdaFuseDecodingError, Prompt
from ..members.structured import UnenforcedKeywordsError
from ..members.thinking import thinking_format
from ..members.thoughts import thinking_at
from ..members.tools import with_tools
from ..servers.queries import ServerError, server_error
from .ensembles import ServedEnsemble, without_paths
from .errors import ApiError
from .jobs import Job
from .requests import ChatRequest, CompletionRequest
from .turns import StoppedError, Turns, too_long

# A request of more characters is planned beside others: some tokenizers take seconds for a word of this length.
MANY_CHARACTERS = 20_000
# A request of more characters is never planned in the event loop, where everybody would wait for its tokenizers.
FEW_CHARACTERS = 4_000

logger = logging.get_logger(__name__)

# torch has one generator for all threads.
_GENERATOR = threading.Lock()


class Seeded:
    """
    Within this context torch's random generator begins with a seed, and no other thread seeds it. Afterwards the
    generator is as before.

    Args:
        seed (`int`): the seed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> Seeded:
        _GENERATOR.acquire()
        self._before = _generator_state()
        torch.manual_seed(self._seed)
        return self

    def __exit__(self, *error: object) -> None:
        _set_generator(self._before)
        _GENERATOR.release()

    def hold(self) -> None:
        """Let other threads use the generator."""
        self._own = _generator_state()
        self.__exit__()

    def resume(self) -> None:
        """Take the generator back in the state in which `hold` left it."""
        _GENERATOR.acquire()
        self._before = _generator_state()
        _set_generator(self._own)


def _generator_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_generator(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


@dataclass
class TokenLogProb:
    """
    A committed token of the main model, with its log-probability.

    Args:
        data (`bytes`): the token's bytes.
        log_prob (`float`): its log-probability under the main model, in nats.
        top (`list[tuple[bytes, float]]`): the most likely tokens in its place, each with its log-probability.
    """

    data: bytes
    log_prob: float
    top: list[tuple[bytes, float]] = field(default_factory=list)


class CallEvents:
    """
    The queue by which the engine's thread tells an asyncio loop what happens to the calls of one reply.

    Args:
        with_rounds (`bool`): whether rounds are told as they come. Otherwise only the end of each call is told.
    """

    def __init__(self, with_rounds: bool) -> None:
        self.with_rounds = with_rounds
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[Call, Any]] = asyncio.Queue()

    def tell(self, call: Call, event: Any) -> None:
        """
        Put an event into the queue. May be called in any thread.

        Args:
            call (`Call`): the call to which it has happened.
            event: a list of new rounds, an empty list where the text begins anew, `None` at the end of the text, or the
                error by which the call ends.
        """
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (call, event))
        except RuntimeError:  # the loop is closed: nobody listens
            call.is_cancelled = True

    async def next(self) -> list[tuple[Call, Any]]:
        """Wait for an event. Returns all that have come."""
        events = [await self._queue.get()]
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events


class Call(Job):
    """
    A call whose rounds reach an asyncio loop after the pass in which they are committed.

    Args:
        plan (`CallPlan`): the plan of one prompt.
        served (`ServedEnsemble`): the ensemble that is called.
        num_top (`int`, *optional*): how many likely tokens are kept beside each committed one. `None`: no
            log-probabilities are kept at all.
        events (`CallEvents`): the queue that hears what happens.
        client (`str`): an identifier of the client that waits, like its address.

    Attributes:
        rounds (`AdaFuseRounds`): the rounds of the text, once it has ended; `None` before.
        log_probs (`list[TokenLogProb]`): the committed tokens so far, where log-probabilities are kept.
        num_tokens (`int`): how many tokens the main model's thoughts and the text have, once it has ended; 0 before.
    """

    def __init__(
        self, plan: CallPlan, served: ServedEnsemble, num_top: int | None, events: CallEvents, client: str = ""
    ) -> None:
        super().__init__(plan, client)
        self.served = served
        self.rounds: Any = None
        self.log_probs: list[TokenLogProb] = []
        self.num_tokens = 0
        self._num_top = num_top
        self._events = events
        self._new: list[Any] = []
        self._num_seen = 0

    @property
    def num_thinking_tokens(self) -> int:
        """How many tokens the main model's thoughts have, once the text has ended; 0 before."""
        return next(iter(getattr(self.rounds, "num_thinking_tokens", [])), 0)

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the main model's prompt has, without its thoughts."""
        return len(self.plan.inputs.prompts[0]) - self.num_thinking_tokens

    def restart(self) -> None:
        super().restart()
        self._num_seen = 0
        self._new = []
        self.log_probs = []
        self._events.tell(self, [])

    def on_round(self, prompt: Prompt) -> None:
        if self._num_top is not None:
            self._keep_log_probs(prompt, self._num_top)
        if self._events.with_rounds:
            self._new += prompt.rounds[self._num_seen :]
            self._num_seen = len(prompt.rounds)

    def on_pass(self) -> None:
        new = self._new
        self._new = []
        if new:
            self._events.tell(self, new)

    def on_end(self, rounds: Any) -> None:
        if self.plan.on_answer is not None:
            self.plan.on_answer(0, rounds)  # puts the members' thoughts into the rounds
        self.rounds = rounds
        self.num_tokens = self.num_thinking_tokens + sum(one.num_tokens for one in rounds)
        self._events.tell(self, None)

    def on_error(self, error: Exception) -> None:
        self._events.tell(self, as_api_error(error))

    def _keep_log_probs(self, prompt: Prompt, num_top: int) -> None:
        rows = prompt.logits
        prompt.logits = []
        prompt.scores = []
        ids = prompt.ids[len(prompt.ids) - len(rows) :]
        piece = self.plan.members[0].handle.vocabulary.piece
        for token, row in zip(ids, rows, strict=True):
            if token in self.plan.members[0].eos_ids:
                continue
            values = row.float().log_softmax(-1)
            top = values.topk(min(num_top, len(values))) if num_top else None
            pairs = [] if top is None else zip(top.indices.tolist(), top.values.tolist(), strict=True)
            found = [(piece(one), value) for one, value in pairs if value > -math.inf]
            self.log_probs.append(TokenLogProb(piece(token), float(values[token]), found))


def make_plan(
    served: ServedEnsemble,
    prompt: Any,
    request: ChatRequest | CompletionRequest,
    seed: int,
    default_tokens: int,
    turns: Turns | None = None,
) -> CallPlan:
    """
    The plan of one prompt of a request. Members that think write their thoughts here, in turn with the engine.

    Args:
        served (`ServedEnsemble`): the ensemble that is called.
        prompt (`str`, `list[int]`, `ChatRequest` or `Callable`): a text, ids of the main model, or the conversation of
            a request; or what returns one of these.
        request (`ChatRequest` or `CompletionRequest`): the request that the prompt is from.
        seed (`int`): the seed of sampled tokens.
        default_tokens (`int`): the most new tokens where the request names no number.
        turns (`Turns`, *optional*): the turns in which members may think, prepared here. `None`: plan at once, from the
            plan of an earlier request that was like this one.

    Raises:
        ApiError: the request cannot be honoured.
        UnknownPlanError: no earlier request was like this one, and there are no `turns`.
        CancelledError, StoppedError: nobody waits for the call, or the engine stops.
    """
    options = request.options
    try:
        prompt = prompt() if callable(prompt) else prompt
        settings = _settings(served, request)
        config = served.settings(settings, options.drawn)
        call = _arguments(served, request, settings, config, default_tokens)
        if isinstance(request, ChatRequest):
            prompt = conversation(request, served.takes_system)
            call |= {"chat": True, "thinking": request.thinking, "max_thinking_tokens": options.max_thinking_tokens}
            if request.reasoning_effort not in (None, "none"):
                call["template_kwargs"] = {"reasoning_effort": request.reasoning_effort}
        has_ids = isinstance(prompt, list) and prompt and isinstance(prompt[0], int)
        inputs: Any = [prompt]
        if has_ids:
            inputs = torch.tensor(inputs, device="cpu")
            call["attention_mask"] = torch.ones_like(inputs)  # a padding token is a token of the prompt, too
        seeded = Seeded(seed) if call["do_sample"] else None
        if turns is not None:
            turns.prepare(served.lengths, *((seeded.hold, seeded.resume) if seeded is not None else ()))
        thinking = nullcontext() if turns is None else thinking_at(turns)
        with planning(served.known_plans, turns is None) as plans, thinking, seeded or nullcontext():
            served.ensemble.output(inputs, **call)
    except (ValueError, ImportError, AdaFuseDecodingError, ServerError) as error:
        raise as_api_error(error) from error
    (plan,) = plans
    thinkers = set() if turns is None else turns.thinkers  # whose prompts were short enough before their thoughts
    for k, (name, member, most) in enumerate(zip(served.members, plan.members, served.lengths, strict=True)):
        if k not in thinkers and (number := len(member.prompts[0])) > most:
            raise as_api_error(too_long(name, number, most))
    return plan


def may_be_at_once(served: ServedEnsemble, request: ChatRequest | CompletionRequest, samples: bool) -> bool:
    """Whether a request may be planned in the event loop, where an earlier one was like it: its texts are short, and
    nothing is sampled. A request that samples may have to wait for torch's random generator."""
    return not samples and request.size <= FEW_CHARACTERS and not takes_long(served, request)


def takes_long(served: ServedEnsemble, request: ChatRequest | CompletionRequest) -> bool:
    """Whether planning may take long: members think, a grammar is compiled, tokenizers read a long text, or a member's
    server is asked whether it still serves the same model."""
    if request.structured is not None or request.size > MANY_CHARACTERS or served.servers:
        return True
    if not isinstance(request, ChatRequest) or request.thinking == "off":
        return False
    return any(thinking_format(tokenizer) is not None for tokenizer in served.ensemble.tokenizers)


def conversation(request: ChatRequest, takes_system: bool = True) -> list[dict[str, Any]]:
    """The messages of a request as chat templates take them, with a description of its tools. `takes_system`: whether
    all templates take a system message."""
    messages = []
    for one in request.messages:
        message: dict[str, Any] = {"role": "system" if one.role == "developer" else one.role, "content": one.text}
        if one.name is not None:
            message["name"] = one.name
        if one.tool_calls and one.role == "assistant":
            message["tool_calls"] = [call.model_dump() for call in one.tool_calls]
        if one.role == "tool":
            message["tool_call_id"] = one.tool_call_id
        messages.append(message)
    return with_tools(messages, request.offer, takes_system)


def as_api_error(error: BaseException) -> ApiError:
    """The error as a client may see it: its text names no folders of this machine and has no traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StoppedError):
        return ApiError(503, "The server is shutting down. Try again later.", "shutting_down")
    if (cause := server_error(error)) is not None:  # its text names an address, and what that server has said
        logger.warning(f"A member's server: {cause}")
        if cause.is_away:
            message = "The server of a member does not answer. Try again later, or leave this member out."
            return ApiError(503, message, "member_away", headers={"Retry-After": "10"})
        message = "The server of a member gives no answer that can be used. The server's log says more."
        return ApiError(502, message, "member_failed")
    if isinstance(error, AdaFuseDecodingError):
        return ApiError(500, without_paths(reason_of(error)), "member_failed")
    if isinstance(error, UnenforcedKeywordsError):  # its paths are those of the client's schema
        return ApiError(400, str(error))
    if isinstance(error, (ValueError, ImportError)):
        message = without_paths(str(error))
        is_long = "must be at most" in message and "tokens" in message and message.startswith("The prompt of")
        return ApiError(400, message, "context_length_exceeded" if is_long else None)
    return ApiError(500, f"The call failed unexpectedly ({type(error).__name__}). The server's log says more.")


def _settings(served: ServedEnsemble, request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The settings that a request names. They are those of the ensemble: a member that answers beside it takes none but
    whether words are sampled."""
    settings = request.options.settings
    is_beside = served.name != request.model
    return {name: value for name, value in settings.items() if name == "do_sample"} if is_beside else settings


def _arguments(
    served: ServedEnsemble,
    request: ChatRequest | CompletionRequest,
    settings: Mapping[str, Any],
    config: AdaFuseConfig,
    default_tokens: int,
) -> dict[str, Any]:
    """The arguments of `generate()` for a request with these settings, beside its prompt."""
    options = request.options
    says_how = request.samples or (request.temperature is not None and not request.is_greedy)
    if says_how and config.do_sample is not None:  # the request goes before the server's settings
        config = config.changed({"do_sample": None})
    samples = request.samples or bool(config.do_sample)
    drawn: dict[str, Any] = {"do_sample": samples}
    if samples:
        own = {name: value for name, value in options.drawn.items() if not served.has_option(settings, name)}
        given = {"top_p": request.top_p, **own}
        given["temperature"] = request.temperature or (1.0 if request.samples else None)
        drawn |= {name: value for name, value in given.items() if value is not None}
    return {
        **drawn,
        "adafuse_config": config,
        "max_new_tokens": request.num_tokens or default_tokens,
        "stop_strings": request.stops or None,
        "structured": request.structured,
        "output_logits": request.num_top is not None,
        "on_answer": lambda row, rounds: None,
    }
