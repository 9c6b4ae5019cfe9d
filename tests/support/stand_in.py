"""Stand-ins for servers: a real small model behind the endpoints of vLLM, SGLang and llama.cpp, in the shapes that
these have (as vLLM 0.32 and llama.cpp b11549 answer; SGLang by its documentation). Every request reads whole texts.
"""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from .reference import BYTE_OF


class StandIn:
    """
    Answers as one kind of server does.

    Args:
        model, tokenizer: what is served.
        kind (`str`): `"vllm"`, `"sglang"` or `"llamacpp"`.
        seconds (`float`): that every request takes at least.

    Attributes:
        requests (`list`): path, body and headers of each.
        served_name (`str`, *optional*): what SGLang was told to call the model, by default as `name`, its path.
        is_new (`bool`): whether SGLang's paths are those of newer versions.
    """

    served_name, is_new = None, False

    def __init__(self, model, tokenizer, kind="vllm", name="tiny", seconds=0.0, max_length=None, noise=0.0):
        self.model, self.tokenizer, self.kind, self.name = model, tokenizer, kind, name
        self.seconds, self.noise = seconds, noise
        self.max_length, self.num_slots = max_length or model.config.max_position_embeddings, 4
        eos = model.generation_config.eos_token_id
        self.eos = set([eos] if isinstance(eos, int) else eos or [])
        self.requests = []
        self._lock, self._listing = threading.Lock(), threading.Lock()
        self._memory = {}
        self._asked = []  # bodies of completions that are under way
        self._spoilt = []  # those that others beside them have harmed

    def answer(self, path, body, headers):
        """The status and the answer."""
        self.requests.append((path, body, headers))
        with self._beside_others(path, body):
            status, answer = self._answer(path, body, headers)
        if path == "/completion" and any(one is body for one in self._spoilt):
            return 500, {"error": "Context size has been exceeded."}
        return status, answer

    @contextmanager
    def _beside_others(self, path, body):
        """vLLM 0.32 samples what is under way at the same time together, named tokens or not; llama.cpp's slots share
        its context, and all at work lose their texts where it is too little."""
        if path not in ("/v1/completions", "/completion"):
            yield
            return
        with self._listing:  # two that came or left at once would write over each other's lists
            self._asked.append(body)
            asked = list(self._asked)
            if path == "/completion":
                sizes = sorted(len(ids) + one["n_predict"] for one in asked for ids in one["prompt"])
                self._spoilt += asked if sum(sizes[-self.num_slots :]) > self.max_length else []
            else:
                plain = [one for one in asked if "logprob_token_ids" not in one]
                self._spoilt += plain if len(plain) < len(asked) else []
        try:
            yield
        finally:
            with self._listing:
                self._asked = [one for one in self._asked if one is not body]

    def _answer(self, path, body, headers):
        time.sleep(self.seconds)
        handler = {
            "/v1/models": self.models,
            "/v1/completions": self.completions,
            "/tokenize": self.tokenize,
            "/get_model_info": self.model_info if not self.is_new else None,
            "/get_server_info": self.server_info if not self.is_new else None,
            "/model_info": self.model_info if self.is_new else None,
            "/server_info": self.server_info if self.is_new else None,
            "/generate": self.generate,
            "/props": lambda body, headers: {
                "default_generation_settings": {"n_ctx": self.max_length},
                "total_slots": self.num_slots,
            },
            "/completion": self.completion,
        }.get(path)
        if handler is None:
            return 404, {"error": "no such path"}
        with self._lock:
            try:
                return 200, handler(body, headers)
            except PermissionError as error:
                return 400, {"error": str(error)}

    def log_probs(self, ids):
        key = tuple(ids)
        if key not in self._memory:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids]), use_cache=False).logits[0].float()
            for end, row in enumerate(logits.log_softmax(-1), start=1):
                self._memory.setdefault(key[:end], row)
        noise = self.noise * len(self.requests) % 0.5
        return self._memory[key] - noise

    def steps(self, ids, count, bias=()):
        """Greedy: per step the log-probabilities and the token, which is the best one with `bias` added."""
        ids, found = list(ids), []
        if len(ids) + count > self.max_length:
            raise PermissionError("the text is too long")
        while len(found) < count:
            row = self.log_probs(ids)
            biased = row.clone()
            for token, value in bias:
                biased[token] += value
            found.append((row, int(biased.argmax())))
            ids.append(found[-1][1])
            if ids[-1] in self.eos:
                break
        return found

    def model_info(self, body, headers):
        return {"model_path": self.name, "tokenizer_path": self.name}

    def server_info(self, body, headers):
        return {"served_model_name": self.served_name or self.name, "max_req_input_len": self.max_length}

    def models(self, body, headers):
        entry = {"id": self.name, "root": self.name, "max_model_len": self.max_length}
        return {"data": [entry | {"meta": {"n_vocab": self.model.config.vocab_size}}]}

    def tokenize(self, body, headers):
        return {"tokens": self.tokenizer(body.get("prompt", body.get("content")), add_special_tokens=False).input_ids}

    def completions(self, body, headers):
        if body["model"] != self.name:
            raise PermissionError("no such model")
        choices = []
        for index, ids in enumerate(body["prompt"]):
            entries, tokens = [], []
            for row, token in self.steps(ids, body["max_tokens"]):
                named = body.get("logprob_token_ids")  # with these, only the most likely token beside them
                known = {token, *(row.topk(body.get("logprobs", 1)).indices.tolist() if named is None else named)}
                said = {f"token_id:{t}": float(row[t]) for t in known}
                if any(one is body for one in self._spoilt):
                    said = {"token_id:0": -9999.0} | {f"token_id:{token}": float(row[token])}
                entries.append(said)
                tokens.append(f"token_id:{token}")
            prompt = [None, *({str(t): {"logprob": float(self.log_probs(ids[:i])[t])}} for i, t in enumerate(ids) if i)]
            logprobs = {"top_logprobs": entries, "tokens": tokens}
            choices.append({"index": index, "logprobs": logprobs, "prompt_logprobs": prompt})
            if body.get("return_token_ids"):
                made = [int(name.removeprefix("token_id:")) for name in tokens]
                choices[-1] |= {"prompt_token_ids": ids, "token_ids": made}
        name = headers.get("X-Request-Id")
        return {"id": f"cmpl-{name}", "model": self.name, "choices": choices[::-1], "usage": {}}

    def generate(self, body, headers):
        answers = []
        for ids, name, top, asked in zip(
            body["input_ids"], body["rid"], body["top_logprobs_num"], self.named_of(body), strict=True
        ):
            steps = self.steps(ids, body["sampling_params"]["max_new_tokens"])
            info = {
                "id": name,
                "cached_tokens": 0,
                "input_token_logprobs": [
                    [float(self.log_probs(ids[:i])[t]) if i else None, t, None] for i, t in enumerate(ids)
                ],
                "output_token_logprobs": [[float(row[token]), token, None] for row, token in steps],
                "output_top_logprobs": [
                    [[float(row[t]), t, None] for t in row.topk(top).indices.tolist()] for row, _ in steps
                ],
            }
            if asked:
                info["output_token_ids_logprobs"] = [[[float(row[t]), t, None] for t in asked] for row, _ in steps]
            answers.append({"text": "", "meta_info": info})
        return answers

    @staticmethod
    def named_of(body):
        """As SGLang reads `token_ids_logprob`: it looks at the first one, and takes no `None` in a list."""
        named = body.get("token_ids_logprob") or [[]]
        if not isinstance(named[0], list):
            raise PermissionError("token_ids_logprob must be a flat list of integers")
        return named if len(named) == len(body["input_ids"]) else named * len(body["input_ids"])

    def completion(self, body, headers):
        answers = []
        for index, ids in enumerate(body["prompt"]):
            data, tokens, entries = b"", [], []
            for row, token in self.steps(ids, body["n_predict"], body.get("logit_bias", ())):
                data += token_bytes(self.tokenizer, token)
                tokens.append(token)
                if not ends_within_character(data):  # else it says nothing of the token
                    best = row.topk(min(body["n_probs"], len(row))).indices.tolist()
                    top = [{"id": t, "logprob": self.said(row[t])} for t in best]
                    entries.append({"id": token, "logprob": self.said(row[token]), "top_logprobs": top})
            said = {"index": index, "model": self.name, "tokens": tokens, "tokens_evaluated": len(ids)}
            said |= {"timings/cache_n": 0, "generation_settings/seed": body["seed"]}
            if entries:
                said["completion_probabilities"] = entries
            answers.append({name: said[name] for name in body["response_fields"] if name in said})
        return answers if len(answers) > 1 else answers[0]

    @staticmethod
    def said(log_prob):
        """The logarithm of a probability in 32 bits."""
        return float(log_prob) if float(log_prob.exp()) else -3.4028234663852886e38


def token_bytes(tokenizer, token):
    """The text of a token, as bytes; none of special ones."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if token in tokenizer.all_special_ids:
        return b""
    if "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder):
        return bytes(BYTE_OF[char] for char in piece) if all(char in BYTE_OF for char in piece) else piece.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.encode()


def ends_within_character(data):
    """By the first byte of the last character, as llama.cpp looks at it."""
    for length in range(1, min(4, len(data)) + 1):
        first = data[-length]
        if first >= 0xC0:
            return length < (2 if first < 0xE0 else 3 if first < 0xF0 else 4)
    return False


@contextmanager
def serving(stand_in):
    """The URL of a stand-in, or of anything else with `answer(path, body, headers)`, for as long as it is served."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else every answer but a connection's first waits 40 ms for an acknowledgement

        def do_POST(self):
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            status, answer, *more = stand_in.answer(self.path, body, dict(self.headers))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(ConnectionError):  # who asked may have given up
                self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
