"""Stopping and streaming: criteria see tokens one by one and cut the span where one fires; streams are exact."""

from __future__ import annotations

import copy
import io
import threading
from contextlib import redirect_stdout

import pytest
import torch
from support.hosts import PROMPTS, eager_to_end, ensemble, new_ids, oracle
from transformers import StoppingCriteria, TextIteratorStreamer, TextStreamer

from hf_adafuse import enable_adafuse

MEMBERS = {
    "byte_level": ("llama/byte_level/0", "qwen3/sentencepiece/1"),
    "sentencepiece": ("qwen3/sentencepiece/2", "gpt2/byte_level/1"),
}


@pytest.fixture(scope="module", params=MEMBERS)
def long_call(request):
    """A case of one prompt and its output without any stopping; spans of several tokens."""
    case = ensemble(*MEMBERS[request.param], prompts=PROMPTS[:1], n=14, max_word_tokens=4)
    output = case.fast()
    (new,) = new_ids(case, output)
    assert len(new) == 14
    assert max(committed.num_tokens for committed in output.rounds[0]) > 3
    return case, output, new


def text_of(case, ids):
    """The new text, read behind the prompt."""
    (prompt,) = case.main_ids()[0]
    head = case.tokenizers[0].decode(prompt, skip_special_tokens=True)
    return case.tokenizers[0].decode(prompt + ids, skip_special_tokens=True)[len(head) :]


@pytest.mark.parametrize("n", range(1, 9))
def test_max_new_tokens_is_exact(long_call, n):
    case, _, new = long_call
    case = ensemble_like(case, n)
    output = case.fast()
    assert new_ids(case, output) == [new[:n]]
    assert "".join(committed.text for committed in output.rounds[0]) == text_of(case, new[:n])
    assert all("".join(committed.words) == committed.text for committed in output.rounds[0])


def ensemble_like(case, n):
    return type(case)(case.models, case.tokenizers, case.config, case.prompts, n)


def test_max_length_counts_the_prompt(long_call):
    case, _, new = long_call
    ids = case.main_ids()[1]
    output = call(case, max_length=ids.shape[1] + 5)
    assert output.shape[1] == ids.shape[1] + 5
    assert output[0, ids.shape[1] :].tolist() == new[:5]


def call(case, **kwargs):
    """`generate()` with nothing set but the members."""
    _, ids, mask = case.main_ids()
    return enable_adafuse(copy.copy(case.models[0])).generate(
        input_ids=ids, attention_mask=mask, tokenizer=case.tokenizers[0], assistant_models=case.models[1:],
        assistant_tokenizers=case.tokenizers[1:], adafuse_config=case.config, **kwargs,
    )  # fmt: skip


def test_stop_strings_cut_inside_a_span(long_call):
    case, output, new = long_call
    ends = {sum(committed.num_tokens for committed in output.rounds[0][:i]) for i in range(20)}
    tried = 0
    for length in range(2, len(new)):
        stop = text_of(case, new[:length])[-3:]
        texts = [text_of(case, new[:i]) for i in range(len(new) + 1)]
        if length in ends or not (stop.isascii() and stop.isprintable() and len(stop) == 3):
            continue
        expected = next(i for i, text in enumerate(texts) if stop in text)
        found = call(case, max_new_tokens=14, stop_strings=[stop, "zqz"], return_dict_in_generate=True)
        assert new_ids(case, found) == [new[:expected]]
        assert "".join(committed.text for committed in found.rounds[0]) == texts[expected]
        assert found.rounds[0][-1].is_whole == (expected in ends)
        tried += expected not in ends
        if tried == 3:
            break
    assert tried, "no stop string fell inside a span"


class Recorder(StoppingCriteria):
    """Keeps what it is shown; stops a row at one of `last`."""

    is_function_of_ids = True

    def __init__(self, width, last=()):
        self.width, self.last, self.seen = width, set(last), {}

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.dim() == 2
        for row in input_ids.tolist():
            self.seen.setdefault(tuple(row[: self.width]), []).append(row)
        return torch.tensor([row[-1] in self.last for row in input_ids.tolist()])


def test_criteria_see_tokens_one_by_one_and_stop_rows_alone():
    case = ensemble(*MEMBERS["byte_level"], n=10)
    _, ids, _ = case.main_ids()
    free = oracle(case)
    recorder = Recorder(ids.shape[1])
    assert new_ids(case, case.fast(stopping_criteria=[recorder])) == free
    for row, new in zip(ids.tolist(), free, strict=True):
        assert recorder.seen[tuple(row)] == [row + new[:count] for count in range(1, len(new) + 1)]

    last = free[1][4]  # stops the second row at its first one of these; the first row where it comes by one
    recorder = Recorder(ids.shape[1], [last])
    cut = [new[: new.index(last) + 1] if last in new else new for new in free]
    assert cut[1] != free[1]
    assert new_ids(case, case.fast(stopping_criteria=[recorder])) == cut
    for row, new in zip(ids.tolist(), cut, strict=True):
        assert [len(seen) for seen in recorder.seen[tuple(row)]] == [ids.shape[1] + i for i in range(1, len(new) + 1)]


