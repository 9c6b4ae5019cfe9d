"""The API: paths, errors in OpenAI's form, streams.

Paths: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/metrics`, and the page at `/`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

from .calls import as_api_error
from .ensembles import ServedEnsemble
from .errors import ApiError
from .limits import LimitMiddleware
from .replies import Reply
from .requests import ChatRequest, CompletionRequest
from .service import ClientGoneError, Service

T = TypeVar("T")

MOST_BODY_BYTES = 4 * 2**20
# For the headers of a request, and as long again for its body.
MAX_REQUEST_SECONDS = 60.0
# The page asks for the key itself.
_OPEN_PATHS = ("/", "/health")
_DONE = b"data: [DONE]\n\n"


def create_app(
    service: Service,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    most_body_bytes: int = MOST_BODY_BYTES,
    max_request_seconds: float = MAX_REQUEST_SECONDS,
) -> Any:
    """
    The ASGI application. Its lifespan starts and stops the engine of the service.

    Args:
        service (`Service`)
        api_key (`str`, *optional*): what clients must send; `None`: anybody may ask.
        cors_origins (`list[str]`, *optional*): pages of these origins may ask from a browser; by default none.
        most_body_bytes (`int`, *optional*, defaults to 4 MiB): of a request.
        max_request_seconds (`float`, *optional*, defaults to 60.0): the seconds within which a body must have come.
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
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    return LimitMiddleware(app, most_body_bytes, max_request_seconds, api_key, _OPEN_PATHS)


def _add_paths(app: FastAPI, service: Service) -> None:
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def home() -> HTMLResponse:
        # The page is one file that asks nobody but this server.
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}
        return HTMLResponse(page, headers=headers)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        engines = service.engine.all
        running, waiting = sum(one.num_running for one in engines), sum(one.num_waiting for one in engines)
        return {"status": "ok", "running": running, "waiting": waiting}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        engine, engines = service.engine, service.engine.all
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

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, body, request)


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        _count(service, request, error.status)
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def explain(request: Request, error: RequestValidationError) -> JSONResponse:
        return await refuse(request, _explained(error))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI has not read the body: brackets too deep, a number of too many digits
            message = "The body must be JSON without deep brackets or long numbers, but is other. Send simpler JSON."
            return await refuse(request, ApiError(400, message, "invalid_json"))
        return await refuse(request, ApiError(error.status_code, f"{error.detail}. See `GET /v1/models`."))

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        service.metrics.disconnects += 1
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, as_api_error(error))


async def _answer(service: Service, body: ChatRequest | CompletionRequest, request: Request) -> Response:
    request.state.model = body.model if body.model in service.served else "unknown"
    client = request.client.host if request.client else ""
    if body.stream:
        answer = await _unless_gone(service.begin(body, client), request)
        return StreamingResponse(_events(service, answer, request), media_type="text/event-stream")
    begun: list[Reply] = []

    async def whole() -> dict[str, Any]:
        begun.append(await service.begin(body, client))
        return await service.whole(begun[0])

    try:
        made = await _unless_gone(whole(), request)
    except BaseException:
        for answer in begun:
            service.abandon(answer)
        raise
    _count(service, request, 200)
    return JSONResponse(made)


async def _events(service: Service, answer: Reply, request: Request) -> AsyncIterator[bytes]:
    """Server-sent events of a streamed answer. When the client goes its calls are given up at once."""
    gone = asyncio.ensure_future(_disconnect(request))
    gone.add_done_callback(lambda task: None if task.cancelled() else service.abandon(answer))
    is_whole = False
    try:
        async for chunk in service.chunks(answer):
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
        is_whole = True
        _count(service, request, 200)
        yield _DONE
    except ClientGoneError:
        pass
    except ApiError as error:
        is_whole = True
        _count(service, request, error.status)
        yield b"data: " + json.dumps(error.body).encode() + b"\n\n" + _DONE
    finally:
        gone.cancel()
        if not is_whole:  # also where the server has cancelled this, for the same reason
            service.metrics.disconnects += 1
            service.abandon(answer)


async def _unless_gone(work: Awaitable[T], request: Request) -> T:
    """
    What the work gives, while the client waits for it.

    Raises:
        ClientGoneError: it does not.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _explained(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, in a sentence."""
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:] if not str(part).startswith(("list[", "constrained-")))
    reason = str(first["msg"]).removeprefix("Value error, ").removesuffix(".")
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body must be JSON, but is not: {reason}.", "invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"`{param}` must be left out: it is not known here, or cannot be honoured.", None, param)
    return ApiError(400, f"`{param}` is not as it must be: {reason}." if param else f"{reason}.", None, param or None)


def _count(service: Service, request: Request, status: int) -> None:
    known = {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    path = request.url.path if request.url.path in known else "other"
    service.metrics.requests[path, getattr(request.state, "model", ""), status] += 1


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
