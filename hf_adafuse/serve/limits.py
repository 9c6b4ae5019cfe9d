"""`LimitMiddleware`: refuses requests that lack the API key, are too large, or take too long to come."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from .errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


# The most bytes of a request's headers, names and values together.
MOST_HEADER_BYTES = 32 * 2**10
# The most bytes of a refused request that are read and dropped after the answer. A connection that is closed while the
# client still sends is reset. Most clients would lose the answer then, as they read it when they have sent everything.
MOST_DROPPED_BYTES = 256 * 2**20


class LimitMiddleware:
    """
    ASGI middleware that refuses headers and bodies that are too large, bodies that take too long to come, and requests
    without the API key. What a client sends after the refusal is read and dropped, up to a bound.

    Args:
        app: the application that gets the other requests.
        most_bytes (`int`): the largest body.
        most_seconds (`float`): the longest time from the headers to the end of the body.
        key (`str`, *optional*): the key that `Authorization: Bearer ...` must hold. `None`: anybody may ask.
        open_paths (`tuple[str]`): the paths that need no key.
        on_refusal (`Callable`): called with the path and the status of each request that is refused.
    """

    def __init__(
        self,
        app: Any,
        most_bytes: int,
        most_seconds: float,
        key: str | None,
        open_paths: tuple[str, ...],
        on_refusal: Callable[[str, int], None],
    ) -> None:
        self._app = app
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._key = None if key is None else key.encode()
        self._open_paths = open_paths
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (error := self._error_of_headers(scope)) is not None:
            await self._refuse(scope, receive, send, error)
            return
        try:
            # The body is not large: it is read whole here.
            body = await asyncio.wait_for(_read(receive, self._most_bytes), self._most_seconds)
        except asyncio.TimeoutError:
            message = f"The body must have come within {self._most_seconds:g} s. Send it faster, or send less."
            await self._refuse(scope, None, send, ApiError(408, message, "body_too_slow"))
            return
        except _TooLargeError:
            await self._refuse(scope, receive, send, self._too_large())
            return
        if body is None:
            return

        async def receive_again() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                return await receive()  # the client has gone
            whole = body
            body = None
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, receive_again, send)

    def _error_of_headers(self, scope: Scope) -> ApiError | None:
        """Why a request is refused before its body is read; `None` where it is not."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            message = f"The headers must be at most {MOST_HEADER_BYTES} bytes together. Send less."
            return ApiError(431, message, "headers_too_large")
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in self._open_paths and scope["method"] != "OPTIONS":
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                message = "The API key is missing or wrong. Send `Authorization: Bearer` with the server's key."
                return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._most_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body must be at most {self._most_bytes} bytes. Send less.", "body_too_large")

    async def _refuse(self, scope: Scope, receive: Receive | None, send: Send, error: ApiError) -> None:
        """Answer with an error, then read and drop what `receive` gives; `None`: read nothing."""
        self._on_refusal(scope["path"], error.status)
        body, headers = error.as_bytes()
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if receive is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_drop(receive), self._most_seconds)
        await send({"type": "http.response.body"})


class _TooLargeError(Exception):
    """A body has too many bytes."""


async def _read(receive: Receive, most_bytes: int) -> bytes | None:
    """The body; `None` where the client has gone."""
    chunks = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
        if size > most_bytes:
            raise _TooLargeError
    return b"".join(chunks)


async def _drop(receive: Receive) -> None:
    """Read and drop the rest of a body, up to `MOST_DROPPED_BYTES`."""
    left = MOST_DROPPED_BYTES
    more = True
    while more and left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        more = message.get("more_body", False)
