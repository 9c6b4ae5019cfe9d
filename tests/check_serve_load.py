"""`hf-adafuse serve` under load, with the members of the demo or others. Run by hand; `serve/test_load.py` runs it with
small numbers.

    python tests/check_serve_load.py --requests 500 --clients 32 --faults 200 --more 2000
    python tests/check_serve_load.py --members FOLDER FOLDER --parts load speed --requests 40

1. Many requests of mixed settings at once, streamed and not: each is answered once, with the text that `generate()`
   gives for it alone. Prints the seconds to the first text and to the end.
2. Many requests of one kind: words per second, and per second of processor time, beside one call of `generate()` with
   the same prompts and batch size, which is what `hf-adafuse run` does.
3. Faults among other requests: clients that go, bodies that are no JSON, of wrong types or too large, and the server of
   a member that dies. Each is answered or dropped; other requests get their texts.
4. Many more requests: the memory of the server's process.
5. Only where `--parts` names it, `transformers`: the words per second of `transformers serve` with an export.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from urllib.parse import urlsplit

import torch
from support.stand_in import StandIn
from support.stand_in import serving as standing

from hf_adafuse import AdaFuseEnsemble, export_adafuse
from hf_adafuse.confidence.answer_text import cut_at
from hf_adafuse.demo import NAMES, data, load_member

MODEL, DYING = "ensemble", "dying"
BATCH = 8
JSON = {"Content-Type": "application/json"}
SETTINGS = [{"num_branches": 1}, {"margin_threshold": 0.3, "max_words": 2}, {"method": "unite", "top_k": 4}]
STOPS = [["a"], ["e", "or"], [" "]]


class Process:
    """
    A server in a process of its own.

    Attributes:
        process (`subprocess.Popen`), host (`str`), port (`int`)
    """

    @property
    def memory(self):
        """The bytes of the process that are in memory."""
        return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())[1]) * 1024

    @property
    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=300)

    def get(self, path):
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def ask(self, payload, on_text=lambda: None):
        """As of [`ask`], by a connection of its own."""
        with contextlib.closing(self.connect()) as connection:
            return ask(connection, payload, on_text)


class Server(Process):
    """
    `hf-adafuse serve` in a process of its own: an ensemble of two members, and one in which the second is behind a
    server that may die.

    Args:
        members (`list[str]`, *optional*): the folders of two models; the demo's first two by default.

    Attributes:
        url (`str`), pid (`int`)
        log (`str`): what it has written so far.
    """

    def __init__(self, members=None, max_waiting=512):
        self._stack = contextlib.ExitStack()
        self._members, self._max_waiting = members, max_waiting

    def __enter__(self):
        with self._stack:
            models = self._stack.enter_context(as_file(files("hf_adafuse.demo") / "models"))
            members = self._members or [str(models / name) for name in NAMES[:2]]
            self.pair = [load_member(one) for one in members]
            self.member_server = self._stack.enter_context(MortalServer(StandIn(*self.pair[1])))
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            dying = {"members": [members[0], f"vllm:{self.member_server.url}"]}
            (folder / "file.yaml").write_text(json.dumps({"ensembles": {MODEL: {"members": members}, DYING: dying}}))
            self._log = self._stack.enter_context((folder / "log").open("w+"))
            command = [sys.executable, "-m", "hf_adafuse", "serve", "--ensembles", str(folder / "file.yaml")]
            command += ["--dtype", "float32"]  # the demo saves fewer bits
            command += ["--port", "0", "--max-batch-size", str(BATCH), "--max-waiting", str(self._max_waiting)]
            command += ["--prefix-cache-mib", "16", "--served-tokenizer", members[1]]
            seconds = 1 if self._members is None else 60
            for option in (f"deadline={seconds}", f"timeout={seconds}", "retries=0"):
                command += ["--served-option", option]
            # Matrices this small are as fast on one thread.
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
            )
            self._stack.enter_context(self.process.stdout)
            self._stack.callback(self._end)
            line = self.process.stdout.readline()
            if " at http" not in line:
                raise RuntimeError(f"the server has not started: {self.log}")
            self.url = re.search(r"http://\S+", line)[0]
            self.host, self.port = urlsplit(self.url).hostname, urlsplit(self.url).port
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _end(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    @property
    def log(self):
        self._log.flush()
        return Path(self._log.name).read_text()

    def counts(self):
        """What `/metrics` counts, by name."""
        found = Counter()
        for name, value in re.findall(r"^adafuse_(\w+)(?:\{[^}]*\})? (\S+)$", self.get("/metrics"), re.MULTILINE):
            found[name] += float(value)
        return found

    def wait_until_idle(self, seconds=60):
        """Until nothing runs or waits; whether that came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health = json.loads(self.get("/health"))
            if health["running"] == health["waiting"] == 0:
                return True
            time.sleep(0.05)
        return False


