"""Whether the Hub can be reached, asked once before a model is loaded by its Hub name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from ..servers.kinds import is_served_name

_HUB = "https://huggingface.co"
# Through a proxy the Hub may be reached where this machine cannot even find its address.
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def go_offline_without_a_network(names: Iterable[str | None]) -> None:
    """
    Tell the Hub's client to work offline where a name is not that of a local folder and the Hub has no address here.
    It would else try five times for each file, with a line each, before it says so.
    """
    is_told = "HF_HUB_OFFLINE" in os.environ or any(name in os.environ for name in _PROXIES)
    if is_told or all(name is None or is_served_name(name) or Path(name).exists() for name in names):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", _HUB)).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
