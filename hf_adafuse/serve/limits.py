"""What an unknown network may send: bodies of at most so many bytes, and requests with the key. Knows no request."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """
    An ASGI application before another: it refuses bodies that are too large, and requests without the key.

    Args:
        app: the application.
        most_bytes (`int`): of a body.
        key (`str`, *optional*): what `Authorization: Bearer ...` must say; `None`: anybody may ask.
        open_paths (`tuple[str]`): these need no key.
    """

    def __init__(self, app: Any, most_bytes: int, key: str | None, open_paths: tuple[str, ...]) -> None:
        self._app, self._most_bytes = app, most_bytes
        self._key, self._open_paths = None if key is None else key.encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in self._open_paths and scope["method"] != "OPTIONS":
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._key):
                await _refuse(send, ApiError(401, "The API key is missing or wrong.", "invalid_api_key"))
                return
        length = headers.get(b"content-length", b"0")
        too_large = ApiError(413, f"The body must be at most {self._most_bytes} bytes. Send less.", "body_too_large")
        if not length.isdigit() or int(length[:20]) > self._most_bytes:
            await _refuse(send, too_large)
            return
        chunks, size, more = [], 0, True
        while more:  # it is read whole here: it is not large
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            chunks.append(message.get("body", b""))
            size, more = size + len(chunks[-1]), message.get("more_body", False)
            if size > self._most_bytes:
                await _refuse(send, too_large)
                return
        body: bytes | None = b"".join(chunks)

        async def receive_again() -> MutableMapping[str, Any]:
            nonlocal body
            if body is None:
                return await receive()  # the client has gone
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        await self._app(scope, receive_again, send)


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
