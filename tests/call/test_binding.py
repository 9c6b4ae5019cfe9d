"""What is bound to a model, found for it, or carried from call to call."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from support.releases import cache_of, with_cache
from support.tiny import TOKENIZERS, tiny_model
from transformers import GenerationConfig, LlamaModel

from hf_adafuse import AdaFuseConfig, AdaFuseOutput, enable_adafuse
from hf_adafuse.decoding.word_splitter import WordSplitter
from hf_adafuse.transformers_compat import CACHE_NAME

BYTES, CHARS = TOKENIZERS["byte_level"](), TOKENIZERS["characters"]()


def own(*args, **kwargs):
    return copy.deepcopy(tiny_model(*args, **kwargs))


def call(model, max_new_tokens=12, prompt="Once upon a time", **kwargs):
    ids = BYTES([prompt], return_tensors="pt").input_ids if isinstance(prompt, str) else prompt
    kwargs.setdefault("return_dict_in_generate", True)
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, tokenizer=BYTES,
                          max_new_tokens=max_new_tokens, **kwargs)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([("llama", "byte_level", 1)], [("llama", "byte_level", 2)]),
        ([("llama", "characters", 1)], [("gpt2", "characters", 1)]),
        (
            [("llama", "characters", 1), ("gpt2", "byte_level", 1)],
            [("gpt2", "byte_level", 1), ("llama", "characters", 1)],
        ),
    ],
)
def test_a_cache_resumes_only_the_assistants_it_is_of(first, second):
    main = enable_adafuse(own())

    def assistants(names):
        return {
            "assistant_models": [tiny_model(*name) for name in names],
            "assistant_tokenizers": [TOKENIZERS[name[1]]() for name in names],
            "adafuse_config": AdaFuseConfig(),  # the recommended preset reads the prompt anew: whom to trust it says
        }

    whole = call(main, 40, **assistants(first))
    length = sum(committed.num_tokens for committed in whole.rounds[0][:2])
    start = call(main, length, **assistants(first))
    assert cache_of(start).assistants
    resumed = call(main, 8, start.sequences, **with_cache(cache_of(start)), **assistants(second))
    if set(first) == set(second):  # in another order they resume all the same
        assert resumed.sequences[0].tolist() == whole.sequences[0, : resumed.sequences.shape[1]].tolist()
        again = call(main, 8, start.sequences, **assistants(second))
        for member, other in zip(resumed.stats["members"], again.stats["members"], strict=True):
            assert member["tokens_run"] < other["tokens_run"]
    else:
        plain = call(main, 8, start.sequences, **assistants(second))
        assert resumed.sequences.tolist() == plain.sequences.tolist()
        assert resumed.rounds[0][0].candidates[0].nlls == pytest.approx(plain.rounds[0][0].candidates[0].nlls, abs=1e-4)
    twin = pickle.loads(pickle.dumps(cache_of(start)))
    assert twin.assistants == [] and twin.get_seq_length() == cache_of(start).get_seq_length()


def test_a_cache_of_another_batch_is_refused():
    main = enable_adafuse(own())
    start = call(main, 4, adafuse_config=True)
    ids = start.sequences.repeat(2, 1)
    with pytest.raises(ValueError, match=f"`{CACHE_NAME}` must be of the batch size of `input_ids`, 2, but is of 1"):
        call(main, 4, ids, **with_cache(cache_of(start)), adafuse_config=True)


def test_copies_keep_their_assistants_and_nothing_leaks():
    one, two = own(), own("gpt2", "byte_level", 1)
    enable_adafuse(one, assistant_models=[two], assistant_tokenizers=[BYTES], tokenizer=BYTES)
    enable_adafuse(two, assistant_models=[one], assistant_tokenizers=[BYTES], tokenizer=BYTES)
    expected = call(one)
    assert len(expected.stats["members"]) == 2 and not any("assistant" in name for name in one.state_dict())
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert call(twin).sequences.tolist() == expected.sequences.tolist()
    watched = [weakref.ref(one), weakref.ref(two)]
    del one, two, twin, expected
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def test_the_calls_generation_config_wins_over_what_is_bound():
    main = enable_adafuse(own(), adafuse_config=AdaFuseConfig(max_words=1), tokenizer=BYTES)
    settings = dict(max_new_tokens=8, return_dict_in_generate=True, eos_token_id=0, pad_token_id=2)
    ids = BYTES("Once upon a time", return_tensors="pt").input_ids
    off, other = GenerationConfig(**settings), GenerationConfig(**settings)
    off.adafuse_config, other.adafuse_config = False, {"max_words": 4, "margin_threshold": 0.0}
    assert not isinstance(main.generate(ids, generation_config=off), AdaFuseOutput)
    assert not isinstance(main.generate(ids, off), AdaFuseOutput)
    assert max(len(r.words) for r in main.generate(ids, generation_config=other).rounds[0]) > 1
    bound = main.generate(ids, **settings)
    assert max(len(r.words) for r in bound.rounds[0]) == 1


def test_a_copy_of_the_models_own_generation_config_asks_for_nothing():
    """To change a setting of a copy is how transformers' documents call `generate()`, and how its pipelines did."""
    model, other = own(), tiny_model("gpt2", "byte_level", 1)
    model.generation_config.adafuse_config = {"max_words": 4, "margin_threshold": 0.0}
    model.generation_config.assistant_models = ["./missing"]
    main = enable_adafuse(model, [other], [BYTES], BYTES, AdaFuseConfig(max_words=1))
    ids = BYTES("Once upon a time", return_tensors="pt").input_ids
    passed = copy.deepcopy(main.generation_config)
    passed.update(max_new_tokens=8, return_dict_in_generate=True)
    output = main.generate(ids, generation_config=passed)
    assert len(output.stats["members"]) == 2 and max(len(one.words) for one in output.rounds[0]) == 1
    passed.adafuse_config = {"max_words": 4, "margin_threshold": 0.0, "num_branches": 1}
    assert max(len(one.words) for one in main.generate(ids, generation_config=passed).rounds[0]) > 1