class TransformersServe(Process):
    """
    `transformers serve` with an export of the same ensemble. It needs what `pip install transformers[serving]` brings.

    Args:
        pair (`list`): two members, each a model and its tokenizer.

    Attributes:
        model (`str`): the name of the ensemble there.
    """

    def __init__(self, pair):
        self._stack, self._pair = contextlib.ExitStack(), pair

    def __enter__(self):
        with self._stack:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            (main, tokenizer), (assistant, other) = self._pair
            self.model = str(export_adafuse(folder / "ensemble", main, tokenizer, [assistant], [other], True))
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.host, self.port = free.getsockname()
            command = [str(Path(sys.executable).with_name("transformers")), "serve", self.model]
            command += ["--trust-remote-code", "--device", "cpu", "--dtype", "float32"]
            command += ["--host", self.host, "--port", str(self.port)]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
            log = self._stack.enter_context((folder / "log").open("w"))
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            self._stack.callback(self._end)
            while True:
                with contextlib.suppress(OSError):
                    self.get("/health")
                    break
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server has not started: {(folder / 'log').read_text()}")
                time.sleep(0.2)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _end(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class MortalServer:
    """The server of a member, behind a wire that can be cut: then nothing listens at its address, and its connections
    are broken, as if its process had been killed."""

    def __init__(self, stand_in):
        self._stand_in, self._sockets, self._port, self._listener = stand_in, [], 0, None

    def __enter__(self):
        self._serving = standing(self._stand_in)
        self._behind = urlsplit(self._serving.__enter__())
        self.live()
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    def __exit__(self, *error):
        self.die()
        self._serving.__exit__(*error)

    def live(self):
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def die(self):
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets = []

    def _accept(self, listener):
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.create_connection((self._behind.hostname, self._behind.port))
                self._sockets += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source, target):
        with contextlib.suppress(OSError):
            while received := source.recv(2**16):
                target.sendall(received)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class Request:
    """A completion that is asked for, and what `generate()` needs to give the same."""

    prompt: str
    body: dict
    call: dict = field(default_factory=dict)
    seed: int = 0
    model: str = MODEL

    @classmethod
    def by_lot(cls, rng, prompts):
        """One of mixed settings."""
        number, seed = rng.randint(1, 12), rng.randrange(1000)
        made = cls(rng.choice(prompts), {"max_tokens": number, "seed": seed}, {"max_new_tokens": number}, seed)
        made.body["stream"] = rng.random() < 0.5
        if rng.random() < 0.3:
            made.body["stop"] = made.call["stop_strings"] = rng.choice(STOPS)
        kind = rng.choice(["plain", "plain", "drawn", "settings"])
        if kind == "drawn":
            drawn = {"temperature": rng.choice([0.7, 1.2]), "top_p": rng.choice([0.9, 1.0])}
            made.body |= drawn
            made.call |= {**drawn, "do_sample": True}
        elif kind == "settings":
            made.body["adafuse"] = made.call["settings"] = rng.choice(SETTINGS)
        return made

    @property
    def payload(self):
        return json.dumps({"model": self.model, "prompt": self.prompt, **self.body}).encode()


@dataclass
class Answer:
    """
    What came of a request.

    Args:
        status (`int`), text (`str`), id (`str`)
        first (`float`), whole (`float`): seconds until the first text, and until the end.
        error (`dict`, *optional*): in the API's form.
        is_whole (`bool`): whether it came to its end.
    """

    status: int
    text: str
    id: str
    first: float
    whole: float
    error: dict | None = None
    is_whole: bool = True


