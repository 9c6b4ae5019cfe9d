"""What is checked of answers and of who gives them: wrong numbers are asked for again, another model is found."""

from __future__ import annotations

import pytest
from stand_in import StandIn, serving
from tiny import TOKENIZERS, tiny_model

from hf_adafuse import ServedModel
from hf_adafuse.servers.queries import ServerError


@pytest.fixture(scope="module")
def member():
    return tiny_model("llama", "sentencepiece", 1), TOKENIZERS["sentencepiece"]()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("hf_adafuse.servers.connection._FIRST_PAUSE", 0.001)


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
        api = ServedModel(url, kind, tokenizer=member[1], retries=2).api
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
        api = ServedModel(url, kind, tokenizer=member[1], retries=0).api
        assert api.prompt_log_probs([5, 6, 7, 8])[1] == float("-inf")
