"""Checks a server's URL, keeps API keys out of messages, reads `Retry-After`."""

from __future__ import annotations

import ipaddress
import json
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit


def checked_url(url: Any, allow_http: bool) -> str:
    """
    The URL of a server, without a slash or `/v1` at its end.

    Raises:
        ValueError: it is none, it holds more than a host, or it is plain http to another host.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    has_key = parts is not None and ("@" in parts.netloc or bool(parts.query) or bool(parts.fragment))
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or has_key or not _has_port(parts):
        shown = f"one of {parts.hostname} with more than that" if parts is not None and has_key else repr(url)
        raise ValueError(
            f"`url` must be like http://localhost:8000 or https://host, but is {shown}. A key goes into an environment "
            "variable, `api_key_env`."
        )
    if parts.scheme == "http" and not allow_http and not _is_here(parts.hostname):
        raise ValueError(
            f"`url` must be https for another host than this one, but is {url!r}: prompts and keys would be sent in "
            "the clear. Pass allow_http=True (--allow-http) where the network may be trusted."
        )
    return str(url).rstrip("/").removesuffix("/v1")


def _has_port(parts: Any) -> bool:
    """Whether it is none, or a number that can be one."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def seconds_of(value: str | None) -> float:
    """The seconds that a `Retry-After` header asks for. It holds a number, or a date."""
    with suppress(TypeError, ValueError):
        return max(0.0, float(value or 0.0))
    with suppress(TypeError, ValueError):
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    return 0.0


def without_key(key: str, text: str) -> str:
    """A text in which the API key is replaced by `***`, also in its JSON form."""
    for form in (key, json.dumps(key)[1:-1]) if key else ():
        text = text.replace(form, "***")
    return text
