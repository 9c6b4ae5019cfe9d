"""One tokenizer seen as text: every kind, every law."""

from __future__ import annotations

import copy
import string
import unicodedata

import pytest
from support.tiny import CORPUS, TOKENIZERS, byte_level, tiny_model, unigram, wordpiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.models import WordLevel
from transformers import ByT5Tokenizer, GemmaTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from hf_adafuse import AdaFuseEnsemble
from hf_adafuse.decoding.selector import by_word
from hf_adafuse.members import vocabulary as vocabulary_module
from hf_adafuse.members.vocabulary import Vocabulary, vocabulary_of

pytestmark = pytest.mark.fast

SPANS = [" Paris", "x", " was there.", "\n\nThe", " don't", " 3.14,", "\n    return x", "  two", "foo ", " a b c", "'s"]
EVERYTHING = [*SPANS, " 今天", " Él 😀", "\t", "</s>", "<|end|>", " \u00a0x", "e\u0301"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_exact_encoding_decodes_back(name):
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    for span in [*EVERYTHING, *CORPUS]:
        encoding = vocabulary.encode(span)
        assert encoding.exact == (vocabulary.text(encoding.ids) == span)
        if encoding.exact and name != "wordpiece":
            assert b"".join(map(vocabulary.piece, encoding.ids)).decode() == span


@pytest.mark.parametrize("name", ["byte_level", "trailing_space", "sentencepiece"])
def test_byte_vocabularies_represent_everything(name):
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    assert [span for span in EVERYTHING if not vocabulary.encode(span).exact] == []


@pytest.mark.parametrize("name", ["unigram", "characters"])
def test_others_represent_what_they_know(name):
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    assert [span for span in SPANS if not vocabulary.encode(span).exact and "\n" not in span] == []
    assert not vocabulary.encode(" 😀").exact and vocabulary.encode(" 😀").ids


def test_wordpiece_is_lossy():
    vocabulary = vocabulary_of(wordpiece())
    assert vocabulary.encode(" the cat").exact
    assert vocabulary.text(vocabulary.encode(" Paris").ids) == " paris" and not vocabulary.encode(" Paris").exact
    assert vocabulary.piece(vocabulary.encode(" cat").ids[0]) == b" cat"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_span_is_a_continuation(name):
    """The ids of prompt and span together decode to prompt and span."""
    tokenizer = TOKENIZERS[name]()
    vocabulary = vocabulary_of(tokenizer)
    prompt = tokenizer("there was a cat").input_ids
    for span in SPANS:
        encoding = vocabulary.encode(span)
        if encoding.exact:
            assert vocabulary.prompt_text(prompt + encoding.ids) == "there was a cat" + span


def test_special_tokens_are_invisible_and_cannot_be_injected():
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.piece(tokenizer.eos_token_id) == b"" == vocabulary.text([tokenizer.eos_token_id]).encode()
    assert tokenizer.eos_token_id not in vocabulary.encode("a<|end|>b").ids
    assert vocabulary.piece(len(tokenizer) + 5) == b""


def test_ids_without_an_embedding_are_never_produced():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("Lily", normalized=False)])
    assert Vocabulary(tokenizer).encode(" Lily").ids[-1] == len(tokenizer) - 1
    assert not Vocabulary(tokenizer, vocab_size=len(tokenizer) - 1).encode(" Lily").exact


def test_vocabularies_are_made_once_and_the_tokenizer_is_not_touched():
    tokenizer = unigram()
    before = tokenizer.backend_tokenizer.to_str()
    assert vocabulary_of(tokenizer) is vocabulary_of(tokenizer)
    vocabulary_of(tokenizer).encode(" </s>")
    assert tokenizer.backend_tokenizer.to_str() == before
    first = vocabulary_of(tokenizer)
    tokenizer.add_tokens(["Lily"])
    assert vocabulary_of(tokenizer) is not first


