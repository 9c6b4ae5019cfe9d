"""`Engine`: the thread that decodes the calls of many clients in running batches, pass by pass.

Calls with the same ensemble and settings share a batch. Batches run one pass each in turn. All of them together hold at
most `max_batch_size` calls, and further calls wait. Clients take turns in getting a place
([`~hf_adafuse.serve.fairness.FairQueue`]).

A server that hangs holds up the pass that waits for it. So calls with members behind servers are decoded by an engine
of their own ([`Engine.of`]), one for each set of servers. It takes turns with the main engine, except while it waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from transformers.utils import logging

from ..decoding.progress import AdaFuseDecodingError
from ..servers.daemon_threads import while_waiting
from ..servers.queries import is_absence
from ..trees.model_facts import ModelFacts, unchanged_models
from ..trees.shared_prefix import KeptPrefixes, prefix_caching
from .fairness import FairQueue
from .jobs import Job, JobBatch
from .turns import StoppedError, Turns

logger = logging.get_logger(__name__)
# The default of `max_prefix_bytes`. It holds the keys and values of 11,000 tokens of SmolLM2-135M in float32.
MAX_PREFIX_BYTES = 512 * 2**20


class QueueFullError(Exception):
    """Too many calls wait already. `seconds` (`int`): when to try again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"try again in {seconds} s")
        self.seconds = seconds


