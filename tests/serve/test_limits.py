"""What an unknown network sends: large, slow or deep: answered or dropped, and others are answered meanwhile."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from servers_of_tests import MODEL, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture(scope="module")
def client():
    with running(patience=0.5) as (_, client):
        yield client
        assert client.completions.create(model=MODEL, prompt="She", max_tokens=2).choices[0].text


def answer_to(client, *parts):
    """What comes back until the server closes the connection."""
    url = urlsplit(str(client.base_url))
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            assert httpx.get(f"{client.base_url}models").status_code == 200
        return b"".join(iter(lambda: connection.recv(2**16), b""))


@pytest.mark.parametrize("parts", [[], [b"PO"], [HEAD, b"X: 1\r\n"]], ids=["nothing", "a word", "no end"])
def test_headers_that_do_not_end(client, parts):
    assert answer_to(client, *parts) == b""


def test_headers_that_do_not_end_of_a_second_request(client):
    first = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    assert answer_to(client, first, HEAD).count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("length", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_a_body_that_trickles_in(client, length):
    head, _, body = answer_to(client, HEAD + length + b"\r\n\r\n", b"5\r\n{", b"  ").partition(b"\r\n\r\n")
    assert b" 408 " in head and json.loads(body)["error"]["code"] == "body_too_slow"


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        ("{}", {"X": "a" * 40_000}, 431, "headers_too_large"),
        ("[" * 100_000 + "]" * 100_000, {}, 400, "invalid_json"),
        ('{"model": "ensemble", "max_tokens": ' + "9" * 5000 + "}", {}, 400, "invalid_json"),
    ],
    ids=["headers", "deep", "digits"],
)
def test_what_is_too_much(client, content, headers, status, code):
    headers = {"Content-Type": "application/json", **headers}
    answer = httpx.post(f"{client.base_url}completions", content=content, headers=headers)
    assert answer.status_code == status and answer.json()["error"]["code"] == code
