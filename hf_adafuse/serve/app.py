"""The web application: answers HTTP requests at the paths of OpenAI's API, whole or as streams of events.

Its paths are `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/metrics`, and `/` for the page.
`server` runs it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from .calls import as_api_error
from .ensembles import ServedEnsemble
from .errors import ApiError
from .limits import LimitMiddleware
from .replies import Reply
from .requests import ChatRequest, CompletionRequest
from .service import ClientGoneError, Service

T = TypeVar("T")
R = TypeVar("R", ChatRequest, CompletionRequest)

# The largest body of a request.
MOST_BODY_BYTES = 4 * 2**20
# How long a client may take to send the headers of a request, and how long again for its body.
MAX_REQUEST_SECONDS = 60.0
# Paths that need no API key. The page asks its reader for the key.
_OPEN_PATHS = ("/", "/health")
_DONE = b"data: [DONE]\n\n"
_JSON = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


def create_app(
    service: Service,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    most_body_bytes: int = MOST_BODY_BYTES,
    max_request_seconds: float = MAX_REQUEST_SECONDS,
) -> Any:
    """
    The ASGI application. Its lifespan starts the engine of the service, and stops it.

    Args:
        service (`Service`): answers the requests.
        api_key (`str`, *optional*): the key that clients must send. `None`: anybody may ask.
        cors_origins (`list[str]`, *optional*): the origins whose pages may ask from a browser. By default there are
            none.
        most_body_bytes (`int`, *optional*, defaults to 4 MiB): the largest body of a request, in bytes.
        max_request_seconds (`float`, *optional*, defaults to 60.0): how long a client may take to send a body, in
            seconds.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            service.close()
            await asyncio.get_running_loop().run_in_executor(None, service.engine.stop, 10.0)

    app = FastAPI(title="hf_adafuse", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    _add_errors(app, service)
    _add_paths(app, service)

    def on_refusal(path: str, status: int) -> None:
        _count(service, path, "", status)

    limited = LimitMiddleware(app, most_body_bytes, max_request_seconds, api_key, _OPEN_PATHS, on_refusal)
    if not cors_origins:
        return limited
    # Around the limits: a page of an allowed origin may read why it is refused.
    return CORSMiddleware(limited, allow_origins=list(cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"])


def _add_paths(app: FastAPI, service: Service) -> None:
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    async def chat(request: Request) -> Response:
        return await _answer(service, await _read(ChatRequest, request), request)

    async def completions(request: Request) -> Response:
        return await _answer(service, await _read(CompletionRequest, request), request)

    # These are Starlette's routes. FastAPI's would parse a body into Python objects first, which takes longer.
    app.add_route("/v1/chat/completions", chat, ["POST"])
    app.add_route("/v1/completions", completions, ["POST"])

    @app.api_route("/", methods=["GET", "HEAD"], response_class=HTMLResponse)
    async def home() -> HTMLResponse:
        # The page is one file that asks nobody but this server.
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
        return HTMLResponse(page, headers=headers)

    @app.api_route("/health", methods=["GET", "HEAD"])  # what watches a server often asks for the headers alone
    async def health() -> dict[str, Any]:
        engines = service.engine.all
        running = sum(one.num_running for one in engines)
        waiting = sum(one.num_waiting for one in engines)
        return {"status": "ok", "running": running, "waiting": waiting}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        engine = service.engine
        engines = engine.all
        gauges = {
            "running": sum(one.num_running for one in engines),
            "waiting": sum(one.num_waiting for one in engines),
            "passes_total": sum(one.num_passes for one in engines),
            "calls_total": sum(one.num_jobs for one in engines),
            "refused_total": sum(one.num_refused for one in engines),
            "prefix_cache_bytes": engine.prefixes.num_bytes,
            "prefix_cache_limit_bytes": engine.prefixes.max_bytes or 0,
            "prefix_cache_used_tokens_total": engine.prefixes.num_used,
        }
        return PlainTextResponse(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(one) for one in service.served.values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _model(service.find(name))


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        _count_answer(service, request, error.status)
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}. See `GET /v1/models`."
        headers = dict(error.headers or {})  # those of a 405 name the methods that are allowed
        return await refuse(request, ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        service.metrics.disconnects += 1
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, as_api_error(error))


async def _read(kind: type[R], request: Request) -> R:
    """
    The body of a request, checked.

    Raises:
        ApiError: the body is no JSON, or its fields are not those of `kind`.
    """
    # Browsers let a page of another origin send plain text without asking the server first, but no JSON.
    if not _JSON.match(request.headers.get("content-type", "")):
        raise ApiError(400, "The `Content-Type` must be application/json, but is other. Send JSON.", "invalid_json")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise _explained(error) from None


async def _answer(service: Service, body: ChatRequest | CompletionRequest, request: Request) -> Response:
    request.state.model = body.model if body.model in service.served else "unknown"
    client = request.client.host if request.client else ""
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        answer = await _unless(gone, service.begin(body, client))
        # `gone` is done when the client has left, and also when this reply is over because one of its calls has failed.
        # Calls that still run are of no use then.
        gone.add_done_callback(lambda task: service.abandon(answer))
        made = None if body.stream else await service.whole(answer)
    except BaseException:
        gone.cancel()
        raise
    if made is None:
        return _EventStream(_events(service, answer, request, gone), media_type="text/event-stream")
    gone.cancel()
    _count_answer(service, request, 200)
    return JSONResponse(made)


class _EventStream(StreamingResponse):
    """A stream that leaves out Starlette's own watch for a client that leaves: its content notices that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


async def _events(
    service: Service, answer: Reply, request: Request, gone: asyncio.Future[None]
) -> AsyncIterator[bytes]:
    """The server-sent events of a streamed answer. They end early when the client is `gone`."""
    is_whole = False
    try:
        async for chunks in service.chunks(answer):
            yield b"".join(map(_event, chunks))
        is_whole = True
        _count_answer(service, request, 200)
        yield _DONE
    except ClientGoneError:
        pass
    except ApiError as error:
        is_whole = True
        _count_answer(service, request, error.status)
        yield _event(error.body) + _DONE
    finally:
        if not is_whole:  # also where the server has cancelled this, for the same reason
            service.metrics.disconnects += 1
        gone.cancel()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def _unless(gone: asyncio.Future[None], work: Awaitable[T]) -> T:
    """
    The result of `work`, unless the client leaves first.

    Raises:
        ClientGoneError: the client has left. The work is cancelled.
    """
    task = asyncio.ensure_future(work)
    both: set[asyncio.Future[Any]] = {task, gone}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()


async def _disconnect(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _explained(error: ValidationError) -> ApiError:
    """The error that says in a sentence the first thing that is wrong with a body."""
    found = error.errors(include_url=False, include_input=False)
    # Where several kinds of values may be given, there is an error of each: that of the kind that comes nearest counts.
    first = max((one for one in found if one["loc"][:1] == found[0]["loc"][:1]), key=_nearness)
    param = ".".join(_path(first["loc"]))
    reason = str(first["msg"]).removeprefix("Value error, ").removeprefix("Invalid JSON: ").removesuffix(".")
    if first["type"] == "json_invalid":  # also where brackets are nested too deeply
        return ApiError(400, f"The body must be JSON that can be read, but is not: {reason}.", "invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"`{param}` must be left out: it is not known here, or cannot be honoured.", None, param)
    return ApiError(400, f"`{param}` is not as it must be: {reason}." if param else f"{reason}.", None, param or None)


def _nearness(error: Mapping[str, Any]) -> tuple[bool, int, int]:
    """How near a value has come to the kind of values that an error is of: whether it is of that kind, how deep the
    error lies, and in which place of a list, whose first part says of which kind all are."""
    path, last = _path(error["loc"]), (error["loc"] or [""])[-1]
    is_other_kind = error["type"].split("_")[-1] == "type" or str(last).startswith("literal[")
    return not is_other_kind, len(path), last if isinstance(last, int) else 0


def _path(loc: Sequence[int | str]) -> list[str]:
    """The fields in the path of an error, without the names of types that pydantic puts between them."""
    types = ("list[", "constrained-", "function-", "literal[")
    return [part for part in map(str, loc) if not part.startswith(types) and not part[:1].isupper()]


def _count_answer(service: Service, request: Request, status: int) -> None:
    _count(service, request.scope["path"], getattr(request.state, "model", ""), status)


def _count(service: Service, path: str, model: str, status: int) -> None:
    known = {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    service.metrics.requests[path if path in known else "other", model, status] += 1


def _model(served: ServedEnsemble) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "hf_adafuse",
        "adafuse": {
            "members": served.members,
            "settings": served.config.to_dict(),
            "chat": served.is_chat,
            "template": served.template,
        },
    }