# Of the parts of a core, such as can be set in place.
SETTINGS = [
    ("pre_tokenizer", "add_prefix_space", True),
    ("pre_tokenizer", "prepend_scheme", "first"),
    ("decoder", "replacement", "!"),
    ("normalizer", "lowercase", False),
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_copy_has_settings_of_its_own(name):
    """Also where they are settings of the core, and where the caller has added tokens."""
    tokenizer = copy.deepcopy(TOKENIZERS[name]())
    tokenizer.add_tokens(["wholeword", AddedToken("<tool>", special=True)])
    expected = [tokenizer(text).input_ids for text in EVERYTHING]
    vocabulary, core = Vocabulary(tokenizer), tokenizer.backend_tokenizer
    own = vocabulary.tokenizer.backend_tokenizer
    assert own is not core and own.to_str() == core.to_str()
    core.enable_truncation(1)
    core.enable_padding(length=9)
    core.encode_special_tokens = True
    for part, setting, value in SETTINGS:
        if hasattr(getattr(core, part), setting):
            setattr(getattr(core, part), setting, value)
            assert getattr(getattr(core, part), setting) == value != getattr(getattr(own, part), setting)
    core.normalizer = core.pre_tokenizer = None
    tokenizer.add_tokens("brandnew")
    tokenizer.eos_token = "brandnew"
    assert [vocabulary.encode_prompt(text) for text in EVERYTHING] == expected
    assert vocabulary.tokenizer.eos_token != "brandnew" and "brandnew" not in own.get_vocab()
    before = core.to_str()
    for text in EVERYTHING:
        vocabulary.encode(text), vocabulary.has_boundary(text, 1)
    assert core.to_str() == before


def test_a_large_vocabulary_is_not_copied(monkeypatch):
    cores, copied = [], vocabulary_module._copied_backend
    monkeypatch.setattr(vocabulary_module, "_copied_backend", lambda core: cores.append(copied(core)) or cores[-1])
    words = {f"▁w{number}": number for number in range(20_000)}
    tokenizer = GemmaTokenizer(vocab=words | {"<unk>": 20_000, "<bos>": 20_001, "<eos>": 20_002}, merges=[])
    own = Vocabulary(tokenizer).tokenizer
    assert cores == [own.backend_tokenizer]
    assert own._vocab is tokenizer._vocab and len(own._vocab) > 20_000
    assert own.init_kwargs is not tokenizer.init_kwargs


def test_added_tokens_are_copied_however_many():
    """A slow tokenizer has tables of them of its own."""
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(11_000)])
    vocabulary, size = Vocabulary(tokenizer), len(tokenizer)
    tokenizer.add_tokens("brandnew")
    assert len(tokenizer) == size + 1 and len(vocabulary.tokenizer) == size > 11_000


def test_added_tokens_keep_their_ids():
    core = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    core.add_tokens(["x", AddedToken("b", special=True), "y"])
    own = vocabulary_module._copied_backend(core)
    assert own is not None and own.to_str() == core.to_str() and own.token_to_id("y") == 3

    class Gap:
        """A core whose one added token has an id that it gets in no other."""

        from_str = Tokenizer.from_str
        model = normalizer = pre_tokenizer = post_processor = decoder = None

        def __init__(self, model):
            self.added = []

        def add_tokens(self, tokens):
            self.added += tokens

        def get_added_tokens_decoder(self):
            return dict(enumerate(self.added)) or {7: AddedToken("x")}

    assert vocabulary_module._copied_backend(Gap(None)) is None


