"""Run by test_hub.py in a fresh process with hf_adafuse, in the folder with the repositories and members: what a
repository gives by the package, loaded with its own code ("trusted") and without, as one JSON object.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_adafuse
import hf_adafuse.pipelines

torch.set_num_threads(1)
SHORT = {"max_new_tokens": 12, "do_sample": False}
PROMPT = "Once upon a time"
ASSISTANT = "packaged/assistant_1"
TRUSTED = {"trust_remote_code": True}


def load(**options):
    return AutoModelForCausalLM.from_pretrained("packaged", **options)


def text(model):
    tokenizer = AutoTokenizer.from_pretrained("packaged")
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    return tokenizer.decode(model.generate(**inputs, **SHORT)[0], skip_special_tokens=True)


def text_of(members, config=None, **options):
    return PROMPT + hf_adafuse.AdaFuseEnsemble(members, config, **options).texts(PROMPT, **SHORT)[0]


def results():
    yield "package", str(Path(hf_adafuse.__file__).parents[1])
    for kind, options in [("", {}), (", trusted", TRUSTED)]:
        yield f"enabled{kind}", text(hf_adafuse.enable_adafuse(load(**options), [ASSISTANT]))
        yield f"ensemble{kind}", text_of(["packaged", ASSISTANT], **options)
        yield f"with B{kind}", text_of(["packaged", "other main"], **options)
        pipe = pipeline("adafuse-text-generation", model="packaged", assistant_models=[ASSISTANT], **options)
        yield f"pipeline{kind}", pipe(PROMPT, **SHORT)[0]["generated_text"]
    config = load().generation_config.adafuse_config
    yield "with B, by hand", text_of([(load(), AutoTokenizer.from_pretrained("packaged")), "other main"], config)
    model = load(**TRUSTED)
    own = type(model)
    hf_adafuse.enable_adafuse(model, ["other main"])
    assert type(hf_adafuse.disable_adafuse(model)) is own
    yield "disabled again", text(model)
    yield "never enabled", text(hf_adafuse.disable_adafuse(load(**TRUSTED)))


json.dump(dict(results()), sys.stdout)
