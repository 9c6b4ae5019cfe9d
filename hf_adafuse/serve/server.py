"""Runs the application under uvicorn, and ends soon after it is told to. `hf-adafuse serve` calls `make_server`."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import MAX_REQUEST_SECONDS, create_app
from .errors import ApiError
from .limits import MOST_DROPPED_BYTES
from .service import Service


class Server(uvicorn.Server):
    """
    A server whose streams get an end as soon as it is told to stop.

    Args:
        config (`uvicorn.Config`): uvicorn's settings, the application among them.
        service (`Service`): answers the requests.
        on_ready (`Callable`): called with the server's URL once it answers.
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, and tell `on_ready` the URL."""
        await super().startup(sockets)
        if self.started:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after Ctrl-C or another signal. The engine stops first, so that streams end at once."""
        self._service.engine.begin_to_stop()
        super().handle_exit(sig, frame)


class _Joining:
    """A transport that collects what is written in one step of the event loop and sends it together: the headers with
    the body, the last event with the end of the stream."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def write_eof(self) -> None:
        self._send()
        self._transport.write_eof()

    def _send(self) -> None:
        if self._written:
            self._transport.write(b"".join(self._written))
            self._written = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Connection(H11Protocol):
    """A connection that is closed when the headers of a request take too long to come. uvicorn's own would wait for
    ever. After data that are no HTTP request, or headers that do not end, the rest is read and dropped, so that the
    client receives the answer."""

    max_request_seconds = MAX_REQUEST_SECONDS
    _closing: asyncio.TimerHandle | None = None
    _num_left: int | None = None  # how many bytes may still be dropped; `None` before there was a request to refuse

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Joining(transport, self.loop))  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._num_left is None:
            super().data_received(data)
            self._watch()
            return
        self._num_left -= len(data)
        if self._num_left < 0:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer data that are no HTTP request."""
        if self.cycle is not None:  # they came in place of the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the request has been answered
            self.transport.close()
            return
        reason = "The request must be HTTP/1.1 with less than 64 KiB of headers, but is other. Correct it."
        body, headers = ApiError(400, reason, "invalid_http").as_bytes()
        start = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._num_left = MOST_DROPPED_BYTES
        self._stop_watching()
        self._closing = self.loop.call_later(self.max_request_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers have come
            self._stop_watching()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.max_request_seconds, self.transport.close)

    def _stop_watching(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None


def make_server(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    on_ready: Callable[[str], None] = lambda url: None,
    max_request_seconds: float = MAX_REQUEST_SECONDS,
) -> Server:
    """
    A server. Its `run()` answers requests until it is told to stop.

    Args:
        service (`Service`): answers the requests.
        host (`str`), port (`int`): where to listen. Port 0 stands for any free port.
        api_key, cors_origins, max_request_seconds: as of [`create_app`].
        on_ready (`Callable`): called with the server's URL once it answers.
    """
    app = create_app(service, api_key, cors_origins, max_request_seconds=max_request_seconds)
    connection = type("Connection", (_Connection,), {"max_request_seconds": max_request_seconds})
    config = uvicorn.Config(
        app, host, port, http=connection, log_level="warning", access_log=False, timeout_graceful_shutdown=5,
        lifespan="on",
    )  # fmt: skip
    return Server(config, service, on_ready)


@contextmanager
def serving(service: Service, **options: Any) -> Iterator[str]:
    """Run a server in a thread of its own, on a free port of the loopback address. Yields its URL."""
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    def run() -> None:
        try:
            server.run()
        finally:
            ready.set()

    server = make_server(service, port=0, on_ready=on_ready, **options)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    if not urls:
        raise RuntimeError("the server has not started; its log says why")
    try:
        yield urls[0]
    finally:
        service.engine.begin_to_stop()
        server.should_exit = True
        thread.join(20)
