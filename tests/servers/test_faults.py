"""A server that is slow, refuses, drops the connection, answers nonsense or something else than asked: every text is
right, or there is an error that names the member; nothing is lost or committed twice.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest
from support.cases import PROMPTS, Case
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseConfig, AdaFuseDecodingError, AdaFusePredictor, ServedModel
from hf_adafuse.servers.addresses import seconds_of
from hf_adafuse.servers.queries import BadAnswer, ServerError
from hf_adafuse.servers.transport import Connection, RetryPolicy


class FaultyProxy:
    """Before a server: delays, cuts, repeats, corrupts and refuses, by lot; counts its faults."""

    def __init__(self, behind, seed, share):
        self.behind, self.rng, self.share = behind, random.Random(seed), share
        self.faults, self.earlier = 0, []
        self._lock = threading.Lock()

    def answer(self, path, body, headers):
        status, answer = self.behind.answer(path, body, headers)
        with self._lock:
            fault = self.rng.choice(FAULTS) if self.rng.random() < self.share else None
            fault = delayed if self.rng.random() < 0.005 else fault
            self.faults += fault is not None
            whole = json.dumps(answer).encode()
            earlier = self.rng.choice(self.earlier) if self.earlier else whole
            self.earlier = [*self.earlier[-20:], whole]
            at = self.rng.randrange(len(whole))
            return fault(status, answer, whole, earlier, at) if fault else (status, answer)


def delayed(status, answer, whole, earlier, at):
    time.sleep(1.7)  # longer than the client waits
    return status, answer


def wrong_tokens(status, answer, whole, earlier, at):
    """Other ids than those that were asked for."""
    return 200, whole.replace(b"token_id:", b"token_id:9")


def no_numbers(status, answer, whole, earlier, at):
    return 200, whole.replace(b"-", b"")  # probabilities above 1


FAULTS = [
    wrong_tokens,
    no_numbers,
    lambda status, answer, whole, earlier, at: (200, whole[:at]),  # cut
    lambda status, answer, whole, earlier, at: (200, earlier),  # the answer to another request
    lambda status, answer, whole, earlier, at: (200, whole[:at] + b"\x00\xff" + whole[at + 2 :]),
    lambda status, answer, whole, earlier, at: (200, b"null"),
    lambda status, answer, whole, earlier, at: (200, b"{}"),
    lambda status, answer, whole, earlier, at: (429, {"error": "busy"}, {"Retry-After": "0.01"}),
    lambda status, answer, whole, earlier, at: (503, {"error": "starting"}),
    lambda status, answer, whole, earlier, at: (500, b"<html>"),
]


@pytest.fixture
def pair():
    names = ["byte_level", "sentencepiece"]
    models = [tiny_model("llama", name, seed) for seed, name in enumerate(names)]
    return Case(models, [TOKENIZERS[name]() for name in names], AdaFuseConfig(num_branches=3), PROMPTS[:2], 6)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("hf_adafuse.servers.transport._FIRST_PAUSE", 0.001)


def behind(case, url, **options):
    """The case with its assistant behind a server."""
    retry_policy = {"timeout": 20.0, "deadline": 60.0, "retries": 12} | options
    eos = case.models[1].generation_config.eos_token_id
    served = ServedModel(url, model="tiny", tokenizer=case.tokenizers[1], eos_token_id=eos, **retry_policy)
    return Case([case.models[0], served], case.tokenizers, case.config, case.prompts, case.max_new_tokens)


class Clock:
    """The clock of the client, which tests move on: a deadline that a busy machine keeps would take them long."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.skipped = 0.0

    def monotonic(self):
        return time.monotonic() + self.skipped


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hf_adafuse.servers.transport.time", clock)
    return clock


@pytest.mark.slow
def test_five_hundred_faults(pair):
    expected, num_right, faults, failed = pair.fast(), 0, 0, []
    for seed in range(1000):
        proxy = FaultyProxy(StandIn(pair.models[1], pair.tokenizers[1]), seed, share=0.35)
        with serving(proxy) as url:
            # Every third client gives up soon.
            retry_policy = {"timeout": 1.5, **({"retries": 1} if seed % 3 == 2 else {})}
            output, error = attempt(lambda url=url, retry_policy=retry_policy: behind(pair, url, **retry_policy).fast())
            if output is not None:
                assert output.sequences.tolist() == expected.sequences.tolist(), seed
                num_right += 1
            else:
                assert url in str(error) and ("retries" in retry_policy or isinstance(error, AdaFuseDecodingError)), (
                    error
                )
                failed.append(error)
        faults += proxy.faults
        if faults >= 500:
            break
    assert faults >= 500 and num_right and failed
    for error in failed:
        if isinstance(error, AdaFuseDecodingError):
            assert "tiny" in error.member
            assert all(whole.startswith(text) for whole, text in zip(texts_of(expected), error.texts, strict=True))


