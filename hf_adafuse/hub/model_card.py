"""The README.md of an exported repository: metadata and usage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TITLE = """\
# {title}

{what} They decode together with
[AdaFuse](https://arxiv.org/abs/2601.06022): word by word, each model proposes a few words, all models score every
proposal, and the best one is what the text goes on with. The code is in this repository; nothing needs to be installed
beside transformers, and `trust_remote_code=True` lets transformers run it.
"""

_FULL = """
## Use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False).to(model.device)
output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

```python
from transformers import pipeline

pipe = pipeline("text-generation", model="{name}", trust_remote_code=True)
print(pipe("Once upon a time", max_new_tokens=32, do_sample=False)[0]["generated_text"])
```

Over HTTP, for any OpenAI client (needs `pip install "transformers[serving]"`; the tokenizer needs a chat template, and
the assistants read the chat as the main model's template renders it):

```bash
transformers serve {name} --trust-remote-code
```

Without `trust_remote_code` this is the main model alone. The assistants are loaded with the first text, to the main
model's device and in its dtype. `generate(..., adafuse_config=False)` gives the main model's ordinary text.
"""

_OTHER_MAIN = """
{heading}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

other = "{main}"
tokenizer = AutoTokenizer.from_pretrained(other)
model = AutoModelForCausalLM.from_pretrained(other)
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False).to(model.device)
output = model.generate(
    **inputs,
    max_new_tokens=32,
    do_sample=False,
    tokenizer=tokenizer,{assistants}
    custom_generate="{name}",
    trust_remote_code=True,
)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```
"""

_SETTINGS = """
## Settings

{members}

```json
{settings}
```

{where} `generate(...)` takes others as
`adafuse_config={{...}}`, and other assistants as `assistant_models=[...]`: loaded models, Hub names or folders.
Decoding is deterministic where the call does not ask for `do_sample=True`. The package `hf_adafuse`, from which this
repository was written, has the documentation, a command line and a trace of every round. Its code is under the MIT
license; weights keep the licenses of the models that they are of.
"""


def model_card(
    name: str, main: str | None, assistants: Sequence[str], base_models: Sequence[str], settings: Mapping[str, Any]
) -> str:
    """
    The text of README.md.

    Args:
        name (`str`): what a user passes to `from_pretrained`.
        main (`str`, *optional*): what the main model is called; `None` for a repository without weights.
        assistants (`list[str]`): what the assistants are called.
        base_models (`list[str]`): the members that are on the Hub.
        settings (`dict`): the fields of `AdaFuseConfig`.
    """
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["custom_generate", "adafuse", "ensemble"]}
    if main is not None:
        metadata["pipeline_tag"] = "text-generation"
    if base_models:
        metadata["base_model"] = list(base_models)
    # A JSON value is a YAML value, with no special case for any name.
    head = "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in metadata.items())
    number, named = 1 + len(assistants), ", ".join([str(main), *assistants])
    what = "An ensemble of language models." if main is None else f"An ensemble of {number} language models: {named}."
    text = _TITLE.format(title=name.rpartition("/")[2], what=what)
    if main is not None:
        text += _FULL.format(name=name)
    text += _OTHER_MAIN.format(
        heading="## Use it" if main is None else "## With another main model",
        main="ORGANISATION/MAIN-MODEL",
        assistants="" if assistants else '\n    assistant_models=["ORGANISATION/OTHER-MODEL"],',
        name=name,
    )
    where = (
        "They are in `generation_config.json`." if main is not None else "They are in `custom_generate/exported.py`."
    )
    members = [] if main is None else [f"- main model: {main}"]
    members += [f"- assistant: {assistant}" for assistant in assistants]
    listed = "\n".join(members) or "Assistants are given with each call."
    shown = json.dumps(dict(settings), indent=2, ensure_ascii=False)
    return f"---\n{head}---\n\n{text}{_SETTINGS.format(members=listed, settings=shown, where=where)}"