def test_identical_tokenizers():
    assert Vocabulary(byte_level()).is_same_as(Vocabulary(byte_level()))
    assert not Vocabulary(byte_level()).is_same_as(Vocabulary(unigram()))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_token_of_some_bytes_is_an_ordinary_one_where_there_is_one(name):
    """Byte fallback has a token for every byte, before the letters: what is never said where the letter is there."""
    vocabulary = vocabulary_of(TOKENIZERS[name]())
    pieces = vocabulary.all_pieces()
    assert vocabulary.token_of(b"") is None and vocabulary.token_of(b"no such piece") is None
    for piece in set(pieces) - {b""}:
        alike = [token for token, other in enumerate(pieces) if other == piece]
        names = vocabulary.tokenizer.convert_ids_to_tokens(alike)
        ordinary = [token for token, one in zip(alike, names, strict=True) if not one.startswith("<0x")]
        assert vocabulary.token_of(piece) == (ordinary or alike)[0]
    if name == "sentencepiece":
        assert vocabulary.tokenizer.convert_ids_to_tokens(vocabulary.token_of(b"a")) == "a"


def end_marking_tokenizer():
    """As of GPT-1: `</w>` says that a word ends."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    letters = [letter for letter in string.ascii_lowercase for letter in (letter, f"{letter}x")]
    trainer = trainers.BpeTrainer(
        vocab_size=80, special_tokens=["<unk>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(["the cat sat on saturday", *letters], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>")


def test_tokens_that_say_where_words_end_are_refused():
    """What such a token adds to a text depends on the token before it."""
    tokenizer = end_marking_tokenizer()
    assert Vocabulary(tokenizer).marks_word_ends
    assert not any(Vocabulary(make()).marks_word_ends for make in TOKENIZERS.values())
    main = copy.copy(tiny_model("llama", "byte_level"))
    pair = [(main, TOKENIZERS["byte_level"]()), (copy.copy(main), tokenizer)]
    for members in (pair, pair[::-1]):
        with pytest.raises(ValueError, match=r"tokens must say where words begin, but those of .* say where they end"):
            AdaFuseEnsemble(members).texts("the cat", max_new_tokens=2)


def test_words_of_a_text_that_a_tokenizer_normalizes():
    """It makes one character of a letter and its accent: its bytes are fewer than those of the words."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["a caf\u00e9 in Lima open"] * 3, trainer)
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    expected = [" caf\u00e9", " \u00e9t\u00e9", " in", " Lima", " open"]
    for form in ("NFC", "NFD"):
        words = [unicodedata.normalize(form, word) for word in expected]
        encoding = vocabulary.encode("".join(words))
        assert encoding.exact == (form == "NFC")
        found = by_word(words, encoding.ids, encoding.ids, vocabulary)
        assert [b"".join(map(vocabulary.piece, ids)).decode() for ids in found] == expected


class SlowWithBytes(PreTrainedTokenizer):
    """A tokenizer in Python with one token for each letter, and others for each byte of what it does not know."""

    def __init__(self, **kwargs):
        self._names = ["</s>", "▁", *"abcdefghijklmnopqrstuvwxyz", *(f"<0x{byte:02X}>" for byte in range(256))]
        super().__init__(eos_token="</s>", **kwargs)

    @property
    def vocab_size(self):
        return len(self._names)

    def get_vocab(self):
        return {name: index for index, name in enumerate(self._names)}

    def _tokenize(self, text, **kwargs):
        names = []
        for char in text.replace(" ", "▁"):
            names += [char] if char in self._names else [f"<0x{byte:02X}>" for byte in char.encode()]
        return names

    def _convert_token_to_id(self, token):
        return self._names.index(token)

    def _convert_id_to_token(self, index):
        return self._names[index]

    def convert_tokens_to_string(self, tokens):
        parts = [bytes([int(t[3:5], 16)]) if t.startswith("<0x") else t.replace("▁", " ").encode() for t in tokens]
        return b"".join(parts).decode("utf-8", "replace")


def test_bytes_of_a_tokenizer_whose_decoder_is_not_known():
    """A part of a character is its bytes, not those of the mark for what cannot be read."""
    vocabulary = Vocabulary(SlowWithBytes())
    text = " a\u12000\u00e9\ufffdb"
    encoding = vocabulary.encode(text)
    assert encoding.exact and b"".join(map(vocabulary.piece, encoding.ids)) == text.encode()
    assert vocabulary.piece(encoding.ids[2]) == "\u1200".encode()[:1]
