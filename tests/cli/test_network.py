"""Without a network nobody waits for the Hub: it is asked for once, and only where a name may be on it."""

from __future__ import annotations

import socket

import pytest

from hf_adafuse.cli.network import go_offline_without_a_network


@pytest.fixture
def lookups(monkeypatch):
    """The hosts that were looked up; none of them has an address."""
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    asked = []

    def look_up(host, port):
        asked.append(host)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def is_offline():
    import os

    return os.environ.get("HF_HUB_OFFLINE") == "1"


def test_a_hub_name_is_looked_for_in_the_cache_alone(lookups):
    go_offline_without_a_network(["org/model", None])
    assert lookups == ["huggingface.co"] and is_offline()


def test_another_endpoint_is_asked_for(lookups, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443/hub")
    go_offline_without_a_network(["org/model"])
    assert lookups == ["mirror.example"] and is_offline()


def test_with_a_network_nothing_changes(lookups, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [])
    go_offline_without_a_network(["org/model"])
    assert not is_offline()


def test_folders_servers_proxies_and_the_callers_word_are_not_questioned(lookups, monkeypatch, tmp_path):
    go_offline_without_a_network([str(tmp_path), None, "vllm:http://localhost:8000#m"])
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    go_offline_without_a_network(["org/model"])
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    go_offline_without_a_network(["org/model"])
    assert lookups == [] and not is_offline()