def attempt(call):
    """What a call returns, or its error."""
    try:
        return call(), None
    except (AdaFuseDecodingError, ServerError, ValueError) as error:
        return None, error


def texts_of(output):
    return ["".join(committed.text for committed in rounds) for rounds in output.rounds]


@pytest.mark.slow
def test_a_server_that_goes_away_is_an_error_with_the_text_so_far(pair, clock):
    class Dying(StandIn):
        most = None

        def answer(self, path, body, headers):
            if len(self.requests) != self.most:
                return super().answer(path, body, headers)
            clock.skipped += 10
            return 503, {}

    stand_in = Dying(pair.models[1], pair.tokenizers[1])
    pair.max_new_tokens = 60
    expected = pair.fast()
    with serving(stand_in) as url:
        case = behind(pair, url)
        case.fast()
        before = len(stand_in.requests)
        case.fast()
        num_requests = len(stand_in.requests) - before
        stand_in.most = len(stand_in.requests) + 3 * num_requests // 4
        with pytest.raises(AdaFuseDecodingError, match=r"gives no answer to /v1/completions: .*status 503") as caught:
            case.fast()
    assert caught.value.member.startswith("assistant 1 (vllm:http://127.0.0.1") and caught.value.round > 1
    for text, whole in zip(caught.value.texts, texts_of(expected), strict=True):
        assert text and whole.startswith(text)


@pytest.mark.slow
def test_a_job_whose_server_has_gone_waits_for_it_once_and_keeps_the_texts(pair, clock):
    class Dying(StandIn):
        most = None

        def answer(self, path, body, headers):
            if self.most is None or len(self.requests) < self.most:
                return super().answer(path, body, headers)
            clock.skipped += 10
            return 503, {}

    stand_in, prompts = Dying(pair.models[1], pair.tokenizers[1]), [f"{text} {n}" for text in "abcd" for n in range(4)]
    with serving(stand_in) as url:
        case = behind(pair, url)
        members = list(zip(case.models, case.tokenizers, strict=True))
        predictor = AdaFusePredictor(members, max_new_tokens=30, batch_size=2)
        expected = predictor({"prompt": prompts})
        assert not any(expected["error"])
        stand_in.most = len(stand_in.requests) + 25
        answered = predictor({"prompt": prompts})
        # Asked by halves, each would wait until its deadline of 60 s.
        assert clock.skipped < 2 * 60
    assert any(answered["error"]) and any(answered["text"])
    for text, error, whole in zip(answered["text"], answered["error"], expected["text"], strict=True):
        assert whole.startswith(text) and (error or text == whole)
        assert not error or re.match(r"assistant 1 \(vllm:.*\) failed in round .*status 503", error)


@pytest.mark.slow
def test_a_prompt_that_a_server_cannot_answer_takes_no_other_with_it(pair, clock):
    class Choking(StandIn):
        def answer(self, path, body, headers):
            texts = [self.tokenizer.decode(ids) for ids in (body or {}).get("prompt", []) if isinstance(ids, list)]
            if not any("zzz" in text for text in texts):
                return super().answer(path, body, headers)
            clock.skipped += 10
            return 503, {}

    stand_in, prompts = Choking(pair.models[1], pair.tokenizers[1]), ["the cat", "a dog", "to sit", "zzzz"]
    with serving(stand_in) as url:
        case = behind(pair, url)
        answered = AdaFusePredictor(list(zip(case.models, case.tokenizers, strict=True)), max_new_tokens=4)(
            {"prompt": prompts}
        )
    assert [bool(error) for error in answered["error"]] == [False, False, False, True]


