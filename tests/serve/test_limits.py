"""What an unknown network sends: large, slow or deep: answered or dropped, and others are answered meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest
from servers_of_tests import MODEL, running

from hf_adafuse import SpanStrategy
from hf_adafuse.decoding.strategies.blender import Blender
from hf_adafuse.decoding.strategies.majority import Majority
from hf_adafuse.decoding.strategies.safe import SAFE
from hf_adafuse.decoding.strategies.selection import Select
from hf_adafuse.decoding.strategies.specfuse import SpecFuse
from hf_adafuse.decoding.strategies.text_spans import TextSpans
from hf_adafuse.serve.requests import check_request_options

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"


@pytest.fixture(scope="module")
def client():
    with running(max_request_seconds=0.5) as (_, client):
        yield client
        assert client.completions.create(model=MODEL, prompt="She", max_tokens=2).choices[0].text


def answer_to(client, *parts):
    """What comes back until the server closes the connection."""
    url = urlsplit(str(client.base_url))
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
            assert httpx.get(f"{str(client.base_url).removesuffix('v1/')}health").status_code == 200
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


def chunked(number, end=b"0\r\n\r\n"):
    """A body of so many chunks of a MiB, each with its length before it."""
    return b"%x\r\n%s\r\n" % (2**20, b" " * 2**20) * number + end


def announced(number):
    return b"Content-Length: %d\r\n\r\n" % number


IN_CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
MANY = 24 * 2**20
KEY = "a-key"
# What is sent, and the answer to it. All of it is sent before the answer is read, as most clients do.
TOO_MUCH = {
    "announced": (announced(MANY) + b" " * MANY, 413, "body_too_large"),
    "announced alone": (announced(MANY), 413, "body_too_large"),
    "in chunks": (IN_CHUNKS + chunked(24), 413, "body_too_large"),
    "in chunks, then broken": (IN_CHUNKS + chunked(24, b"none\r\n"), 413, "body_too_large"),
    "broken chunks": (IN_CHUNKS + b"none\r\n" + b" " * MANY, 400, "invalid_http"),
    "behind large headers": (
        b"X: " + b"a" * 40_000 + b"\r\n" + announced(MANY) + b" " * MANY,
        431,
        "headers_too_large",
    ),
    "headers without end": (b"X: " + b"a" * MANY, 400, "invalid_http"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("sent", TOO_MUCH)
def test_who_sends_too_much_can_read_the_answer(client, sent):
    """The connection is not reset while the client still sends."""
    request, status, code = TOO_MUCH[sent]
    head, _, body = answer_to(client, HEAD + request).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and json.loads(body)["error"]["code"] == code


def test_who_sends_much_without_a_key_can_read_the_answer():
    with running(api_key=KEY) as (_, client):
        head, _, body = answer_to(client, HEAD + announced(MANY) + b" " * MANY).partition(b"\r\n\r\n")
    assert b" 401 " in head and json.loads(body)["error"]["code"] == "invalid_api_key"


ORIGIN = "https://a.example"


@pytest.mark.parametrize("status", [401, 408, 413, 431])
def test_a_refusal_is_counted_and_a_page_may_read_it(status):
    headers = {"Origin": ORIGIN, "Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    content = b"{}"
    if status == 401:
        headers["Authorization"] = "Bearer other"
    if status == 408:
        headers["Content-Length"] = "100"
    if status == 413:
        content = b" " * (5 * 2**20)
    if status == 431:
        headers["X"] = "a" * 40_000
    with running(api_key=KEY, cors_origins=[ORIGIN], max_request_seconds=0.5) as (service, client):
        url = urlsplit(str(client.base_url))
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("POST", "/v1/completions", content, headers)
        answer = connection.getresponse()
        assert answer.status == status and answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert answer.headers["WWW-Authenticate"] == ("Bearer" if status == 401 else None)
        assert json.loads(answer.read())["error"]["message"]
        connection.close()
        assert service.metrics.requests == {("/v1/completions", "", status): 1}


@pytest.mark.parametrize("sent", ["announced", "in chunks", "headers without end"])
def test_not_all_is_dropped(client, sent, monkeypatch):
    """A client that sends on and on is cut off."""
    for module in ("limits", "server"):
        monkeypatch.setattr(f"hf_adafuse.serve.{module}.MOST_DROPPED_BYTES", 2**20)
    with contextlib.suppress(OSError):
        answer_to(client, HEAD + TOO_MUCH[sent][0], *[b" " * 2**20] * 64)
        raise AssertionError("all of it was read")


@dataclass
class OwnMethod(SpanStrategy):
    """A method of a server's own."""

    request_options = ("unit",)
    weights_file: str = "weights.json"
    names: tuple[str, ...] = ()
    unit: str = "word"
    strength: float = 1.0


@pytest.mark.parametrize(
    ("method", "settings", "refused"),
    [
        (Blender, {"ranker": "nll"}, "ranker"),
        (Blender, {"num_samples": 2, "fuser": None}, None),
        (Majority, {"method_options": {"pattern": "a+"}}, "pattern"),
        (Select, {"calibration": {"version": 1}}, "calibration"),
        (Select, {"rubric": "Rate.", "max_score": 3}, None),
        (SAFE, {"ensemble": "gac", "sharpening": "prefix"}, None),
        (TextSpans, {"unit": "word", "merge": "weighted"}, None),
        (SpecFuse, {"score": "logit"}, None),
        (OwnMethod, {"unit": "sentence", "strength": 2, "model_weights": [1, 2]}, None),
        (OwnMethod, {"weights_file": "/etc/passwd"}, "weights_file"),
        (OwnMethod, {"names": ["somebody/model"]}, "names"),
        (OwnMethod, {"strength": 2, "method_options": {"strength": "/etc/passwd"}}, "strength"),
    ],
    ids=str,
)
def test_a_client_sets_numbers_and_the_options_that_a_method_names(method, settings, refused):
    """What else an option holds may name a file or a model, also of methods that the package does not have."""
    if refused is None:
        check_request_options(method, settings)
    else:
        with pytest.raises(ValueError, match=f"`{refused}` must be left out of requests"):
            check_request_options(method, settings)