def ask(connection, payload, on_text=lambda: None):
    """The answer to a body."""
    began = time.monotonic()
    connection.request("POST", "/v1/completions", payload, JSON)
    response = connection.getresponse()
    if response.status != 200 or "event-stream" not in response.headers["Content-Type"]:
        made = json.loads(response.read())
        seconds = time.monotonic() - began
        if "error" in made:
            return Answer(response.status, "", "", seconds, seconds, made["error"])
        return Answer(response.status, made["choices"][0]["text"], made["id"], seconds, seconds)
    text, first, error, name, is_whole = "", None, None, "", False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            is_whole = True
            continue
        chunk = json.loads(line[6:])
        error = chunk.get("error", error)
        for choice in chunk.get("choices", ()):
            name, text = chunk["id"], text + (choice.get("text") or "")
            if choice.get("text"):
                first = first or time.monotonic() - began
                on_text()
    whole = time.monotonic() - began
    return Answer(200, text, name, first or whole, whole, error, is_whole)


def ask_all(server, requests, clients):
    """The answers to all requests, asked by so many clients at a time; and the seconds that it took."""
    connections = threading.local()

    def one(request):
        if not hasattr(connections, "own"):
            connections.own = stack.enter_context(contextlib.closing(server.connect()))
        return ask(connections.own, request.payload)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
        began = time.monotonic()
        answers = list(pool.map(one, requests))
        return answers, time.monotonic() - began


class Alone:
    """The texts that `generate()` gives without a server, each for one prompt alone."""

    def __init__(self, pair):
        self.pair = pair
        self.ensemble = AdaFuseEnsemble(pair)
        self._known = {}

    def text(self, request):
        call = {"do_sample": False, **request.call}
        key = json.dumps([request.prompt, call, request.seed if call["do_sample"] else 0], sort_keys=True)
        if key not in self._known:
            if settings := call.pop("settings", None):
                _, config = self.ensemble.model._adafuse_arguments({})
                call["adafuse_config"] = config.changed(settings)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(request.seed)
                rounds = self.ensemble.rounds([request.prompt], **call)[0]
            self._known[key] = cut_at(rounds.text, request.call.get("stop_strings") or [])
        return self._known[key]


def check_load(server, alone, number, clients, seed=0):
    """Requests of mixed settings at once: how many were lost or doubled or got another text, and the seconds."""
    rng, prompts = random.Random(seed), [one.prompt for one in data.held_out(64)]
    requests = [Request.by_lot(rng, prompts) for _ in range(number)]
    before = server.counts()
    answers, _ = ask_all(server, requests, clients)
    server.wait_until_idle()
    counted = server.counts() - before
    wrong = [one for one, made in zip(requests, answers, strict=True) if made.text != alone.text(one)]
    streamed = [made for one, made in zip(requests, answers, strict=True) if one.body["stream"]]
    ids = [one.id for one in answers if one.id]
    return {
        "requests": number,
        "lost": sum(one.status != 200 or not one.is_whole or one.error is not None for one in answers),
        "doubled": len(ids) - len(set(ids)) + max(0, int(counted["calls_total"]) - number),
        "other texts": len(wrong),
        "texts": len({one.text for one in answers}),
        "first text, s": percentiles([one.first for one in streamed]),
        "whole, s": percentiles([one.whole for one in answers]),
    }


def cut_into(texts, sizes):
    """Pieces of these sizes."""
    rest = iter(texts)
    return [list(itertools.islice(rest, size)) for size in sizes]


