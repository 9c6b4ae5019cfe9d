"""What is peculiar to llama.cpp's server: it is silent on parts of characters and on all but the most likely tokens,
and its slots share a context.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest
from support.stand_in import StandIn, ends_within_character, serving, token_bytes
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse.servers.daemon_threads import begin, map_at_once
from hf_adafuse.servers.llamacpp import LlamaCppApi
from hf_adafuse.servers.queries import Query, ServerError
from hf_adafuse.servers.transport import Connection, RequestGate, RetryPolicy

TEXT = "Once upon a time 今天天气很好。 there was"


class Altered(StandIn):
    """Its answers to `/completion`, altered."""

    alter = staticmethod(lambda answer: answer)

    def completion(self, body, headers):
        answer = super().completion(body, headers)
        return self.alter(answer)


@pytest.fixture
def stand_in():
    return Altered(tiny_model("llama", "byte_level", 0), TOKENIZERS["byte_level"](), "llamacpp")


@pytest.fixture
def api(stand_in, monkeypatch):
    monkeypatch.setattr("hf_adafuse.servers.transport._FIRST_PAUSE", 0.001)
    with serving(stand_in) as url:
        api = LlamaCppApi(Connection(url, retry_policy=RetryPolicy(retries=2)))
        api.model = api.about().model
        stand_in.requests.clear()
        yield api


def check(steps, query, stand_in, num_top):
    """They are those of the model itself."""
    ids = list(query.ids)
    for number, step in enumerate(steps):
        row = stand_in.log_probs(ids)
        assert step.log_probs == pytest.approx({token: float(row[token]) for token in step.log_probs})
        assert list(step.top) == (row.topk(num_top).indices.tolist() if query.num_steps else [])
        assert step.chosen == int(row.argmax())
        assert number or {*query.tokens} <= {*step.log_probs}
        ids.append(step.chosen)


def test_walks_go_up_to_a_part_of_a_character(api, stand_in):
    ids = stand_in.tokenizer(TEXT).input_ids
    queries = [Query(tuple(ids[:end]), (), 6) for end in range(1, len(ids) + 1)]
    found = api.ask(queries, 3)
    for query, steps in zip(queries, found):
        check(steps, query, stand_in, 3)
    written = [[token_bytes(stand_in.tokenizer, step.chosen) for step in steps] for steps in found]
    parts = [ends_within_character(b"".join(data)) for data in written]
    assert any(parts) and all(len(data) == 1 for data, part in zip(written, parts) if part)
    assert any(len(steps) == 6 for steps in found)


def test_any_token_is_known_when_it_is_asked_for(api, stand_in, monkeypatch):
    monkeypatch.setattr("hf_adafuse.servers.llamacpp._MANY", 5)
    ids, size = stand_in.tokenizer(TEXT).input_ids, len(stand_in.tokenizer)
    row = stand_in.log_probs(ids[:9])
    last = row.argsort()[:16].tolist()
    part = next(t for t in last if ends_within_character(token_bytes(stand_in.tokenizer, t)))
    queries = [
        Query(tuple(ids[:9]), tuple(t for t in last if t != part)[:3], 1),
        Query(tuple(ids[:9]), (part,), 0),
        Query(tuple(ids[:4]), tuple(range(size)), 2),
        Query(tuple(ids), (7,), 0),
    ]
    for query, steps in zip(queries, api.ask(queries, 2)):
        check(steps, query, stand_in, 2)
    asked = [body["n_probs"] for path, body, _ in stand_in.requests]
    assert asked.count(size) == 2  # for a part of a character, and where many are asked for
    stand_in.requests.clear()
    check(*api.ask(queries[:1], 2), queries[0], stand_in, 2)
    assert [body["n_probs"] for _, body, _ in stand_in.requests] == [5, 1, 1, 1]


def test_texts_that_do_not_fit_together_are_asked_one_after_another(api, stand_in):
    stand_in.max_length = 40
    api.about()
    stand_in.requests.clear()
    queries = [Query(tuple(range(5, 5 + size)), (), 1) for size in (15, 15, 12, 5, 4, 4, 4, 20, 39)]
    for query, steps in zip(queries, api.ask(queries, 2)):
        check(steps, query, stand_in, 2)
    assert [[len(ids) for ids in body["prompt"]] for _, body, _ in stand_in.requests] == [
        [15, 15], [12, 5, 4, 4, 4], [20], [39]
    ]  # fmt: skip


def test_texts_that_do_not_fit_together_are_not_asked_at_the_same_time(api, stand_in, monkeypatch):
    """Whoever asks: passes that overlap, prompts whose probabilities are asked for side by side."""
    stand_in.max_length = 40
    api.about()
    sizes = [35, 9, 9, 9, 25, 9, 5, 5]  # none goes beside the first; in whatever order they come, three others do
    queries = [Query(tuple(range(5, 5 + size)), (), 1) for size in sizes]
    let_in, first_is_in, all_are_there, most = RequestGate._let_in, threading.Event(), threading.Event(), [0]

    def counting(self):
        let_in(self)
        most[0] = max(most[0], len(self._inside))
        first_is_in.set()
        if len(self._inside) + len(self._waiting) == len(queries):
            all_are_there.set()

    monkeypatch.setattr(RequestGate, "_let_in", counting)
    stand_in.alter = lambda answer: all_are_there.wait(100) and answer  # the first is answered when all have come
    ask = lambda query: api.ask([query], 2)  # noqa: E731
    first = begin(partial(ask, queries[0]))
    assert first_is_in.wait(100)
    rest = map_at_once(ask, queries[1:], len(queries))
    for query, (steps,) in zip(queries, [first.result(), *rest]):
        check(steps, query, stand_in, 2)
    assert most[0] >= 3
    prompts = [list(query.ids) for query in queries[:3]]
    for ids, values in zip(prompts, map_at_once(api.prompt_log_probs, prompts, len(prompts))):
        expected = [float(stand_in.log_probs(ids[:end])[token]) for end, token in enumerate(ids) if end]
        assert values == pytest.approx(expected)
    assert api.connection.num_retries == 0


def test_probabilities_too_small_for_the_server_are_small(api, stand_in):
    stand_in._memory[(5, 6)] = (stand_in.log_probs([5, 6]) * 50).log_softmax(-1)
    worst = int(stand_in.log_probs([5, 6]).argmin())
    ((step,),) = api.ask([Query((5, 6), (worst,))], 2)
    assert stand_in.log_probs([5, 6])[worst] < -110 and -104 < step.log_probs[worst] < -103


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"generation_settings/seed": 1}, "another request"),
        ({"tokens_evaluated": 3}, "another request"),
        ({"model": "other"}, "another model"),
        ({"index": 1}, "answers 1 of 1 prompts"),
        ({"tokens": []}, "goes on otherwise"),
        ({"tokens": [1, 2]}, "goes on otherwise"),
        ({"completion_probabilities": [{"id": 81, "logprob": -1.0, "top_logprobs": []}]}, "lacks tokens"),
    ],
)
def test_answers_that_cannot_be_right_are_asked_again(api, stand_in, change, reason):
    faults = []

    def alter(answer):
        faults.append(len(faults))
        return answer | change if len(faults) == 1 else answer

    stand_in.alter = alter
    check(*api.ask([Query((5, 6))], 2), Query((5, 6)), stand_in, 2)
    assert api.connection.num_retries == 1
    stand_in.alter = lambda answer: answer | change
    with pytest.raises(ServerError, match=reason):
        api.ask([Query((5, 6))], 2)