def test_criteria_get_the_scores_so_far():
    case = ensemble(*MEMBERS["byte_level"], prompts=PROMPTS[:1], n=6)
    width, shapes = case.main_ids()[1].shape[1], []

    def criterion(input_ids, scores, **kwargs):
        shapes.append((input_ids.shape[1] - width, len(scores), scores[-1].shape))
        return torch.tensor([False])

    case.fast(stopping_criteria=[criterion], output_scores=True)
    assert shapes == [(i, i, (1, case.models[0].config.vocab_size)) for i in range(1, 7)]


def test_max_time_loses_no_text(long_call):
    case, _, new = long_call
    output = call(case, max_new_tokens=14, max_time=1e-9, return_dict_in_generate=True)
    assert new_ids(case, output) == [new[:1]]
    assert output.rounds[0][0].text == text_of(case, new[:1])


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_several_end_of_sequence_ids(members):
    case = ensemble(*members, n=12)
    free = oracle(case)
    main_eos = [case.tokenizers[0].eos_token_id, free[0][5], free[1][7]]
    # An id that is also text may come in the middle of a span, from an assistant: as a criterion, it stops there too.
    expected = []
    for row in oracle(case, main_eos=main_eos):
        end = next((i for i, token in enumerate(row) if token in main_eos), len(row))
        expected.append(row[: end + 1])
    output = case.fast(eos_token_id=main_eos)
    assert new_ids(case, output) == expected
    ended = [row[-1] in main_eos for row in expected]
    assert any(ended), "no row ends"
    assert not any(rounds[-1].ends and not end for rounds, end in zip(output.rounds, ended, strict=True))


def test_the_end_of_sequence_token_is_in_the_output():
    case = eager_to_end(ensemble(*MEMBERS["sentencepiece"], n=5))
    output = case.fast(eos_token_id=case.tokenizers[0].eos_token_id)
    assert new_ids(case, output) == [[case.tokenizers[0].eos_token_id]] * 2
    assert [[(committed.text, committed.ends) for committed in rounds] for rounds in output.rounds] == [
        [("", True)]
    ] * 2


def stream_of(case, streamer, **kwargs):
    call(case, max_new_tokens=case.max_new_tokens, streamer=streamer, **kwargs)


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_streamer(long_call, skip_prompt):
    case, _, new = long_call
    (prompt,) = case.main_ids()[0]
    printed = io.StringIO()
    with redirect_stdout(printed):
        stream_of(case, TextStreamer(case.tokenizers[0], skip_prompt=skip_prompt))
    expected = case.tokenizers[0].decode(new if skip_prompt else prompt + new)
    if skip_prompt:
        assert "\n" not in expected, "there a TextStreamer begins anew, and a SentencePiece decoder strips a space"
    assert printed.getvalue() == expected + "\n"


class Chunks(TextStreamer):
    """Also keeps what it is given."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.chunks, self.ended = [], 0

    def put(self, value):
        self.chunks.append(value.clone())
        super().put(value)

    def end(self):
        self.ended += 1
        super().end()


def test_a_streamer_gets_the_prompt_then_each_span(long_call, capsys):
    case, output, new = long_call
    streamer = Chunks(case.tokenizers[0])
    stream_of(case, streamer)
    prompt, *spans = streamer.chunks
    assert torch.equal(prompt, case.main_ids()[1])
    sizes = [committed.num_tokens for committed in output.rounds[0]]
    assert [span.shape for span in spans] == [(size,) for size in sizes]
    assert torch.cat(spans).tolist() == new
    assert streamer.ended == 1


def test_text_iterator_streamer_in_a_thread(long_call):
    case, output, new = long_call
    streamer = TextIteratorStreamer(case.tokenizers[0], skip_prompt=True, timeout=60)
    thread = threading.Thread(target=stream_of, args=(case, streamer))
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == case.tokenizers[0].decode(new)
    assert len(pieces) > 1


def test_a_stop_string_reaches_the_streamer_cut(long_call):
    case, _, new = long_call
    tails = [text_of(case, new[:length])[-3:] for length in range(2, 14)]
    stop = next(tail for tail in tails if tail.isascii() and tail.isprintable() and len(tail) == 3)
    streamer = Chunks(case.tokenizers[0])
    printed = io.StringIO()
    with redirect_stdout(printed):
        stream_of(case, streamer, stop_strings=[stop])
    got = torch.cat(streamer.chunks[1:]).tolist()
    assert got == new[: len(got)] and len(got) < 14
    assert stop in text_of(case, got) and stop not in text_of(case, got[:-1])
