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
        ValueError: it is none, it holds a key, a query or a fragment, or it is plain http to another host.
    """
    parts = _split(url)
    if parts is None:  # what cannot be split may hold a key, too
        has_key = isinstance(url, str) and any(mark in url for mark in "@?#")
    else:
        has_key = "@" in parts.netloc or bool(parts.query) or bool(parts.fragment)
    if parts is None or parts.scheme not in ("http", "https") or has_key:
        shown = f"one of {parts.hostname if parts else 'a host'} with more than that" if has_key else repr(url)
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


def _split(url: Any) -> Any:
    """The parts of a URL; `None` where it has no host that can be asked, or a port that is none."""
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return None
    return parts if parts.hostname and has_port else None


def check_key_variable(name: Any) -> None:
    """Raises `ValueError` where this is no name of an environment variable. It is not shown: it may be the key."""
    if name is not None and not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        raise ValueError(
            "`api_key_env` must be the name of an environment variable, like MY_KEY, but is something else. Put the "
            "key into a variable, and give its name."
        )


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
