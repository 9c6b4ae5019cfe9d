"""Models that see images: with text alone they are members like all others; with images the main model reads both."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from support.calls import no_forward
from support.cases import Case, assert_equal
from support.multimodal import CLASSES, IMAGE, TOKENIZER, features_of, tiny_with_images
from support.reference import RefMember, reference_decode
from support.tiny import TOKENIZERS, eos_ids, tiny_model

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble, enable_adafuse

PROMPTS = ["Once upon a time", "She"]
OTHER = TOKENIZERS["characters"]()
HERE = [name for name in CLASSES if hasattr(hf, name)]


def test_there_are_classes():
    assert len(HERE) >= 18


@pytest.mark.parametrize("name", HERE)
def test_text_alone_gives_ordinary_greedy(name):
    model, settings = tiny_with_images(name), dict(max_new_tokens=8, do_sample=False, pad_token_id=2)
    enabled = enable_adafuse(copy.copy(model))
    given = dict(tokenizer=TOKENIZER, adafuse_config={"num_branches": 1}, **settings)
    batch = TOKENIZER(PROMPTS, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    rows = enabled.generate(**batch, **given)[:, batch["input_ids"].shape[1] :]
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = TOKENIZER(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, **settings)
        assert torch.equal(enabled.generate(ids, **given), expected)
        new = expected[0, ids.shape[1] :]
        assert torch.equal(row[: len(new)], new) and (row[len(new) :] == 2).all()


@pytest.mark.parametrize("role", ["main", "assistant"])
@pytest.mark.parametrize("name", HERE)
def test_ensembles_equal_the_oracle(name, role):
    members = [(tiny_with_images(name), TOKENIZER), (tiny_model("llama", "characters", 1), OTHER)]
    models, tokenizers = zip(*(members if role == "main" else members[::-1]), strict=True)
    assert_equal(Case(list(models), list(tokenizers), AdaFuseConfig(max_words=2, num_branches=2), PROMPTS, 8))


# Of these a prompt with images is tested.
WITH_IMAGES = (
    "LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "InternVLForConditionalGeneration",
    "AyaVisionForConditionalGeneration", "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration",
)  # fmt: skip


def with_image(name, num_prompts=1):
    """A model, ids of prompts with an image each, left-padded, the arguments of the images, and the texts."""
    model = tiny_with_images(name)
    pixels, number = features_of(model, num_prompts)
    texts = ["See this. What is it?", "This is"][:num_prompts]
    rows = [[*TOKENIZER("Look: ").input_ids, *[IMAGE] * number, *TOKENIZER(text).input_ids] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[2] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    images = dict(pixel_values=pixels)
    if "Gemma3" in name:
        images["token_type_ids"] = (ids == IMAGE).long()
    return model, ids, mask, images


class SeesImages(torch.nn.Module):
    """For the oracle: a model whose every plain pass over a text has the image, too."""

    def __init__(self, model, images):
        super().__init__()
        self.model, self.images, self.config = model, images, model.config
        self.generation_config = model.generation_config

    def forward(self, input_ids, **kwargs):
        images = dict(self.images)
        if "token_type_ids" in images:
            images["token_type_ids"] = (input_ids == IMAGE).long()
        return self.model(input_ids=input_ids, **images, **kwargs)


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_alone_give_ordinary_greedy(name, num_prompts):
    model, ids, mask, images = with_image(name, num_prompts)
    settings = dict(max_new_tokens=10, do_sample=False, pad_token_id=2)
    enabled = enable_adafuse(copy.copy(model))
    given = dict(input_ids=ids, attention_mask=mask, tokenizer=TOKENIZER, **settings, **images)
    rows = enabled.generate(**given, adafuse_config={"num_branches": 1})[:, ids.shape[1] :]
    for row in range(num_prompts):
        own = {key: value[row : row + 1] for key, value in images.items()}
        own = {key: value[:, mask[row] == 1] if key == "token_type_ids" else value for key, value in own.items()}
        alone = ids[row : row + 1, mask[row] == 1]
        expected = model.generate(input_ids=alone, **own, **settings)[0, alone.shape[1] :]
        assert torch.equal(rows[row, : len(expected)], expected) and (rows[row, len(expected) :] == 2).all()


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_image_is_seen(name):
    """What the model says next depends on the image."""
    model, ids, mask, images = with_image(name)
    given = dict(input_ids=ids, attention_mask=mask, tokenizer=TOKENIZER, max_new_tokens=1, adafuse_config=True)
    given |= dict(return_dict_in_generate=True, output_logits=True)
    enabled = enable_adafuse(copy.copy(model))
    seen = enabled.generate(**given, **images).logits[0]
    other = enabled.generate(**given, **images | dict(pixel_values=-images["pixel_values"])).logits[0]
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, **images).logits[:, -1]
    assert torch.allclose(seen, expected, atol=1e-4) and not torch.allclose(seen, other, atol=1e-4)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_ensembles_with_images_equal_the_oracle(name):
    """The main model sees the image; the other member reads the text around it."""
    model, ids, mask, images = with_image(name)
    other, config = tiny_model("llama", "characters", 1), AdaFuseConfig(max_words=2, num_branches=2)
    row = ids[0].tolist()
    text = TOKENIZER.decode([token for token in row if token != IMAGE], skip_special_tokens=True)
    members = [
        RefMember(SeesImages(model, images), TOKENIZER, eos_ids(TOKENIZER)),
        RefMember(other, OTHER, eos_ids(OTHER)),
    ]
    expected, texts = reference_decode(members, [row, OTHER(text).input_ids], config, 8)
    output = enable_adafuse(copy.copy(model)).generate(
        input_ids=ids, attention_mask=mask, **images, tokenizer=TOKENIZER, assistant_models=[other],
        assistant_tokenizers=[OTHER], adafuse_config=config, max_new_tokens=8, return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences[0, ids.shape[1] :].tolist() == expected
    assert [committed.text for committed in output.rounds[0]][:-1] == texts[: len(output.rounds[0])][:-1]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Qwen2VLForConditionalGeneration", r"hold \['pixel_values'\]: its tokens have positions on several axes"),
        ("MllamaForConditionalGeneration", "only classes that turn images into embeddings of the prompt's tokens"),
    ],
)
def test_images_are_refused_by_name_before_the_first_pass(name, match):
    model = enable_adafuse(copy.copy(tiny_with_images(name)))
    given = dict(input_ids=torch.tensor([[5, IMAGE, 6]]), pixel_values=torch.randn(1, 3, 28, 28), tokenizer=TOKENIZER)
    with no_forward(model), pytest.raises(ValueError, match=f"{name}, but .*{match}"):
        model.generate(**given, adafuse_config=True, max_new_tokens=2)


def test_a_text_model_refuses_images():
    model = enable_adafuse(copy.copy(tiny_model()))
    with no_forward(model), pytest.raises(ValueError, match=r"does not take \['pixel_values'\]"):
        model.generate(torch.tensor([[5, 6]]), pixel_values=torch.ones(1, 3, 28, 28), tokenizer=TOKENIZER,
                       adafuse_config=True, max_new_tokens=2)  # fmt: skip


def test_a_prompt_that_ends_with_an_image_is_refused():
    model, ids, mask, images = with_image("LlavaForConditionalGeneration")
    last = int((ids == IMAGE).nonzero()[-1, 1]) + 1
    enabled = enable_adafuse(copy.copy(model))
    enabled.generate(input_ids=ids, **images, tokenizer=TOKENIZER, adafuse_config=True, max_new_tokens=2)
    with no_forward(enabled), pytest.raises(ValueError, match="must end with text behind its images"):
        enabled.generate(input_ids=ids[:, :last], **images, tokenizer=TOKENIZER, adafuse_config=True, max_new_tokens=2)


def test_folders_load_by_name(tmp_path):
    model = tiny_with_images("LlavaForConditionalGeneration")
    model.save_pretrained(tmp_path / "llava"), TOKENIZER.save_pretrained(tmp_path / "llava")
    ensemble = AdaFuseEnsemble([str(tmp_path / "llava"), (tiny_model("llama", "characters", 1), OTHER)])
    assert type(ensemble.model).__name__ == "LlavaForConditionalGeneration"
    assert len(ensemble.texts("She", max_new_tokens=4)) == 1


def test_a_folder_of_another_kind_is_refused_in_one_line(tmp_path):
    config = hf.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    hf.ViTForImageClassification(config).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a causal language model, with or without images") as caught:
        AdaFuseEnsemble([str(tmp_path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(vision_feature_layer=-1), "how images are encoded cannot be changed"),
        (dict(num_return_sequences=2, do_sample=True), "`num_return_sequences` must be 1 with images"),
        (dict(input_ids=torch.tensor([[5, 6, 7]]), attention_mask=None), "must hold a token for its image"),
    ],
)
def test_what_would_lose_images_is_refused(changes, match):
    model, ids, mask, images = with_image("LlavaForConditionalGeneration")
    given = dict(input_ids=ids, attention_mask=mask, **images, tokenizer=TOKENIZER, adafuse_config=True) | changes
    with pytest.raises(ValueError, match=match):
        enable_adafuse(copy.copy(model)).generate(**given, max_new_tokens=2)


def test_images_of_assistants_are_refused_and_no_cache_comes_back():
    model, ids, mask, images = with_image("LlavaForConditionalGeneration")
    given = dict(input_ids=ids, attention_mask=mask, **images, tokenizer=TOKENIZER, max_new_tokens=2)
    enabled = enable_adafuse(copy.copy(model))
    assistants = dict(assistant_models=[model], assistant_tokenizers=[TOKENIZER])
    with pytest.raises(ValueError, match=r"but also holds \['pixel_values'\]"):
        enabled.generate(**given, **assistants, assistant_inputs=[dict(input_ids=ids, **images)])
    output = enabled.generate(**given, adafuse_config=True, return_dict_in_generate=True)
    assert getattr(output, "cache", None) is None and output.sequences.shape[0] == 1