def check_speed(server, alone, number, clients, new_tokens=16):
    """Words per second of the server and of one call of `generate()` with the same batch size. No prompt is asked
    twice, of which the server would know the beginning: as many are asked as there are questions for."""
    prompts = [one.prompt for one in data.held_out()]
    number = min(number, (len(prompts) - BATCH) // 2)
    warm_up, *forms = cut_into(prompts, [BATCH, number, number])
    body = {"max_tokens": new_tokens, "temperature": 0}
    made = {}
    for name, prompts in zip(["whole", "streamed"], forms, strict=True):
        requests = [Request(prompt, {**body, "stream": name == "streamed"}) for prompt in [*warm_up, *prompts]]
        ask_all(server, requests[:BATCH], clients)
        requests = requests[BATCH:]
        before, cpu = server.counts(), server.cpu_seconds
        answers, seconds = ask_all(server, requests, clients)
        cpu, words = server.cpu_seconds - cpu, (server.counts() - before)["words_total"]
        made[name] = {"words/s": words / seconds, "words/CPU s": words / cpu}
    call = {"do_sample": False, "max_new_tokens": new_tokens, "max_batch_size": BATCH}
    alone.ensemble.rounds(warm_up, **call)
    began, cpu = time.monotonic(), time.process_time()
    rounds = alone.ensemble.rounds(prompts, **call)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    words = sum(len(one.words) for each in rounds for one in each)
    made["run"] = {"words/s": words / seconds, "words/CPU s": words / cpu}
    made["other texts"] = sum(one.text != each.text for one, each in zip(answers, rounds, strict=True))
    return made


def check_transformers(alone, number, clients, new_tokens=16):
    """Words per second of `transformers serve` with an export of the same members, and how many texts are others."""
    prompts, made = [one.prompt for one in data.held_out(number)], {}
    call = {"do_sample": False, "max_new_tokens": new_tokens, "max_batch_size": BATCH}
    rounds = alone.ensemble.rounds(prompts, **call)
    words = sum(len(one.words) for each in rounds for one in each)
    with TransformersServe(alone.pair) as server:
        for name, is_streamed in [("whole", False), ("streamed", True)]:
            body = {"max_tokens": new_tokens, "temperature": 0, "stream": is_streamed}
            requests = [Request(prompt, body, model=server.model) for prompt in prompts]
            ask_all(server, requests[:1], 1)  # it loads the assistant
            cpu = server.cpu_seconds
            answers, seconds = ask_all(server, requests, clients)
            cpu = server.cpu_seconds - cpu
            made[name] = {"words/s": words / seconds, "words/CPU s": words / cpu}
            made[f"{name}: lost"] = sum(one.status != 200 or one.error is not None for one in answers)
            pairs = zip(answers, rounds, strict=True)
            made[f"{name}: other texts"] = sum(one.text != each.text for one, each in pairs)
            made[f"{name}: first text, s"] = percentiles([one.first for one in answers])
            made[f"{name}: whole, s"] = percentiles([one.whole for one in answers])
    return made


NO_JSON = [b"", b"{", b'{"model": }', b"\xff\xfe", b'{"model": "ensemble"', b"[" * 50_000, b"null", b"[]", b'"x"']
WRONG = [
    {"prompt": 7}, {"prompt": {"a": 1}}, {"prompt": []}, {"prompt": None}, {"max_tokens": "many"}, {"max_tokens": -1},
    {"max_tokens": 1.5}, {"temperature": "hot"}, {"temperature": 9}, {"stop": [1]}, {"stop": ""}, {"n": 0}, {"n": 1000},
    {"seed": -1}, {"seed": 2**70}, {"stream": "maybe"}, {"adafuse": 1}, {"adafuse": {"num_branches": "two"}},
    {"adafuse": {"method": "none"}}, {"adafuse": {"pattern": "(a+)+$"}}, {"model": 3}, {"model": "none"}, {"more": 1},
    {"response_format": {"type": "json_schema"}}, {"logprobs": 99}, {"prompt": "x" * 1_100_000},
]  # fmt: skip
LONG = {"model": MODEL, "prompt": "Question: What is the capital of Peru?\nAnswer:", "max_tokens": 64}


class Faults:
    """What clients and the server of a member do wrong. Each gives `"answered"`, `"dropped"` where the client has left,
    or what was unclean."""

    kinds = ("gone in mid-stream", "gone", "half a body", "no JSON", "wrong types", "large body", "member dies")

    def __init__(self, server):
        self.server, self._member = server, threading.Lock()

    def cause(self, kind, rng):
        """One of a kind."""
        try:
            return getattr(self, f"_{kind.replace(' ', '_').replace('-', '_').lower()}")(rng)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _raw(self, payload, length=None):
        connection = socket.create_connection((self.server.host, self.server.port), timeout=300)
        length = len(payload) if length is None else length
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (length, payload))
        return connection

    @staticmethod
    def _leave(connection, rng):
        if rng.random() < 0.5:  # without a word: the connection is reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        return "dropped"

    def _gone_in_mid_stream(self, rng):
        connection, received = self._raw(json.dumps({**LONG, "stream": True, "stop": ["#"]}).encode()), b""
        while b'"text"' not in received:
            if not (new := connection.recv(2**16)):
                connection.close()
                return f"the stream has not begun: {received!r}"
            received += new
        return self._leave(connection, rng)

    def _gone(self, rng):
        connection = self._raw(json.dumps(LONG).encode())
        time.sleep(rng.random() * 0.05)
        return self._leave(connection, rng)

    def _half_a_body(self, rng):
        payload = json.dumps(LONG).encode()
        return self._leave(self._raw(payload[: rng.randrange(len(payload))], len(payload)), rng)

    def _refused(self, payload, statuses):
        answer = self.server.ask(payload)
        is_error = answer.error is not None and isinstance(answer.error.get("message"), str)
        return "answered" if is_error and answer.status in statuses else f"{answer.status} for {payload[:100]!r}"

    def _no_json(self, rng):
        return self._refused(rng.choice(NO_JSON), (400,))

    def _wrong_types(self, rng):
        return self._refused(json.dumps({**LONG, **rng.choice(WRONG)}).encode(), (400, 404))

    def _large_body(self, rng):
        payload = json.dumps({**LONG, "prompt": "x" * (rng.randint(5, 12) * 2**20)}).encode()
        if rng.random() < 0.5:
            return self._refused(payload, (413,))
        return self._refused(iter([payload[:1000], payload[1000:]]), (413,))  # in chunks, of no announced length

    def _member_dies(self, rng):
        """While its text is streamed, or before; then it lives again, and the text is whole."""
        with self._member:
            payload = json.dumps({**LONG, "model": DYING, "max_tokens": 12, "stream": True}).encode()
            before = self.server.ask(payload)
            if rng.random() < 0.5:
                self.server.member_server.die()
            died = self.server.ask(payload, self.server.member_server.die)
            self.server.member_server.die()
            # Its text may have been known already.
            is_clean = died.is_whole and (died.error is not None or died.text == before.text)
            if died.status != 200:
                is_clean = died.status in (502, 503) and died.error is not None
            self.server.member_server.live()
            after = self.server.ask(payload)
            if before.error or after.error or not before.text or after.text != before.text:
                return f"not as before: {before}, {after}"
            return "answered" if is_clean else f"{died}"