def test_stop_strings_use_the_tokenizer_that_was_found(tmp_path):
    model = own()
    model.save_pretrained(tmp_path)
    BYTES.save_pretrained(tmp_path)
    main = enable_adafuse(type(model).from_pretrained(tmp_path))
    ids = BYTES("Once upon a time", return_tensors="pt").input_ids
    text = BYTES.decode(main.generate(ids, adafuse_config=True, max_new_tokens=20)[0, ids.shape[1] :])
    stop = next(char for char in text[1:] if char.isascii())
    stopped = main.generate(ids, adafuse_config=True, max_new_tokens=20, stop_strings=[stop])
    assert stop in BYTES.decode(stopped[0, ids.shape[1] :]) and stopped.shape[1] <= ids.shape[1] + 20


@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_same_assistant_twice_goes_on_with_its_own_texts(num_rows):
    """The assistants of a cache are told apart by their places: model and tokenizer may be the same."""
    main, assistant = enable_adafuse(own()), tiny_model("llama", "characters", 1)
    texts = [["She", "the cat"], ["there was a big tree in the park. The cat", "Question: what is"]]
    config = AdaFuseConfig(max_words=1, max_word_tokens=2)
    given = {"assistant_models": [assistant] * 2, "assistant_tokenizers": [CHARS] * 2, "adafuse_config": config}
    inputs = [CHARS(rows[:num_rows], padding=True, return_tensors="pt", return_token_type_ids=False) for rows in texts]
    prompts = BYTES(["Once upon a time"] * num_rows, return_tensors="pt").input_ids
    whole = call(main, 30, prompts, assistant_inputs=inputs, **given)
    sizes = [[committed.num_tokens for committed in rounds] for rounds in whole.rounds]
    ends = set.intersection(*({sum(row[:count]) for count in range(2, len(row))} for row in sizes))
    length = min(ends)
    start = call(main, length, prompts, assistant_inputs=inputs, **given)
    resumed = call(main, 30 - length, start.sequences, **with_cache(cache_of(start)), **given)
    assert torch.equal(resumed.sequences, whole.sequences)
    # With their prompts exchanged it is another text: they may not be taken for each other.
    other = call(main, 30, prompts, assistant_inputs=inputs[:1] * 2, **given)
    assert not torch.equal(other.sequences, whole.sequences)


def test_padding_of_assistant_inputs_is_seen_without_a_mask():
    main, assistant = enable_adafuse(own()), tiny_model("gpt2", "byte_level", 1)
    prompts = BYTES(["She", "Once upon a time"], padding=True, return_tensors="pt", return_token_type_ids=False)

    def run(inputs):
        return main.generate(**prompts, tokenizer=BYTES, assistant_models=[assistant], assistant_tokenizers=[BYTES],
                             assistant_inputs=[inputs], max_new_tokens=8, do_sample=False).tolist()  # fmt: skip

    assert run({"input_ids": prompts["input_ids"]}) == run(dict(prompts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(assistant_models=[tiny_model()], assistant_tokenizers=BYTES), "`assistant_tokenizers` must be a list"),
        (
            dict(assistant_models=[LlamaModel(tiny_model().config)], assistant_tokenizers=[BYTES]),
            "no language-modeling",
        ),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(enable_adafuse(own()), **arguments)


def test_an_assistant_without_an_end_and_flags_about_the_end():
    assistant = own("llama", "byte_level", 3)
    assistant.generation_config.eos_token_id = 5000  # outside its logits
    output = call(enable_adafuse(own()), 10, assistant_models=[assistant], assistant_tokenizers=[BYTES],
                  exponential_decay_length_penalty=(2, 1.5))  # fmt: skip
    assert output.sequences.shape[1] > 4


def test_unicode_words_after_an_emoji():
    splitter = WordSplitter(word_boundary="unicode")
    assert not splitter.is_complete("😀a".encode(), b"b") and splitter.is_complete("x😀".encode(), b"y")
    assert splitter.is_complete("😀今天".encode(), "天气".encode())


def test_a_vocabulary_with_gaps():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from hf_adafuse.members.vocabulary import Vocabulary

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, " ": 3, "c": 9}, unk_token="[UNK]"))
    backend.decoder = decoders.Fuse()
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    assert vocabulary.piece(9) == b"c" and vocabulary.text([9, 3]) == "c " and vocabulary.piece(5) == b""