@pytest.mark.slow
def test_a_server_that_was_started_anew_with_another_model_is_refused(pair):
    stand_in = StandIn(pair.models[1], pair.tokenizers[1])
    with serving(stand_in) as url:
        case = behind(pair, url)
        case.fast()
        stand_in.model, stand_in._memory = tiny_model("llama", "sentencepiece", 7), {}
        case.fast()  # nobody can know yet
        case.models[1].api.connection.num_absences += 1  # a connection has failed since
        with pytest.raises(ValueError, match="is another model since"):
            case.fast()


def test_a_server_that_comes_back_with_another_model_in_the_middle_is_an_error(pair):
    class Restarted(StandIn):
        left = None

        def answer(self, path, body, headers):
            if self.left is not None and path == "/v1/completions":
                self.left -= 1
                if self.left == 0:
                    self.model, self._memory = tiny_model("llama", "sentencepiece", 7), {}
                    return 502, {}  # what a gateway says meanwhile
            return super().answer(path, body, headers)

    stand_in = Restarted(pair.models[1], pair.tokenizers[1])
    with serving(stand_in) as url:
        case = behind(pair, url)
        case.fast()
        stand_in.left = 5
        with pytest.raises(AdaFuseDecodingError, match="has been away and is another model since"):
            case.fast()
        with pytest.raises(ValueError, match="is another model since"):
            case.fast()


@pytest.mark.slow
def test_a_server_that_comes_back_as_it_was_goes_on(pair):
    class Away(StandIn):
        left = 0

        def answer(self, path, body, headers):
            self.left -= path == "/v1/completions"
            return (503, {}) if 0 < self.left <= 30 else super().answer(path, body, headers)

    stand_in, expected = Away(pair.models[1], pair.tokenizers[1]), pair.fast()
    with serving(stand_in) as url:
        case = behind(pair, url, retries=1)  # it is waited for until the deadline, however often that is
        case.fast()
        stand_in.left = 35
        assert case.fast().sequences.tolist() == expected.sequences.tolist()
        api = case.models[1].api
        assert stand_in.left <= 0 and api.connection.num_retries >= 30 and not api.was_away


@pytest.mark.slow
def test_another_client_that_asks_vllm_for_named_tokens(pair):
    """Sampled together, vLLM forgets the most likely tokens: the texts must not show it."""
    stand_in, expected, is_over = StandIn(pair.models[1], pair.tokenizers[1], seconds=0.002), pair.fast(), []
    with serving(stand_in) as url:
        case = behind(pair, url, retries=0)
        body = {"model": "tiny", "prompt": [[5, 6, 7]], "max_tokens": 1, "logprobs": 1, "logprob_token_ids": [9]}

        def ask():
            while not is_over:
                start = time.perf_counter()
                with contextlib.suppress(PermissionError):
                    stand_in.answer("/v1/completions", dict(body), {})
                # Not all the time, however slow the machine is.
                time.sleep(random.uniform(0, 0.02) + 2 * (time.perf_counter() - start))

        other = threading.Thread(target=ask)
        other.start()
        try:
            outputs = [case.fast() for _ in range(3)]
        finally:
            is_over.append(True)
            other.join()
    assert stand_in._spoilt and case.models[1].api.connection.num_retries
    assert [one.sequences.tolist() for one in outputs] == [expected.sequences.tolist()] * 3


@pytest.mark.slow
def test_members_of_one_server_do_not_spoil_each_others_answers(pair):
    """The two kinds of requests are never under way at the same time, whoever asks here."""
    stand_in, expected = StandIn(pair.models[1], pair.tokenizers[1], seconds=0.002), pair.fast()
    with serving(stand_in) as url:
        cases = [behind(pair, url) for _ in range(3)]
        with ThreadPoolExecutor(3) as threads:
            outputs = list(threads.map(lambda case: case.fast(), cases))
    assert not stand_in._spoilt
    assert [one.sequences.tolist() for one in outputs] == [expected.sequences.tolist()] * 3


def test_another_model_under_another_name_is_refused(pair):
    stand_in = StandIn(pair.models[1], pair.tokenizers[1])
    with serving(stand_in) as url:
        case = behind(pair, url)
        stand_in.name = "other"
        with pytest.raises(ValueError, match=r"refuses /v1/completions: status 400, .*no such model"):
            case.fast()
        with pytest.raises(ServerError, match=r"serves \['other'\], not 'tiny'"):
            behind(pair, url)