def check_faults(server, alone, number, clients, seed=0):
    """Faults among as many requests: how many were answered, dropped or unclean, and what became of the others."""
    rng, prompts = random.Random(seed), [one.prompt for one in data.held_out(64)]
    faults = Faults(server)
    work = [("fault", faults.kinds[k % len(faults.kinds)], random.Random(rng.random())) for k in range(number)]
    work += [("request", Request.by_lot(rng, prompts), None) for _ in range(number)]
    rng.shuffle(work)

    def do(one):
        what, given, own = one
        return faults.cause(given, own) if what == "fault" else server.ask(given.payload)

    with ThreadPoolExecutor(clients) as pool:
        made = list(pool.map(do, work))
    outcomes = [(given, found) for (what, given, _), found in zip(work, made, strict=True) if what == "fault"]
    others = [(given, found) for (what, given, _), found in zip(work, made, strict=True) if what == "request"]
    wrong = [found for request, found in others if found.status != 200 or found.text != alone.text(request)]
    unclean = [f"{kind}: {found}" for kind, found in outcomes if found not in ("answered", "dropped")]
    return {
        "faults": number,
        "answered": sum(found == "answered" for _, found in outcomes),
        "dropped": sum(found == "dropped" for _, found in outcomes),
        "unclean": unclean,
        "other requests with another answer": len(wrong),
        "is idle": server.wait_until_idle(),
        "tracebacks": server.log.count("Traceback"),
        "is alive": server.process.poll() is None,
    }


def check_memory(server, number, clients, seed=0, slices=20):
    """The MiB of the process after each slice of so many requests."""
    rng, prompts = random.Random(seed), [one.prompt for one in data.held_out(500)]
    found = []
    for _ in range(slices):
        ask_all(server, [Request.by_lot(rng, prompts) for _ in range(number // slices)], clients)
        server.wait_until_idle()
        found.append(round(server.memory / 2**20, 1))
    return {"requests": number, "MiB": found}


def percentiles(values):
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 3) for p in (50, 95)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--more", type=int, default=2000, help="requests over which the memory is read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--members", nargs=2, metavar="FOLDER", help="two models (default: the demo's first two)")
    parser.add_argument(
        "--parts", nargs="+", default=["load", "speed", "faults", "memory"], help="(default: load speed faults memory)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Server(args.members) as server:
        alone = Alone(server.pair)
        parts = {
            "load": lambda: check_load(server, alone, args.requests, args.clients, args.seed),
            "speed": lambda: check_speed(server, alone, args.requests, args.clients),
            "faults": lambda: check_faults(server, alone, args.faults, args.clients, args.seed),
            "memory": lambda: check_memory(server, args.more, args.clients, args.seed),
            "transformers": lambda: check_transformers(alone, args.requests, args.clients),
        }
        for name in args.parts:
            for key, value in parts[name]().items():
                print(f"{name:8} {key}: {json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