class Engine:
    """
    The thread that decodes.

    Args:
        max_batch_size (`int`): the most calls that are decoded at a time.
        max_waiting (`int`): the most calls that wait for a place. A client without a waiting call still gets a place,
            until twice as many calls wait.
        max_prefix_bytes (`int`): the most bytes of keys and values of earlier prompts and texts that are kept for later
            calls that begin alike. The memory of running calls comes on top.
        main (`Engine`, *optional*): the engine that gives turns to this one, where this one decodes for members behind
            servers.

    Attributes:
        num_passes (`int`), num_jobs (`int`), num_refused (`int`): how many passes have been run, and how many calls
            have been taken and refused.
        prefixes (`KeptPrefixes`): the keys and values that are kept for later calls.
        facts (`ModelFacts`): what is known of the members' models, which nobody changes while the engine runs.
    """

    def __init__(
        self,
        max_batch_size: int = 8,
        max_waiting: int = 64,
        max_prefix_bytes: int = MAX_PREFIX_BYTES,
        main: Engine | None = None,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_waiting = max_waiting
        self._main = main
        self._beside: dict[frozenset[str], Engine] = {}
        self.num_passes = 0
        self.num_jobs = 0
        self.num_refused = 0
        self._waiting: FairQueue[Job] = FairQueue()
        self._alone: deque[Job] = deque()  # whose batch has failed
        self._lanes: deque[JobBatch] = deque()
        self._running: dict[Job, JobBatch] = {}
        self._cancelled: set[Job] = set()
        self._thinking: list[Turns] = []
        self._reserved: Counter[str] = Counter()  # places, by client
        self._changed = threading.Condition()
        self._is_stopping = False
        self._durations: deque[float] = deque([1.0], maxlen=50)
        self._started: dict[Job, float] = {}
        self.prefixes: KeptPrefixes = KeptPrefixes(max_prefix_bytes) if main is None else main.prefixes
        self.facts: ModelFacts = ModelFacts() if main is None else main.facts
        self._thread = threading.Thread(target=self._run, name="hf-adafuse engine", daemon=True)

    def of(self, servers: frozenset[str]) -> Engine:
        """
        The engine that decodes calls with members behind these servers: this one where there are none, else one that
        is started and stopped with this one, has as many places, and is made before this one starts.
        """
        if not servers:
            return self
        if servers not in self._beside:
            self._beside[servers] = Engine(self.max_batch_size, self.max_waiting, main=self)
        return self._beside[servers]

    @property
    def all(self) -> list[Engine]:
        """This engine and the engines beside it."""
        return [self, *self._beside.values()]

    def start(self) -> None:
        """Start the threads of this engine and of the engines beside it."""
        for one in self.all:
            one._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """
        End after the pass that is running. Calls that have not ended get a [`StoppedError`]. The thread of an engine
        beside this one, which may wait for a server, is not waited for: it runs no model any more.

        Args:
            timeout (`float`, *optional*): how long to wait for the pass, in seconds.
        """
        self.begin_to_stop()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def begin_to_stop(self) -> None:
        """Begin what `stop` does, without waiting for the end. May be called by a signal handler."""
        for one in self.all:
            one._begin_to_stop()

    def _begin_to_stop(self) -> None:
        self._is_stopping = True
        # A signal handler interrupts the main thread, which may hold the lock: another thread waits for it.
        threading.Thread(target=self._wake, daemon=True).start()

    @property
    def num_running(self) -> int:
        """How many calls are in a batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many calls are in the queue, or are being planned and have a place in it."""
        return len(self._waiting) + self._reserved.total()

    def reserve(self, number: int = 1, client: str = "") -> None:
        """
        Keep places in the queue for calls of a client that are still being planned. `submit` takes each of them,
        `release` gives it back.

        Raises:
            QueueFullError: the queue has fewer free places.
            StoppedError: the engine has stopped.
        """
        with self._changed:
            if self._is_stopping:
                raise StoppedError("the server is shutting down")
            free = self.max_batch_size - len(self._running) + self.max_waiting
            if not self._reserved[client] and all(job.client != client for job in self._waiting):
                free += self.max_waiting  # no client's queue shuts out all others
            if self.num_waiting + len(self._alone) + number > free:
                self.num_refused += 1
                mean = sum(self._durations) / len(self._durations)
                raise QueueFullError(max(1, round(mean * (self.num_waiting + 1) / self.max_batch_size)))
            self._reserved[client] += number

    def release(self, number: int = 1, client: str = "") -> None:
        """Give back places that `reserve` has kept."""
        with self._changed:
            self._take_reserved(number, client)

    def _take_reserved(self, number: int, client: str) -> None:
        self._reserved[client] -= number
        if not self._reserved[client]:
            del self._reserved[client]

    def submit(self, job: Job) -> None:
        """Put a call that has a reserved place into the queue."""
        with self._changed:
            self._take_reserved(1, job.client)
            if job.is_cancelled:
                return
            if not self._is_stopping:
                self._waiting.add(job.client, job)
                self.num_jobs += 1
                self._changed.notify()
                return
        job.on_error(StoppedError("the server is shutting down"))

    def cancel(self, job: Job) -> None:
        """Cancel a call: it leaves before the next pass."""
        with self._changed:
            job.is_cancelled = True
            self._cancelled.add(job)
            self._changed.notify()

    def add_turns(self, turns: Turns) -> None:
        """
        From now on, give the thread of `turns` one turn between two passes.

        Raises:
            StoppedError: the engine stops.
        """
        with self._changed:
            if self._is_stopping:
                raise StoppedError("the server is shutting down")
            self._thinking.append(turns)
            self._changed.notify()

    def remove_turns(self, turns: Turns) -> None:
        """Give no more of these turns."""
        with self._changed:
            if turns in self._thinking:
                self._thinking.remove(turns)

    def _think(self) -> None:
        """Give one turn to each thread that waits for one: a member that thinks, or another engine."""
        with self._changed:
            thinking = list(self._thinking)
        for turns in thinking:
            turns.give()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        caching = prefix_caching(self.prefixes) if self.prefixes.max_bytes else nullcontext()
        with caching, unchanged_models(self.facts):
            while True:
                with self._changed:
                    while not (self._is_stopping or self._lanes or len(self._waiting) or self._alone or self._thinking):
                        self._cancelled.clear()
                        self._changed.wait()
                if self._is_stopping:
                    break
                with suppress(StoppedError), self._turn():
                    self._leave()
                    self._admit()
                    self._think()
                    if self._lanes:
                        self._step(self._lanes[0])
                        self._lanes.rotate(-1)
                        self._lanes = deque(lane for lane in self._lanes if not lane.batch.is_over)
        with self._changed:
            thinking = list(self._thinking)
        for turns in thinking:
            turns.cancel(StoppedError("the server is shutting down"))
            turns.give()
        # An engine that waits for a server could not tell its calls before the server has answered.
        for one in self.all:
            one._give_up()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """
        Within this context no other thread runs the models, except while this one waits for a server.

        Raises:
            StoppedError: the engine that gives turns stops.
        """
        if self._main is None:
            yield
            return
        turns = Turns(self._main)
        try:
            turns.begin()
            with while_waiting(turns.end, turns.begin):
                yield
        finally:
            turns.end()

    def _give_up(self) -> None:
        """End all calls that have not ended with a [`StoppedError`]."""
        with self._changed:
            left = [*self._running, *self._alone, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            self._alone.clear()
        for job in left:
            job.on_error(StoppedError("the server is shutting down"))

    def _leave(self) -> None:
        """Remove cancelled calls from their batches or from the queue."""
        with self._changed:
            cancelled = self._cancelled
            self._cancelled = set()
            for job in cancelled.intersection(self._waiting):
                self._waiting.remove(job.client, job)
            for job in cancelled.intersection(self._alone):
                self._alone.remove(job)
        for job in cancelled.intersection(self._running):
            if self._running[job].cancel(job):
                self._end(job)
            else:  # a server reads for it: try again after that
                with self._changed:
                    self._cancelled.add(job)

    def _admit(self) -> None:
        """Fill free places: first with calls whose batch has failed, each of which runs in a batch of its own, then
        with calls from the queue."""
        while len(self._running) < self.max_batch_size:
            with self._changed:
                is_alone = bool(self._alone)
                if not is_alone and not len(self._waiting):
                    return
                job = self._alone.popleft() if is_alone else self._waiting.pop()
            lane = None if is_alone else next((one for one in self._lanes if one.takes(job.plan)), None)
            self._started.setdefault(job, time.monotonic())
            try:
                if lane is None:
                    lane = JobBatch(job, is_alone, self._end)
                    self._lanes.append(lane)
                else:
                    lane.add(job)
            except Exception as error:  # it concerns this call alone
                self._started.pop(job, None)
                self._tell_error(job, error)
                continue
            self._running[job] = lane

    def _step(self, lane: JobBatch) -> None:
        try:
            lane.step()
            self.num_passes += 1
        except Exception as error:
            # Drop the traceback, which holds on to the tensors of the failed pass.
            self._fail(lane, error.with_traceback(None))

    def _fail(self, lane: JobBatch, error: Exception) -> None:
        """Deal with a failed pass. Where several calls shared it, each is decoded once more, alone. A call that was
        alone has failed. Where a server is away or the error is unexpected, all its calls have failed."""
        jobs = list(lane.jobs.values())
        lane.jobs = {}
        for job in jobs:
            self._running.pop(job, None)
        if len(jobs) == 1 or is_absence(error) or not isinstance(error, AdaFuseDecodingError):
            for job in jobs:
                self._started.pop(job, None)
                self._tell_error(job, error)
            return
        for job in jobs:
            job.restart()
        with self._changed:
            self._alone.extend(jobs)

    def _end(self, job: Job) -> None:
        self._running.pop(job, None)
        began = self._started.pop(job, None)
        if began is not None and not job.is_cancelled:
            self._durations.append(time.monotonic() - began)

    def _tell_error(self, job: Job, error: Exception) -> None:
        if not isinstance(error, (AdaFuseDecodingError, ValueError, StoppedError)):
            logger.error(f"A call failed unexpectedly: {type(error).__name__}: {error}")
        with suppress(Exception):
            job.on_error(error)
