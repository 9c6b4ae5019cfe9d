"""Finds out once, before a model is loaded by its Hub name, whether the Hub can be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from ..servers.kinds import is_served_name

_HUB = "https://huggingface.co"
# Where one of these is set, the Hub may be reached through a proxy, even if this machine cannot find its address.
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def go_offline_without_a_network(names: Iterable[str | None]) -> None:
    """
    Tell the Hub's client to work offline where a name is not that of a local folder and the Hub has no address here.
    Otherwise the client tries five times for each file, with a line each time, before it gives up.
    """
    is_told = "HF_HUB_OFFLINE" in os.environ or any(name in os.environ for name in _PROXIES)
    if is_told or all(name is None or is_served_name(name) or Path(name).exists() for name in names):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT", _HUB)).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