def test_the_tokenizer_must_be_the_servers(pair):
    with (
        serving(StandIn(pair.models[0], pair.tokenizers[0])) as url,
        pytest.raises(ValueError, match="must be the serv"),
    ):
        behind(pair, url).fast()


@pytest.mark.slow
def test_a_server_that_differs_from_itself_is_warned_of_once(pair):
    with serving(StandIn(pair.models[1], pair.tokenizers[1], noise=0.03)) as url:
        case = behind(pair, url)
        with pytest.warns(UserWarning, match=r"differs from itself by up to 0\.\d+ nats"):
            case.fast()
        case.fast()
        case = behind(pair, url, most_difference=1.0)
        case.fast()  # told to go on: warnings are errors here


def test_a_key_goes_into_the_header_and_nowhere_else(pair, monkeypatch):
    monkeypatch.setenv("TINY_KEY", "s3cret-key")

    class Guarded(StandIn):
        is_used_up = False

        def answer(self, path, body, headers):
            if headers.get("Authorization") != "Bearer s3cret-key":
                return 401, {"error": f"not {headers.get('Authorization')}"}
            if self.is_used_up:
                return 400, {"error": "your key s3cret-key is used up"}
            return super().answer(path, body, headers)

    guarded = Guarded(pair.models[1], pair.tokenizers[1])
    with serving(guarded) as url:
        case = behind(pair, url, api_key_env="TINY_KEY")
        output = case.fast()
        assert "s3cret" not in repr(
            [output.rounds[0].to_dict() if hasattr(output.rounds[0], "to_dict") else output.rounds]
        )
        assert "s3cret" not in repr(vars(case.models[1].api.connection)) + case.models[1].config.to_json_string()
        guarded.is_used_up = True
        with pytest.raises(AdaFuseDecodingError, match=r"key \*\*\* is used up") as caught:
            case.fast()
        assert "s3cret" not in str(caught.value)
        guarded.is_used_up = False
        with pytest.raises(ServerError, match="status 401"):
            behind(pair, url)
        monkeypatch.delenv("TINY_KEY")
        with pytest.raises(ServerError, match=r"environment variable that `api_key_env` names for http.* is not set"):
            behind(pair, url, api_key_env="TINY_KEY")


@pytest.mark.parametrize("given", ["sk-s3cret", "s3cret", "", "s3 cret", "é", 5, ["TINY_KEY"], "s3cret\n"])
def test_a_key_in_place_of_its_variable_is_not_shown(given):
    with pytest.raises((ValueError, ServerError), match="environment variable") as caught:
        Connection("http://localhost:9", given).get("/", lambda answer: answer)
    assert "s3cret" not in str(caught.value) and isinstance(caught.value, ServerError) == (given == "s3cret")


def test_errors_of_this_side_are_raised_as_they_are(pair):
    """At once, and nothing is blamed on an answer that was never given."""
    stand_in = StandIn(pair.models[1], pair.tokenizers[1])
    with serving(stand_in) as url:
        connection = Connection(url)
        with pytest.raises(TypeError, match="not JSON serializable"):
            connection.post("/", {"text": object()}, lambda answer, name: answer)
        with pytest.raises(ZeroDivisionError):
            connection.post("/", {}, lambda answer, name: answer, lambda body, name: {"n": 1 / 0})
        with pytest.raises(ServerError, match=r"it has another form than expected \(OverflowError\)"):
            Connection(url, retry_policy=RetryPolicy(retries=0)).get("/v1/models", lambda answer: int(float("inf")))
        assert connection.num_retries == 0 and len(stand_in.requests) == 1
        served = behind(pair, url).models[1]
        ids = pair.tokenizers[1]([PROMPTS[0]] * 2, return_tensors="pt").input_ids
        assert served.prompt_log_probs(ids) == served.prompt_log_probs(ids.tolist())


@pytest.mark.parametrize("url", ["http://host:8000", "http://10.0.0.7:8000", "ftp://localhost", "localhost:8000", 7,
                                 "http://user:s3cret@localhost:8000", "http://:s3cret@localhost:8000",
                                 "http://localhost:8000?api_key=s3cret", "http://localhost:8000#s3cret",
                                 "http://localhost:abc", "http://[::1", "http://u:s3cret@[::1", "https://ho\u2100st",
                                 "https://s3cret@ho\u2100st", "http://localhost:8000\n", "https://host/\x00",
                                 "https://a b", "https://-ü", "https://a..b", "https://xn--a", "https://[zz]",
                                 f"https://{'a' * 64}.de"])  # fmt: skip
