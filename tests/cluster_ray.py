"""A proof on a real Ray cluster, on this machine: the job of docs/servers.md with two actors and 200 prompts, its
driver killed in the middle and started again. In the end every answer is there once, and is that of `hf-adafuse run`.

It is no test of pytest's: Ray is large. By hand, from the repository:

    python3 -m venv .venv-ray && .venv-ray/bin/pip install -q -c tests/constraints.txt -e ".[ray]"
    .venv-ray/bin/python tests/cluster_ray.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from hf_adafuse import demo
from hf_adafuse.demo.data import PROMPT

NUMBER = 200
ENOUGH = 50  # answers, after which the driver is killed

# Before the page's lines: with it, the job goes on where it was killed.
CHECKPOINT = """
import os
import ray

checkpoint = ray.data.checkpoint.CheckpointConfig("id", os.path.abspath("checkpoint"))
ray.data.DataContext.get_current().checkpoint_config = checkpoint
"""
# The page's settings, as flags.
FLAGS = ["--model", "A", "--assistant", "B", "--preset", "robust", "--template", PROMPT.replace("\n", "\\n")]


def main() -> int:
    """0 where it holds."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": str(uuid.uuid4())}  # the cluster is nobody else's
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder)
        command = [sys.executable, "-m", "hf_adafuse", "run", "questions.jsonl", "--output", "run.jsonl", *FLAGS]
        subprocess.run(command, cwd=folder, check=True)
        with cluster(folder) as (environment, head):
            job = [sys.executable, "-c", CHECKPOINT + page_block()]
            before = kill_in_the_middle(job, folder, environment, head)
            subprocess.run(job, cwd=folder, env=environment, check=True)
        return 0 if holds(folder, before) else 1


def page_block() -> str:
    """The page's lines. There `A` and `B` are names; here they are folders."""
    text = (Path(__file__).parent.parent / "hf_adafuse/docs/servers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(import ray\n.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return str(block)


def write_input(folder: Path) -> None:
    """The members, in float32, in which batches change no text; and the questions."""
    for place, (model, tokenizer) in zip("AB", demo.load_pair(), strict=True):
        model.to(torch.float32).save_pretrained(folder / place)
        tokenizer.save_pretrained(folder / place)
    head, tail = PROMPT.split("{question}")
    texts = [question.prompt.removeprefix(head).removesuffix(tail) for question in demo.test_questions(NUMBER)]
    lines = [json.dumps({"id": f"q{index}", "question": text}) for index, text in enumerate(texts)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[dict[str, str], psutil.Process]]:
    """Yields the environment of a driver, and the process that all of the cluster's come from."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--head", "--block", "--num-cpus=4", "--num-gpus=2", "--disable-usage-stats", f"--port={port}"]
    options += ["--node-ip-address=127.0.0.1", f"--temp-dir={folder}/ray"]
    log = folder / "cluster.log"
    with log.open("w") as file:
        command = [Path(sys.executable).with_name("ray"), "start", *options]
        started = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    head = psutil.Process(started.pid)
    try:
        wait(lambda: "Ray runtime started" in log.read_text(encoding="utf-8"), started, "the cluster")
        yield {**os.environ, "RAY_ADDRESS": f"127.0.0.1:{port}"}, head
    finally:
        for process in [head, *head.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait()


def kill_in_the_middle(
    job: list[str], folder: Path, environment: dict[str, str], head: psutil.Process
) -> dict[Path, bytes]:
    """Kills the driver; the files of answers whose checkpoint says that they are whole."""
    driver = subprocess.Popen(job, cwd=folder, env=environment)
    wait(lambda: len(records(folder / "answers")) >= ENOUGH, driver, "the first answers")
    driver.send_signal(signal.SIGKILL)
    actors = [pid for pid, title in titles(head) if "AdaFusePredictor" in title]
    driver.wait()
    wait(lambda: not {pid for pid, _ in titles(head)} & set(actors), None, "rid of the killed driver's actors")
    kept = {path: path.read_bytes() for path in (folder / "answers").iterdir() if is_whole(path, folder / "checkpoint")}
    say(f"killed: {len(actors)} actors, {len(records(folder / 'answers'))} answers, {len(kept)} files of them whole")
    return kept


def is_whole(path: Path, checkpoint: Path) -> bool:
    return (checkpoint / f"{path.stem}.parquet").exists()


def titles(head: psutil.Process) -> list[tuple[int, str]]:
    """The processes of the cluster, with what they call themselves."""
    found = []
    for process in head.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.append((process.pid, " ".join(process.cmdline())))
    return found


def holds(folder: Path, before: dict[Path, bytes]) -> bool:
    """Whether the answers are those of the command, each once, and those that were there are still the same files."""
    answers = {record["id"]: record for record in records(folder / "answers")}
    same = agreements(folder, answers)
    num_kept = sum(len(content.splitlines()) for path, content in before.items() if path.read_bytes() == content)
    num_all = len(records(folder / "answers"))
    say(f"in the end: {num_all} answers to {len(answers)} questions, {num_kept} from before the driver was killed")
    num_before = sum(len(content.splitlines()) for content in before.values())
    return all(same) and len(same) == num_all == len(answers) == NUMBER and 0 < num_before == num_kept < NUMBER


def agreements(folder: Path, answers: Mapping[str, Any]) -> list[bool]:
    """Per question, whether the answer to it, by its id, is the one of the command."""
    expected = [json.loads(line) for line in (folder / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("text", "words", "finish_reason", "error")
    same = [
        tuple(answers[record["input"]["id"]][name] for name in names) == tuple(record.get(name, "") for name in names)
        for record in expected
    ]
    say(f"{sum(same)} of {len(same)} are those of the command")
    return same


def records(folder: Path) -> list[dict[str, Any]]:
    """What is in the files of a folder; a file that is being written may lack its end."""
    lines = [line for path in sorted(folder.glob("*.json")) for line in path.read_bytes().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def wait(is_so: Callable[[], bool], process: subprocess.Popen[bytes] | None, what: str, seconds: float = 300) -> None:
    """Until it is so."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise RuntimeError(f"did not get {what}")
        time.sleep(0.01)


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
