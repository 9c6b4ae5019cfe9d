r"""llama.cpp's server for a GGUF file, in the foreground. Run by hand; nothing of it is collected by pytest.

    pip install xllamacpp          (into an environment of its own)
    python tests/support/llamacpp_server.py FILE.gguf --port 8080

It prints its URL once it answers, and ends with Ctrl-C. Then, with the model of that file as a transformers folder:

    python tests/check_servers.py --kind llamacpp --url http://127.0.0.1:8080 --model FOLDER --other FOLDER \
        --data QUESTIONS.jsonl

Each slot has a context of its own here, as with `llama-server --parallel 4`: what the server says of a text then
depends less on what else it reads. With `--shared` the slots share one, as with `llama-server` alone.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading

import xllamacpp


def parameters(args):
    params = xllamacpp.CommonParams()
    params.model.path = args.file
    params.hostnames, params.port = ["127.0.0.1"], args.port
    params.n_parallel, params.kv_unified = args.slots, args.shared
    params.n_ctx = args.context * (1 if args.shared else args.slots)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.verbosity = 1
    return params


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", type=int, default=4, help="texts that are read at the same time")
    parser.add_argument("--shared", action="store_true", help="the slots share one context")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot, or of all that share")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    server = xllamacpp.Server(parameters(args))
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        stopped.wait()


if __name__ == "__main__":
    main()