def test_urls_that_are_refused(url):
    with pytest.raises(ValueError, match="`url` must be ") as caught:
        Connection(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("key", ['s3cret"key', "x" * 299 + "s3cret"])
def test_a_key_that_a_server_repeats_is_not_shown(key, monkeypatch):
    monkeypatch.setenv("TINY_KEY", f" {key}\n")  # as a file with a key ends

    class Telling:
        def answer(self, path, body, headers):
            return 400, {"error": headers["Authorization"]}

    with serving(Telling()) as url, pytest.raises(ServerError, match=r"status 400.*Bearer \*\*\*") as caught:
        Connection(url, "TINY_KEY").post("/", {}, lambda answer, name: answer)
    assert "s3cret" not in str(caught.value) and "xxxx" not in str(caught.value)


@pytest.mark.parametrize("key", ["s3crét", "s3\x07cret"])
def test_a_key_that_cannot_be_sent_is_refused_by_its_variable(key, monkeypatch):
    monkeypatch.setenv("TINY_KEY", key)
    with pytest.raises(ServerError, match="environment variable TINY_KEY must hold a key in printable ASCII"):
        Connection("http://localhost:1", "TINY_KEY").get("/", lambda answer: answer)


def test_in_the_clear_nothing_goes_through_a_proxy(monkeypatch):
    class Echo:
        def answer(self, path, body, headers):
            return 200, {"path": path}

    with serving(Echo()) as proxy, serving(Echo()) as url:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("no_proxy", "")
        # Through a proxy the path would be the whole URL.
        assert Connection(f"{url}/v1").get("/here", lambda answer: answer["path"]) == "/here"


def test_plain_http_to_another_host_with_a_word():
    assert Connection("http://host:8000/", allow_http=True).url == "http://host:8000"
    for url in ("http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1", "https://host"):
        assert copy.deepcopy(Connection(url)).url == url


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": 0},
        {"deadline": "1"},
        {"deadline": float("inf")},
        {"timeout": 1e10},
        {"timeout": float("nan")},
        {"retries": -1},
        {"retries": 1.5},
    ],
)
def test_patience_is_checked(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be "):
        RetryPolicy(**wrong)


def test_the_deadline_holds():
    class Busy:
        def answer(self, path, body, headers):
            return 429, {}, {"Retry-After": "60"}

    with serving(Busy()) as url:
        connection, start = Connection(url, retry_policy=RetryPolicy(deadline=30.0, retries=100)), time.monotonic()
        with pytest.raises(ServerError, match="status 429; the deadline of 30 s is over"):
            connection.post("/", {}, lambda answer, name: answer)
        assert time.monotonic() - start < 30


def test_what_a_server_answered_before_the_deadline_cut_it_short_is_named(clock):
    class SlowingDown:
        num_calls = 0

        def answer(self, path, body, headers):
            self.num_calls += 1
            clock.skipped = 0.0 if self.num_calls < 3 else 30.0
            return 501 + self.num_calls, {}  # of several that were not cut short, the last is named

    with serving(SlowingDown()) as url:
        connection = Connection(url, retry_policy=RetryPolicy(deadline=30.0))
        with pytest.raises(ServerError, match=r": .* \(before: status 503\); the deadline of 30 s is over"):
            connection.post("/", {}, lambda answer, name: answer)


@pytest.mark.parametrize("status", [408, 429, 500, 507, 529])
def test_statuses_that_pass(status):
    answers = [(status, {}), (200, {"n": 1})]

    class Busy:
        def answer(self, path, body, headers):
            return answers.pop(0)

    with serving(Busy()) as url:
        assert Connection(url).post("/", {}, lambda answer, name: answer) == {"n": 1}


@pytest.mark.parametrize("status", [501, 505])
def test_statuses_that_do_not_pass(status, pair):
    class Lacking(StandIn):
        lacks = None

        def answer(self, path, body, headers):
            return (status, {}) if path == self.lacks else super().answer(path, body, headers)

    stand_in = Lacking(pair.models[1], pair.tokenizers[1])
    with serving(stand_in) as url:
        model = behind(pair, url).models[1]
        stand_in.lacks = "/v1/completions"
        with pytest.raises(ServerError, match=f"refuses /v1/completions: status {status}"):
            model.prompt_log_probs([[5, 6]])
        assert model.api.connection.num_retries == model.api.connection.num_absences == 0


@pytest.mark.parametrize("status", [403, 404, 405, 410, 501])
def test_a_gateway_that_passes_completions_only(status, pair):
    class Gateway(StandIn):
        def answer(self, path, body, headers):
            return (status, {}) if path == "/tokenize" else super().answer(path, body, headers)

    with serving(Gateway(pair.models[1], pair.tokenizers[1])) as url:
        assert behind(pair, url).models[1].api.tokenize("a") is None


def test_a_gateway_with_request_ids_of_its_own_is_told_of(pair):
    class Gateway(StandIn):
        def answer(self, path, body, headers):
            return super().answer(path, body, headers | {"X-Request-Id": "its-own"})

    with (
        serving(Gateway(pair.models[1], pair.tokenizers[1])) as url,
        pytest.raises(ServerError, match="or a proxy has replaced the header X-Request-Id"),
    ):
        behind(pair, url, retries=1).models[1].prompt_log_probs([[5, 6]])


@pytest.mark.parametrize(("status", "is_away"), [(401, False), (404, False), (307, False), (501, False), (503, True)])
def test_a_server_that_refuses_its_first_question_is_there(status, is_away):
    """It answers nothing of use to `/v1/models`, as SGLang behind a gateway does, and has not gone away for that."""

    class Refusing:
        def answer(self, path, body, headers):
            return (503, {}) if path == "/" else (status, {}, {"Location": "/login"})

    with serving(Refusing()) as url:
        connection = Connection(url, retry_policy=RetryPolicy(deadline=1.0))
        with pytest.raises(ServerError, match="gives no answer to /: ") as caught:
            connection.post("/", {}, lambda answer, name: answer)
    assert caught.value.is_away == is_away


def test_a_url_with_the_path_of_a_request_says_so(pair):
    with (
        serving(StandIn(pair.models[1], pair.tokenizers[1])) as url,
        pytest.raises(ServerError, match=r"status 404.*\. The URL must end before the path of a request$"),
    ):
        behind(pair, f"{url}/v1/completions")


def test_when_to_come_back():
    assert [seconds_of(value) for value in (None, "1.5", "-3", "soon")] == [0.0, 1.5, 0.0, 0.0]
    assert 50 < seconds_of(formatdate(time.time() + 60, usegmt=True)) <= 60

    class Busy:
        def answer(self, path, body, headers):
            return 429, {}, {"Retry-After": "400"}

    with serving(Busy()) as url, pytest.raises(ServerError, match="of 300 s is over while it asks for 400 s"):
        Connection(url).post("/", {}, lambda answer, name: answer)


def test_what_cannot_be_read_is_asked_again():
    class Plain:
        def answer(self, path, body, headers):
            return 200, {"n": 1}

    found = []

    def read(answer, name):
        found.append(name)
        if len(found) < 3:
            raise BadAnswer("not yet")
        return answer

    with serving(Plain()) as url:
        connection = Connection(url)
        assert connection.post("/", {}, read) == {"n": 1}
        assert connection.num_retries == 2 and len(set(found)) == 3
        with pytest.raises(ServerError, match="its answer cannot be right: never"):
            Connection(url, retry_policy=RetryPolicy(retries=1)).get(
                "/", lambda answer: (_ for _ in ()).throw(BadAnswer("never"))
            )


def test_nobody_listens():
    with pytest.raises(ServerError, match=r"gives no answer to /v1/models: ConnectError"):
        ServedModel("http://127.0.0.1:9", retries=1)


@pytest.mark.parametrize("there", ["https://elsewhere.example:8443", "/llm"])
def test_a_redirect_shows_the_new_address(there):
    class Redirecting:
        def answer(self, path, body, headers):
            return 307, {}, {"Location": there + path}

    expected = f"redirects /v1/models to {there}/v1/models. Give that address, without the /v1/models at its end"
    with serving(Redirecting()) as url, pytest.raises(ServerError, match=re.escape(expected)):
        ServedModel(url, tokenizer=TOKENIZERS["byte_level"]())
