"""Requests to one server: where it is, the key, and what is done about answers that do not come. Knows JSON over HTTP;
nothing of what it says.

Every request here can be asked again without harm: it reads, and changes nothing but the server's cache.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .queries import BadAnswer, ServerError

T = TypeVar("T")

# Statuses after which the same request may succeed: too busy, starting, or a proxy before it.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds


@dataclass(frozen=True)
class Patience:
    """
    How long a server is waited for.

    Args:
        timeout (`float`): seconds without a byte after which an attempt is given up.
        deadline (`float`): seconds for a request with all its attempts.
        retries (`int`): attempts after the first.
    """

    timeout: float = 60.0
    deadline: float = 300.0
    retries: int = 5

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"`{name}` must be a number of seconds above 0, but is {value!r}. Leave it out.")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"`retries` must be a whole number of at least 0, but is {self.retries!r}. Leave it out.")


class Connection:
    """
    A server, asked from any number of threads.

    Args:
        url (`str`): `http://host:port` or `https://...`.
        api_key_env (`str`, *optional*): the environment variable that holds the key; read at each request, not kept.
        patience (`Patience`)
        allow_http (`bool`): whether another host than this one may be asked without encryption.

    Raises:
        ValueError: no such URL, or plain http to another host.
        ImportError: httpx is not installed.
    """

    def __init__(
        self, url: str, api_key_env: str | None = None, patience: Patience = Patience(), allow_http: bool = False
    ) -> None:
        self.url, self.api_key_env, self.patience = _checked(url, allow_http), api_key_env, patience
        self._httpx = _httpx()
        self._client: Any = None
        self._lock = threading.Lock()
        self._owner = -1  # connections do not live on in a forked process
        self.num_retries = 0
        self.was_away = False  # it may have been started anew since

    def get(self, path: str, read: Callable[[Any], T]) -> T:
        """As [`post`], of what needs no body."""
        return self._ask("GET", path, lambda request_id: None, lambda answer, _: read(answer))

    def post(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[Any, str], T],
        name_requests: Callable[[dict[str, Any], str], dict[str, Any]] = lambda body, request_id: body,
    ) -> T:
        """
        Ask until there is an answer that can be read.

        Args:
            path (`str`), body (`dict`): of the request.
            read (`Callable`): `read(answer, request_id)`; raises `BadAnswer` where it cannot be right, or whatever
                comes of an answer of another form.
            name_requests (`Callable`, *optional*): `name_requests(body, request_id)`: the body with the name of the
                request in it, where a server does not take it from the header `X-Request-Id`.

        Raises:
            ServerError: there is none within the deadline and the attempts, or the request is refused.
        """
        return self._ask("POST", path, lambda request_id: name_requests(body, request_id), read)

    def _ask(self, method: str, path: str, body: Callable[[str], Any], read: Callable[[Any, str], T]) -> T:
        start, reason, pause = time.monotonic(), "", 0.0
        for number in range(self.patience.retries + 1):
            left = self.patience.deadline - (time.monotonic() - start)
            if left <= pause:
                reason = f"{reason}; the deadline of {self.patience.deadline:g} s is over"
                break
            time.sleep(pause)
            self.num_retries += number > 0
            request_id = uuid.uuid4().hex
            try:
                answer, wait = self._once(method, path, body(request_id), request_id, left - pause)
                if wait is None:
                    return read(answer, request_id)
                reason = answer
            except BadAnswer as error:
                reason, wait = f"its answer cannot be right: {error}", 0.0
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                reason, wait = f"its answer has another form than expected ({type(error).__name__})", 0.0
            growing = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            pause = max(wait, growing)
        raise ServerError(f"the server at {self.url} gives no answer to {path}: {reason}")

    def _once(self, method: str, path: str, body: Any, request_id: str, left: float) -> tuple[Any, float | None]:
        """One attempt: the answer and `None`, or why there is none and the seconds that the server asks to wait."""
        headers = {"X-Request-Id": request_id}
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        if self.api_key_env and not key:
            raise ServerError(f"the environment variable {self.api_key_env} for the key of {self.url} is not set")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            response = self._http().request(
                method, path, json=body, headers=headers, timeout=min(self.patience.timeout, left)
            )
        except self._httpx.HTTPError as error:
            self.was_away = True
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 0.0
        if response.status_code in _PASSING:
            return f"status {response.status_code}", _seconds(response.headers.get("Retry-After"))
        if response.status_code != 200:
            said = response.text[:300].replace(key, "***") if key else response.text[:300]
            raise ServerError(f"the server at {self.url} refuses {path}: status {response.status_code}, {said!r}")
        try:
            return json.loads(response.content), None
        except ValueError:
            return "what it sends is no JSON", 0.0

    def _http(self) -> Any:
        with self._lock:
            if self._owner != os.getpid():
                self._client, self._owner = self._httpx.Client(base_url=self.url), os.getpid()
                weakref.finalize(self, self._client.close)
            return self._client

    def __deepcopy__(self, memo: Any) -> Connection:
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.url, self.api_key_env, self.patience, True)


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ImportError("Members behind servers need httpx. Install it: pip install 'hf_adafuse[served]'.") from error
    return httpx


def _checked(url: Any, allow_http: bool) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError(
            f"`url` must be like http://localhost:8000 or https://host, but is {url!r}. A key goes into an environment "
            "variable, `api_key_env`."
        )
    if parts.scheme == "http" and not allow_http and not _is_here(parts.hostname):
        raise ValueError(
            f"`url` must be https for another host than this one, but is {url!r}: prompts and keys would be sent in "
            "the clear. Pass allow_http=True where the network may be trusted."
        )
    return str(url).rstrip("/")


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _seconds(value: str | None) -> float:
    """Of a `Retry-After`, as far as it is a number."""
    try:
        return max(0.0, float(value or 0.0))
    except ValueError:
        return 0.0
