"""What is checked of answers and of who gives them: wrong numbers are asked for again, another model is found."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import AdaFuseEnsemble, AdaFusePredictor, ServedModel
from hf_adafuse.servers.api import Traffic
from hf_adafuse.servers.queries import Query, ServerError


@pytest.fixture(scope="module")
def member():
    return tiny_model("llama", "sentencepiece", 1), TOKENIZERS["sentencepiece"]()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("hf_adafuse.servers.transport._FIRST_PAUSE", 0.001)


class Misreading(StandIn):
    """Its answers about prompts are altered, so often."""

    num_wrong = 0

    @staticmethod
    def alter(choice, info):
        pass

    def _altered(self, choice, info):
        if self.num_wrong:
            self.num_wrong -= 1
            self.alter(choice, info)

    def completions(self, body, headers):
        answer = super().completions(body, headers)
        self._altered(answer["choices"][0], None)
        return answer

    def generate(self, body, headers):
        answer = super().generate(body, headers)
        self._altered(None, answer[0]["meta_info"])
        return answer


def with_value(value):
    def alter(choice, info):
        if info is None:
            next(iter(choice["prompt_logprobs"][2].values()))["logprob"] = value
        else:
            info["input_token_logprobs"][2][0] = value

    return alter


def of_another_prompt(choice, info):
    if info is None:
        choice["prompt_token_ids"] = [*choice["prompt_token_ids"][:-1], 0]
    else:
        info["input_token_logprobs"][-1][1] = 0


def cut(choice, info):
    del (info["input_token_logprobs"] if choice is None else choice["prompt_logprobs"])[-1]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("alter", [with_value(float("nan")), with_value(5.0), with_value(None), of_another_prompt, cut])
def test_wrong_numbers_of_a_prompt_are_asked_for_again(member, kind, alter):
    stand_in = Misreading(*member, kind)
    stand_in.alter = alter
    with serving(stand_in) as url:
        api = ServedModel(url, kind, tokenizer=member[1], eos_token_id=member[1].eos_token_id, retries=2).api
        expected = api.prompt_log_probs([5, 6, 7, 8])
        stand_in.num_wrong = 2
        assert api.prompt_log_probs([5, 6, 7, 8]) == expected and stand_in.num_wrong == 0
        stand_in.num_wrong = 3
        with pytest.raises(ServerError, match="its answer "):
            api.prompt_log_probs([5, 6, 7, 8])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_token_of_a_prompt_may_be_impossible(member, kind):
    stand_in = Misreading(*member, kind)
    stand_in.alter, stand_in.num_wrong = with_value(float("-inf")), 1
    with serving(stand_in) as url:
        api = ServedModel(url, kind, tokenizer=member[1], eos_token_id=member[1].eos_token_id, retries=0).api
        assert api.prompt_log_probs([5, 6, 7, 8])[1] == float("-inf")


def bind(member, served):
    """With the same model here as the main one."""
    AdaFuseEnsemble([member, (served, member[1])])


def restarted(stand_in):
    """As it is after it was started anew with another model."""
    stand_in.model, stand_in._memory = tiny_model("llama", "sentencepiece", 7), {}


def test_an_unpickled_one_is_compared_before_it_is_used(member):
    stand_in = StandIn(*member)
    with serving(stand_in) as url:
        model = ServedModel(url, tokenizer=member[1], eos_token_id=member[1].eos_token_id)
        bind(member, model)
        assert not model.api.was_away
        one, other = (pickle.loads(pickle.dumps(model)) for _ in range(2))
        bind(member, one)
        assert not one.api.was_away
        restarted(stand_in)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"must answer as before.* is another model since"):
                bind(member, other)


def test_one_that_has_not_been_asked_for_long_is_compared(member):
    stand_in = StandIn(*member)
    with serving(stand_in) as url:
        model = ServedModel(url, tokenizer=member[1], eos_token_id=member[1].eos_token_id)
        bind(member, model)
        num_requests = len(stand_in.requests)
        bind(member, model)
        assert len(stand_in.requests) == num_requests
        model.api.connection._last_answer -= 31.0
        bind(member, model)
        assert len(stand_in.requests) > num_requests and not model.api.was_away
        restarted(stand_in)
        model.api.connection._last_answer -= 31.0
        for _ in range(2):
            with pytest.raises(ValueError, match=r"must answer as before.* is another model since"):
                bind(member, model)


@pytest.mark.parametrize("most_difference", [0.05, float("inf")])
def test_another_model_is_found_whatever_difference_is_allowed(member, most_difference):
    stand_in = StandIn(*member)
    with serving(stand_in) as url:
        options = dict(eos_token_id=member[1].eos_token_id, most_difference=most_difference)
        model = ServedModel(url, tokenizer=member[1], **options)
        bind(member, model)
        restarted(stand_in)
        model.api.connection.count_absence()
        with pytest.raises(ValueError, match="is another model since"):
            bind(member, model)


def test_an_absence_during_a_comparison_is_not_forgotten(member):
    """Another thread has seen it: what was compared may have been asked before."""

    class Leaving(StandIn):
        asked_of = ()

        def answer(self, path, body, headers):
            for one in self.asked_of:
                one.api.connection.count_absence()
            return super().answer(path, body, headers)

    stand_in = Leaving(*member)
    with serving(stand_in) as url:
        model = ServedModel(url, tokenizer=member[1], eos_token_id=member[1].eos_token_id)
        bind(member, model)
        assert not model.api.was_away
        stand_in.asked_of = [model]
        model.api.connection.count_absence()
        model.api.check_same()
        assert model.api.was_away


def test_use_does_not_change_what_is_pickled(member):
    with serving(StandIn(*member)) as url:
        predictor = AdaFusePredictor(
            [ServedModel(url, tokenizer=member[1], eos_token_id=member[1].eos_token_id)] * 2, max_new_tokens=4
        )
        before = pickle.dumps(predictor)
        predictor({"prompt": ["the cat"]})
        api = predictor._members[0].api
        api.connection.count_absence()
        assert api.traffic.num_requests and pickle.dumps(predictor) == before
        assert pickle.loads(before)._members[0].api.traffic == Traffic()


def test_a_server_that_cannot_be_compared_is_named(member):
    class Refusing(StandIn):
        def completions(self, body, headers):
            raise PermissionError("not today")

    with serving(Refusing(*member)) as url:
        model = ServedModel(url, tokenizer=member[1], eos_token_id=member[1].eos_token_id)
        with pytest.raises(ValueError, match=r"assistant 1 .* must answer, but does not: .*not today"):
            bind(member, model)


def test_requests_of_several_threads_are_all_counted():
    class Slow(int):
        """Adding one takes so long that another thread comes between."""

        def __add__(self, other):
            time.sleep(0.001)
            return Slow(int(self) + other)

    traffic = Traffic(num_requests=Slow(0))
    threads = [threading.Thread(target=lambda: [traffic.count(2, 1) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (traffic.num_requests, traffic.num_sent, traffic.num_cached) == (80, 160, 80)


def test_many_tokens_of_one_text_are_asked_for_in_parts(member):
    stand_in = StandIn(*member)
    with serving(stand_in) as url:
        api = ServedModel(url, tokenizer=member[1], eos_token_id=member[1].eos_token_id).api
        queries = [Query((5, 6), tuple(range(300))), Query((5, 6, 7), (3,), 0), Query((5, 6), tuple(range(200)), 0)]
        found = api.ask(queries, 2)
    named = [body["logprob_token_ids"] for _, body, _ in stand_in.requests if body and "logprob_token_ids" in body]
    assert max(map(len, named)) <= 128
    for query, steps in zip(queries, found, strict=True):
        row = stand_in.log_probs(query.ids)
        assert {*query.tokens} <= {*steps[0].log_probs} and bool(steps[0].top) == bool(query.num_steps)
        assert all(value == float(row[token]) for token, value in steps[0].log_probs.items())


class StaleCache(StandIn):
    """What it has read before, of more tokens than a block of its cache has, it remembers wrongly."""

    block = 128

    def log_probs(self, ids):
        is_cached = len(ids) > self.block and any(
            known[: self.block] == tuple(ids[: self.block]) for known in self._memory
        )
        return super().log_probs(ids) - (0.3 if is_cached else 0.0)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_a_cache_that_changes_what_a_server_says_is_found(member, kind):
    with serving(StaleCache(*member, kind)) as url:
        for _ in range(2):  # also by who comes later: the text is new each time
            served = ServedModel(url, kind, tokenizer=member[1], eos_token_id=member[1].eos_token_id)
            with pytest.warns(UserWarning, match=r"differs from itself by up to 0\.3 nats"):
                bind(member, served)
