"""Processors that return what no processor of transformers does: other types work, what is no scores says whose."""

from __future__ import annotations

import pytest
import torch
from support.calls import arguments, assert_refused
from support.hosts import Forbid, ensemble, new_ids, oracle
from transformers import LogitsProcessor, LogitsProcessorList

from hf_adafuse import AdaFuseDecodingError
from hf_adafuse.members.processors import ProcessorError, ProcessorStep, PromptProcessors

MEMBERS = ("llama/byte_level/0", "qwen3/sentencepiece/1")
DTYPES = [torch.float64, torch.float16, torch.bfloat16]


class OtherType(LogitsProcessor):
    """Bans some ids, and gives the rest in another type."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, input_ids, scores):
        return Forbid(range(0, scores.shape[-1], 3))(input_ids, scores).to(self.dtype)


class OtherTypeOfIds(OtherType):
    is_function_of_ids = True


def as_argument(role, processor):
    return {role: [processor] if role == "logits_processor" else [[processor]]}


ROLES = ["logits_processor", "assistant_logits_processor"]


@pytest.mark.slow
@pytest.mark.parametrize("cls", [OtherType, OtherTypeOfIds])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("role", ROLES)
def test_scores_of_another_type(role, dtype, cls):
    case = ensemble(*MEMBERS)

    def process(row, k, prompt):
        return (lambda ids, scores: OtherType(dtype)(ids, scores).float()) if k == ROLES.index(role) else None

    expected = oracle(case, process)
    assert new_ids(case, case.fast(**as_argument(role, cls(dtype)))) == expected != oracle(case)


def test_float64_gives_the_same_scores():
    case = ensemble(*MEMBERS, prompts=["She"])
    outputs = [
        case.fast(logits_processor=[OtherType(dtype)], output_scores=True) for dtype in (torch.float32, torch.float64)
    ]
    assert torch.equal(torch.stack(outputs[0].scores), torch.stack(outputs[1].scores))
    assert outputs[1].scores[0].dtype == torch.float32


class Bad(LogitsProcessor):
    """Returns what is no scores, from call `at` on."""

    def __init__(self, bad, at=0):
        self.bad, self.at, self.num_calls = bad, at, 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return scores if self.num_calls <= self.at else self.bad(scores)


class BadFunctionOfIds(Bad):
    is_function_of_ids = True


def one_nan(scores):
    scores[..., 7] = torch.nan
    return scores


BAD = {
    "nothing": (lambda scores: None, "returned NoneType, not a tensor of scores"),
    "a list": (lambda scores: scores.tolist(), "returned list, not a tensor of scores"),
    "too narrow": (
        lambda scores: scores[:, :-1],
        r"returned scores of shape \({rows}, {less}\), not \({rows}, {size}\)",
    ),
    "too wide": (
        lambda scores: torch.nn.functional.pad(scores, (0, 1)),
        r"returned scores of shape \({rows}, {more}\), not \({rows}, {size}\)",
    ),
    "too few": (lambda scores: scores[:0], r"returned scores of shape \(0, {size}\), not \({rows}, {size}\)"),
    "flat": (lambda scores: scores[0], r"returned scores of shape \({size},\), not \({rows}, {size}\)"),
    "a NaN": (one_nan, "returned NaN"),
    "all NaN": (lambda scores: scores * torch.nan, "returned NaN"),
}


@pytest.mark.parametrize("cls", [Bad, BadFunctionOfIds])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("role", ROLES)
def test_what_is_no_scores_names_its_processor(role, name, cls):
    bad, said = BAD[name]
    case = ensemble(*MEMBERS, prompts=["She"])
    k = ROLES.index(role)
    size = len(case.tokenizers[k])
    said = said.format(rows=1, less=size - 1, size=size, more=size + 1)
    member = ["the main model", r"assistant 1 \(Qwen3ForCausalLM\)"][k]
    match = f"^{member} failed in round 0: its logits processor {cls.__name__} {said}\\. "
    with pytest.raises(AdaFuseDecodingError, match=match) as caught:
        case.fast(**as_argument(role, cls(bad)))
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.texts == [""] and caught.value.sequences == [case.main_ids()[1][0].tolist()]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("role", ROLES)
def test_the_text_so_far_is_kept(role, name):
    """Each branch has its own count: the first branch that is so long fails."""
    case = ensemble(*MEMBERS, n=14, max_words=1, max_word_tokens=2)
    whole = [[committed.text for committed in rounds] for rounds in case.fast(min_new_tokens=14).rounds]
    with pytest.raises(AdaFuseDecodingError, match="its logits processor Bad returned") as caught:
        case.fast(**as_argument(role, Bad(BAD[name][0], at=(9, 5)[ROLES.index(role)])), min_new_tokens=14)
    error = caught.value
    assert error.round > 1 and any(error.texts)
    for text, rounds in zip(error.texts, whole, strict=True):
        assert text in ["".join(rounds[:count]) for count in range(len(rounds) + 1)]
        assert repr(text) in str(error)
    assert "in the error's `texts`" in str(error)


class NoLonger(LogitsProcessor):
    """Cannot be copied after its third call."""

    num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        self.tokens = iter(input_ids) if self.num_calls < 3 else (token for token in input_ids)
        return scores


@pytest.mark.parametrize("role", ROLES)
def test_one_that_can_no_longer_be_copied_is_named(role):
    case = ensemble(*MEMBERS)
    with pytest.raises(
        AdaFuseDecodingError, match=r"its logits processor NoLonger cannot be copied any more .TypeError"
    ):
        case.fast(**as_argument(role, NoLonger()))


class FirstRowIsNan(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[0] = torch.nan
        return scores


def test_the_rows_beside_a_text_are_nobodys():
    prompts, scores = [[1, 2], [3, 4]], torch.zeros(5)
    for row, prompt in enumerate(prompts):
        processors = PromptProcessors([ProcessorStep(FirstRowIsNan(), prompts, row)], 2)
        if row == 0:
            with pytest.raises(ProcessorError, match="FirstRowIsNan returned NaN"):
                processors.begin(prompt, scores)
        else:
            processed, states = processors.begin(prompt, scores)
            processed, _ = processors.advance([*prompt, 1], scores, states)
            assert torch.equal(processed, scores)


# The argument itself


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (3, "`assistant_logits_processor` must be a list, but is 3"),
        ("no", "`assistant_logits_processor` must be a list, but is 'no'"),
        ({"a": []}, "`assistant_logits_processor` must be a list, but is {'a': "),
        ([[], []], "`assistant_logits_processor` must be one list .*, but is 2 for 1 assistant models"),
        ([[3]], "`assistant_logits_processor` must be processors, which can be called, but 3 cannot"),
        ([["no"]], "`assistant_logits_processor` must be processors, which can be called, but 'no' cannot"),
        (
            [[Forbid([1]), None]],
            "`assistant_logits_processor` must be processors, which can be called, but None cannot",
        ),
    ],
)
def test_assistant_logits_processor_of_a_wrong_shape(given, match):
    assert_refused(arguments(assistant_logits_processor=given), match)


def test_logits_processor_that_cannot_be_called():
    assert_refused(arguments(logits_processor=[3]), "`logits_processor` must be processors, which can be called, but 3")


WRAPS = {
    "alone": lambda one: one,
    "list": lambda one: [one],
    "tuple": lambda one: (one,),
    "LogitsProcessorList": lambda one: LogitsProcessorList([one]),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("cls", [OtherType, OtherTypeOfIds])
def test_assistant_logits_processor_may_be_given_in_any_list(wrap, cls):
    case = ensemble(*MEMBERS)
    expected = oracle(case, lambda row, k, prompt: OtherType(torch.float32) if k == 1 else None)
    assert new_ids(case, case.fast(assistant_logits_processor=[wrap(cls(torch.float32))])) == expected
    case.models, case.tokenizers = case.models + case.models[1:], case.tokenizers + case.tokenizers[1:]
    expected = oracle(case, lambda row, k, prompt: OtherType(torch.float32) if k == 2 else None)
    given = [[], wrap(cls(torch.float32))]
    assert new_ids(case, case.fast(assistant_logits_processor=given)) == expected
