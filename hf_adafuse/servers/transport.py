"""Requests to one server: how long an answer is waited for, which requests may be under way at the same time, and what
is done about answers that do not come.

Every request can be asked again without harm: it changes nothing but the server's cache.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .addresses import check_key_variable, checked_url, seconds_of, without_key
from .daemon_threads import begin, server_wait
from .queries import BadAnswer, ServerError, SpoiltAnswer

# Seconds. On some systems no thread can wait much longer.
_LONGEST_WAIT = 4_000_000.0


@dataclass(frozen=True)
class RetryPolicy:
    """
    How long a server is waited for, and how often it is asked again.

    Args:
        timeout (`float`): seconds without a byte after which an attempt is given up.
        deadline (`float`): seconds for a request with all its attempts. A server that is away or busy is asked again
            until then, but for the first question that it is asked.
        retries (`int`): attempts after answers that cannot be right, and after a first question without an answer.
    """

    timeout: float = 60.0
    deadline: float = 300.0
    retries: int = 5

    def __post_init__(self) -> None:
        for name in ("timeout", "deadline"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LONGEST_WAIT:
                raise ValueError(
                    f"`{name}` must be a number of seconds above 0 and of at most {_LONGEST_WAIT:g}, but is {value!r}. "
                    "Leave it out."
                )
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"`retries` must be a whole number of at least 0, but is {self.retries!r}. Leave it out.")


# As long as is waited where nothing else is said.
DEFAULT_RETRY_POLICY = RetryPolicy()

# Whether requests, each by what a kind of server says of it, may be under way together; of one alone nobody asks.
Rule = Callable[[Sequence[Any]], bool]


class RequestGate:
    """
    Lets requests to one server run at the same time where the server's rule allows it. Requests are let in by the time
    of their coming: a later one overtakes only where both may run together.

    Args:
        go_together (`Rule`): says whether the server may work on these requests at the same time.
    """

    def __init__(self, go_together: Rule) -> None:
        self._go_together = go_together
        self._changed = threading.Condition()
        self._waiting: list[tuple[Any, object]] = []  # what they are and who, in the order of their coming
        self._inside: list[tuple[Any, object]] = []

    @contextmanager
    def passing(self, what: Any, end: float) -> Iterator[None]:
        """Wait until this request may run beside all that are running. Raises `ServerError` where that takes longer
        than until `end` (by `time.monotonic()`)."""
        me = (what, object())
        try:
            with self._changed:
                self._waiting.append(me)
                self._let_in()
                if not self._changed.wait_for(lambda: me in self._inside, end - time.monotonic()):
                    raise ServerError("other requests have kept the server busy until the deadline")
            yield
        finally:
            with self._changed:
                (self._inside if me in self._inside else self._waiting).remove(me)
                self._let_in()

    def _let_in(self) -> None:
        """Who has waited longest, where it may, and with it all that may then."""
        if self._waiting and self._may_enter(self._waiting[0]):
            for one in list(self._waiting):
                if self._may_enter(one):
                    self._waiting.remove(one)
                    self._inside.append(one)
            self._changed.notify_all()

    def _may_enter(self, one: tuple[Any, object]) -> bool:
        return not self._inside or self._go_together([what for what, _ in [*self._inside, one]])


# Several objects may ask one server; in a forked process nobody comes out again.
_GATES: dict[tuple[int, str, Rule], RequestGate] = {}


def request_gate(url: str, go_together: Rule) -> RequestGate:
    """The gate of a server, one for all of this process that ask it by this rule. The rule must be hashable."""
    return _GATES.setdefault((os.getpid(), url, go_together), RequestGate(go_together))


T = TypeVar("T")

# Statuses after which the same request may succeed, beside all from 500 on: too busy, starting, or a proxy before it.
_PASSING = frozenset({408, 425, 429})
# Statuses from 500 on after which it may not: the server has no such method, or no such version of HTTP.
_LASTING = frozenset({501, 505})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds
# Seconds in which a server that is there answers something; after a deadline, in which an attempt may say why
_SHORT = 5.0
_GRACE = 0.5

# `turn(end)`: entered before an attempt and left after it; raises where it is not its turn until then.
Turn = Callable[[float], AbstractContextManager[None]]


class Connection:
    """
    The connection to one server. Any number of threads may use it.

    Args:
        url (`str`): `http://host:port` or `https://...`.
        api_key_env (`str`, *optional*): the environment variable that holds the key; read at each request, not kept.
        retry_policy (`RetryPolicy`): how long and how often an answer is waited for.
        allow_http (`bool`): whether another host than this one may be asked without encryption.

    Raises:
        ValueError: no such URL, plain http to another host, or no name of a variable.
        ImportError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        api_key_env: str | None = None,
        retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY,
        allow_http: bool = False,
    ) -> None:
        check_key_variable(api_key_env)
        self.url = checked_url(url, allow_http)
        self.api_key_env = api_key_env
        self.retry_policy = retry_policy
        self._httpx = _httpx()
        try:
            self._httpx.Request("GET", self.url)
        except (self._httpx.InvalidURL, UnicodeError) as error:
            raise ValueError(f"`url` must be a URL that can be asked, but is {url!r} ({error}). Correct it.") from error
        self._client: Any = None
        self._lock = threading.Lock()
        self._owner = -1  # connections do not live on in a forked process
        self.num_retries = 0
        self.num_absences = 0  # times that it may have been started anew
        self._last_answer = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """The seconds since the server last answered."""
        return time.monotonic() - self._last_answer

    def get(self, path: str, read: Callable[[Any], T]) -> T:
        """A GET request, retried as in [`post`]. It is the first question to a server, and gives up early where nothing
        answers."""
        with server_wait():
            return self._ask("GET", path, lambda request_id: None, lambda answer, _: read(answer), is_patient=False)

    def post(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[Any, str], T],
        name_requests: Callable[[dict[str, Any], str], dict[str, Any]] = lambda body, request_id: body,
        turn: Turn = lambda end: nullcontext(),
    ) -> T:
        """
        Send a POST request until there is an answer that can be read.

        Args:
            path (`str`): the path of the request, like `"/v1/completions"`.
            body (`dict`): the body of the request, sent as JSON.
            read (`Callable`): `read(answer, request_id)`; raises `BadAnswer` where it cannot be right, or whatever
                comes of an answer of another form.
            name_requests (`Callable`, *optional*): `name_requests(body, request_id)`: the body with the name of the
                request in it, where a server does not take it from the header `X-Request-Id`.
            turn (`Callable`, *optional*): `turn(end)`: a context for each attempt, to wait in for others until then
                (seconds, by `time.monotonic()`).

        Raises:
            ServerError: there is none within the deadline and the attempts, or the request is refused.
        """
        with server_wait():
            return self._ask("POST", path, lambda request_id: name_requests(body, request_id), read, turn=turn)

    def _ask(
        self,
        method: str,
        path: str,
        body: Callable[[str], Any],
        read: Callable[[Any, str], T],
        is_patient: bool = True,
        turn: Turn = lambda end: nullcontext(),
    ) -> T:
        end, reason, pause, num_left = time.monotonic() + self.retry_policy.deadline, "", 0.0, self.retry_policy.retries
        for number in itertools.count():
            time.sleep(pause)
            self.num_retries += number > 0
            request_id, wait, counts, is_silent = uuid.uuid4().hex, 0.0, True, False
            attempt = partial(self._once, method, path, body(request_id), request_id, end)
            try:
                with turn(end):
                    answer = _until(end, attempt)
                return _read(read, answer, request_id)
            except _Away as away:
                # An attempt that the deadline has cut short says less than the one before.
                is_cut = time.monotonic() >= end and reason not in ("", str(away))
                reason = f"{away} (before: {reason})" if is_cut else str(away)
                wait, counts, is_silent = away.wait, not is_patient, True
            except BadAnswer as error:
                reason, counts = f"its answer cannot be right: {error}", not isinstance(error, SpoiltAnswer)
            pause = max(wait, min(_FIRST_PAUSE * 2 ** min(number, 9), _LONGEST_PAUSE) * random.uniform(0.5, 1.0))
            num_left -= counts
            left = end - time.monotonic()
            if num_left < 0:
                break
            if left <= pause:
                asked = f" while it asks for {wait:g} s" if wait > max(left, 0.0) else ""
                reason += f"; the deadline of {self.retry_policy.deadline:g} s is over{asked}"
                break
        message = f"the server at {self.url} gives no answer to {path}: {reason}"
        # The first question is whether it is there: asked again, it would not answer either.
        raise ServerError(message, is_away=is_silent and not (is_patient and self._answers_anything()))

    def _answers_anything(self) -> bool:
        end = time.monotonic() + min(self.retry_policy.timeout, self.retry_policy.deadline, _SHORT)
        try:
            with suppress(BadAnswer):
                _until(end - _GRACE, partial(self._once, "GET", "/v1/models", None, uuid.uuid4().hex, end))
        except _Away:
            return False
        except ServerError as error:
            return error.status is not None  # a refusal is an answer, too
        return True

    def _once(self, method: str, path: str, body: Any, request_id: str, end: float) -> Any:
        """
        The answer to one attempt.

        Raises:
            _Away: there is none yet.
            ServerError: there will be none.
        """
        key, timeout = self._key(), min(self.retry_policy.timeout, max(end - time.monotonic(), 0.001))
        headers = {"X-Request-Id": request_id} | ({"Authorization": f"Bearer {key}"} if key else {})
        content = bytearray()
        try:
            with self._http().stream(method, path, json=body, headers=headers, timeout=timeout) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > end:
                        raise _Away("it is still answering")
        except self._httpx.HTTPError as error:
            self.count_absence()
            raise _Away(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        status = response.status_code
        if status in _PASSING or (status >= 500 and status not in _LASTING):
            if status >= 500:
                self.count_absence()
            raise _Away(f"status {status}", seconds_of(response.headers.get("Retry-After")))
        if 300 <= status < 400 and (address := response.headers.get("Location")):
            raise ServerError(
                f"the server at {self.url} redirects {path} to {without_key(key, address)[:300]}. Give that address, "
                f"without the {path} at its end",
                status,
            )
        if status != 200:
            said = without_key(key, content.decode("utf-8", "replace"))[:300]
            reason = f"status {status}, {said!r}"
            if status == 404 and "/v1" in urlsplit(self.url).path:
                reason += ". The URL must end before the path of a request"
            raise ServerError(f"the server at {self.url} refuses {path}: {reason}", status)
        self._last_answer = time.monotonic()
        try:
            return json.loads(content)
        except ValueError:
            raise BadAnswer("what it sends is no JSON") from None

    def count_absence(self) -> None:
        """Note that the server may have been restarted: it did not answer, or was not asked for long."""
        with self._lock:
            self.num_absences += 1

    def _key(self) -> str:
        """What the environment variable holds; empty where none is named."""
        if not self.api_key_env:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            # Without the name: who takes it for the key has given that.
            raise ServerError(f"the environment variable that `api_key_env` names for {self.url} is not set")
        if not (key.isascii() and key.isprintable()):
            raise ServerError(f"the environment variable {self.api_key_env} must hold a key in printable ASCII")
        return key

    def _http(self) -> Any:
        with self._lock:
            if self._owner != os.getpid():
                # In the clear nothing goes through a proxy that the environment names.
                is_private = self.url.startswith("https:")
                self._client = self._httpx.Client(base_url=self.url, trust_env=is_private)
                self._owner = os.getpid()
                weakref.finalize(self, self._client.close)
            return self._client

    def __deepcopy__(self, memo: Any) -> Connection:
        return self

    def __reduce__(self) -> Any:
        return type(self), (self.url, self.api_key_env, self.retry_policy, True)


class _Away(Exception):
    """There is no answer yet; `wait`: the seconds that the server asks to wait."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def _read(read: Callable[[Any, str], T], answer: Any, request_id: str) -> T:
    try:
        return read(answer, request_id)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise BadAnswer(f"it has another form than expected ({type(error).__name__})") from error


def _until(end: float, attempt: Callable[[], T]) -> T:
    """What an attempt gives, waited for until then: in a thread, as a timeout holds from byte to byte only."""
    answer = begin(attempt)
    wait([answer], max(end - time.monotonic(), 0.0) + _GRACE)
    if not answer.done():
        raise _Away("it is still answering")
    return answer.result()


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise ImportError("Members behind servers need httpx. Install it: pip install 'hf_adafuse[served]'.") from error
    return httpx
