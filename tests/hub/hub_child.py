"""Run by test_hub.py in a fresh process where hf_adafuse cannot be imported, in the folder with the repositories and
members: loads them with transformers alone and writes what they gave, as one JSON object.
"""

import contextlib
import copy
import io
import json
import pickle
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

torch.set_num_threads(1)
SHORT = {"max_new_tokens": 12, "do_sample": False}
PROMPTS = ["Once upon a time", "She"]


def load(name, trust=True, **kwargs):
    return AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trust, **kwargs)


def inputs_of(name):
    return AutoTokenizer.from_pretrained(name)(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)


def ids(model, inputs, **kwargs):
    return model.generate(**inputs, **SHORT, **kwargs).tolist()


def assistants_of(output, model):
    """The assistants that the repository's code has loaded for a model."""
    code = sys.modules[type(output).__module__.rpartition(".")[0] + ".loading"]
    return [loaded for (kind, *_), loaded in code._ASSISTANTS[model].items() if kind == "model"]


def state(model):
    return [type(model).__name__, sorted(vars(model)), model.generation_config.to_dict(), model.config.to_dict()]


def run_card(folder, **names):
    """What the model card's Python blocks print."""
    texts = []
    for block in re.findall(r"```python\n(.*?)```", (Path(folder) / "README.md").read_text("utf-8"), flags=re.DOTALL):
        for placeholder, name in names.items():
            block = block.replace(f"ORGANISATION/{placeholder}-MODEL", str(name))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, {})
        texts.append(printed.getvalue().removesuffix("\n"))
    return texts


def members_of_the_repository():
    inputs, main = inputs_of("full"), load("full")
    output = main.generate(**inputs, **SHORT, return_dict_in_generate=True)
    yield "class", [type(main).__name__, type(main).__module__.split(".")[0]]
    yield "auto", output.sequences.tolist()
    yield "auto: rounds", [[committed.text for committed in row] for row in output.rounds]
    first = assistants_of(output, main)
    yield "off", ids(main, inputs, adafuse_config=False)
    yield "settings of the call", ids(main, inputs, adafuse_config={"max_words": 1, "max_word_tokens": 6})
    yield "deepcopy", ids(copy.deepcopy(main), inputs)
    yield "pickle", ids(pickle.loads(pickle.dumps(main)), inputs)
    yield "loaded once", [len(first), first[0] is assistants_of(output, main)[0]]
    half = load("full", dtype=torch.bfloat16)
    output = half.generate(**inputs, **SHORT, return_dict_in_generate=True)
    yield "dtype", [str(assistant.dtype) for assistant in assistants_of(output, half)]
    main.save_pretrained("saved")
    AutoTokenizer.from_pretrained("full").save_pretrained("saved")
    yield "saved again", ids(load("saved"), inputs)
    yield "saved again: files", sorted(str(path.relative_to("saved")) for path in Path("saved").rglob("*"))


def doors():
    inputs, plain = inputs_of("full"), load("full", trust=None)
    yield "plain", ids(plain, inputs)
    yield "plain: class", type(plain).__module__
    yield "custom_generate, own main", ids(plain, inputs, custom_generate="full", trust_remote_code=True)
    pipe = pipeline("text-generation", model="full", trust_remote_code=True)
    yield "pipeline", [row[0]["generated_text"] for row in pipe(PROMPTS, **SHORT, batch_size=2)]
    defaults = pipe(PROMPTS, max_new_tokens=SHORT["max_new_tokens"], batch_size=2)  # do_sample=True is among them
    yield "pipeline, its own defaults", [row[0]["generated_text"] for row in defaults]
    other, inputs = load("other main", trust=None), inputs_of("other main")
    before = state(other)
    options = {"trust_remote_code": True, "tokenizer": AutoTokenizer.from_pretrained("other main")}
    yield "custom_generate", ids(other, inputs, custom_generate="full", **options)
    yield "method", ids(other, inputs, custom_generate="method", assistant_models=["assistant"], **options)
    # From the Hub's cache, by name: assistants in a folder of the repository, or a repository of their own.
    yield "hub, custom_generate", ids(other, inputs, custom_generate="tiny/full", **options)
    yield "unchanged", before == state(other)
    yield "hub, folders", ids(load("tiny/full"), inputs_of("tiny/full"))
    yield "hub, names", ids(load("names"), inputs_of("names"))


def main():
    try:
        import hf_adafuse  # noqa: F401
    except ImportError as error:
        results = {"import": str(error)}
    results.update(members_of_the_repository())
    results.update(doors())
    results["cards"] = run_card("full", MAIN="other main") + run_card("method", MAIN="other main", OTHER="assistant")
    results["modules"] = [name for name in sys.modules if name.startswith("hf_adafuse.")]
    json.dump(results, sys.stdout)


main()
