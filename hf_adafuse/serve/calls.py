"""Plans the calls of `generate()` of a request, and passes on their text as it comes."""

from __future__ import annotations

import asyncio
import math
import threading
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

# Of a request whose texts are tokenized beside others': some tokenizers take seconds for a word of so many.
MANY_CHARACTERS = 20_000
# Of a request whose texts are tokenized between two events of the server.
FEW_CHARACTERS = 4_000

logger = logging.get_logger(__name__)

# torch has one generator for all threads.
_GENERATOR = threading.Lock()


class Seeded:
    """
    Within this context torch's generator begins with a seed, and no other thread seeds it. Afterwards it is as before.

    Args:
        seed (`int`)
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
        data (`bytes`): what it says.
        log_prob (`float`): in nats, under the main model.
        top (`list[tuple[bytes, float]]`): the most likely tokens in its place.
    """

    data: bytes
    log_prob: float
    top: list[tuple[bytes, float]] = field(default_factory=list)


class CallEvents:
    """
    What becomes of the calls of one reply, as an asyncio loop hears it from the engine's thread.

    Args:
        with_rounds (`bool`): whether rounds are told as they come; else the end of each call alone.
    """

    def __init__(self, with_rounds: bool) -> None:
        self.with_rounds = with_rounds
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[Call, Any]] = asyncio.Queue()

    def tell(self, call: Call, event: Any) -> None:
        """Called in any thread. An event is a list of new rounds, an empty one where the text begins anew, `None` at
        the end of the text, or the error by which it ends."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (call, event))
        except RuntimeError:  # the loop is closed: nobody listens
            call.is_cancelled = True

    async def next(self) -> list[tuple[Call, Any]]:
        """The events that have come, at least one."""
        events = [await self._queue.get()]
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events


class Call(Job):
    """
    A call whose rounds reach an asyncio loop after the pass in which they are committed.

    Args:
        plan (`CallPlan`): of one prompt.
        served (`ServedEnsemble`): what it is a call of.
        num_top (`int`, *optional*): of how many tokens log-probabilities are wanted at each token; `None`: of none.
        events (`CallEvents`): who hears of it.
        client (`str`): who waits for it.

    Attributes:
        rounds: of the text, once it has ended.
        log_probs (`list[TokenLogProb]`): as far as they are wanted.
    """

    def __init__(
        self, plan: CallPlan, served: ServedEnsemble, num_top: int | None, events: CallEvents, client: str = ""
    ) -> None:
        super().__init__(plan, client)
        self.served = served
        self.rounds: Any = None
        self.log_probs: list[TokenLogProb] = []
        self.num_prompt_tokens = len(plan.inputs.prompts[0])
        self.num_tokens = 0
        self._num_top = num_top
        self._events = events
        self._new: list[Any] = []
        self._num_seen = 0

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
        new, self._new = self._new, []
        if new:
            self._events.tell(self, new)

    def on_end(self, rounds: Any) -> None:
        if self.plan.on_answer is not None:
            self.plan.on_answer(0, rounds)  # it knows the thoughts
        self.rounds = rounds
        self.num_tokens = sum(one.num_tokens for one in rounds)
        self._events.tell(self, None)

    def on_error(self, error: Exception) -> None:
        self._events.tell(self, as_api_error(error))

    def _keep_log_probs(self, prompt: Prompt, num_top: int) -> None:
        rows, prompt.scores, prompt.logits = prompt.logits, [], []
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
        served (`ServedEnsemble`)
        prompt (`str`, `list[int]` or `ChatRequest`): a text, ids of the main model, or the conversation of a request.
        request (`ChatRequest` or `CompletionRequest`)
        seed (`int`): of what is sampled.
        default_tokens (`int`): the most new tokens where the request names no number.
        turns (`Turns`, *optional*): in which members think. `None`: plan at once, from the plan of an earlier request.

    Raises:
        ApiError: it cannot be done.
        UnknownPlanError: there is no such plan.
        CancelledError, StoppedError: nobody waits for it, or the engine stops.
    """
    options = request.options
    try:
        config = served.settings(options.settings, options.drawn)
        call = _arguments(served, request, config, default_tokens)
        if isinstance(request, ChatRequest):
            prompt = conversation(request, served.takes_system)
            call |= {"chat": True, "thinking": request.thinking, "max_thinking_tokens": options.max_thinking_tokens}
            if request.reasoning_effort not in (None, "none"):
                call["template_kwargs"] = {"reasoning_effort": request.reasoning_effort}
        inputs = prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            inputs = torch.tensor([prompt], device="cpu")
        else:
            inputs = [prompt]
        seeded = Seeded(seed) if call["do_sample"] else None
        if turns is not None:
            turns.most_tokens = max(served.lengths)
        if turns is not None and seeded is not None:
            turns.hold = seeded.hold
            turns.resume = seeded.resume
        thinking = nullcontext() if turns is None else thinking_at(turns)
        with planning(served.known_plans, turns is None) as plans, thinking, seeded or nullcontext():
            served.ensemble.output(inputs, **call)
    except (ValueError, ImportError, AdaFuseDecodingError, ServerError) as error:
        raise as_api_error(error) from error
    (plan,) = plans
    for name, member, most in zip(served.members, plan.members, served.lengths, strict=True):
        if (number := len(member.prompts[0])) > most:
            raise as_api_error(too_long(name, number, most))
    return plan


def may_be_at_once(served: ServedEnsemble, request: ChatRequest | CompletionRequest, samples: bool) -> bool:
    """Whether a plan takes no time worth mentioning where an earlier request was like this one. Where tokens are drawn,
    the generator of random numbers may have to be waited for."""
    return not samples and request.num_characters <= FEW_CHARACTERS and not takes_long(served, request)


def takes_long(served: ServedEnsemble, request: ChatRequest | CompletionRequest) -> bool:
    """Whether a plan may take long: members think, a grammar is compiled, a long text is read by tokenizers, or a
    member's server is asked whether it is the one that it was."""
    if request.structured is not None or request.num_characters > MANY_CHARACTERS or served.servers:
        return True
    if not isinstance(request, ChatRequest) or request.thinking == "off":
        return False
    return any(thinking_format(tokenizer) is not None for tokenizer in served.ensemble.tokenizers)


def conversation(request: ChatRequest, takes_system: bool = True) -> list[dict[str, Any]]:
    """The messages as chat templates take them, whether these take a message of the system's or not."""
    messages = []
    for one in request.messages:
        message: dict[str, Any] = {"role": "system" if one.role == "developer" else one.role, "content": one.text}
        if one.name is not None:
            message["name"] = one.name
        if one.tool_calls and one.role == "assistant":
            message["tool_calls"] = [call.model_dump() for call in one.tool_calls]
        messages.append(message)
    return with_tools(messages, request.offer, takes_system)


def as_api_error(error: BaseException) -> ApiError:
    """The error as a client may see it: without folders of this machine and without a trace."""
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


def _arguments(
    served: ServedEnsemble, request: ChatRequest | CompletionRequest, config: AdaFuseConfig, default_tokens: int
) -> dict[str, Any]:
    """The arguments of `generate()`."""
    options = request.options
    if request.temperature is not None and config.do_sample is not None:
        config = config.changed({"do_sample": None})
    samples = request.samples or bool(config.do_sample)
    drawn: dict[str, Any] = {"do_sample": samples}
    if samples:
        own = {name: value for name, value in options.drawn.items() if not served.has_option(options.settings, name)}
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
