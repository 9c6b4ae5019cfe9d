"""AdaFuse: adaptive word-level ensemble decoding of several language models inside transformers' `generate()`.

Members by name, as one object. The main model is the first:

```python
>>> from hf_adafuse import AdaFuseEnsemble

>>> ensemble = AdaFuseEnsemble(["Qwen/Qwen2.5-0.5B-Instruct", "google/gemma-3-270m-it"])
>>> len(ensemble.texts(["The capital of Peru is"], max_new_tokens=8))
1

```

Or inside a model's own `generate()`:

```python
>>> from transformers import AutoModelForCausalLM, AutoTokenizer
>>> from hf_adafuse import enable_adafuse

>>> names = ["Qwen/Qwen2.5-0.5B-Instruct", "google/gemma-3-270m-it"]
>>> main, other = map(AutoModelForCausalLM.from_pretrained, names)
>>> tokenizer = AutoTokenizer.from_pretrained(names[0])
>>> inputs = tokenizer("The capital of Peru is", return_tensors="pt")
>>> ids = enable_adafuse(main).generate(
...     **inputs, assistant_models=[other], tokenizer=tokenizer, adafuse_config="robust", max_new_tokens=8
... )

```

In the shell: `hf-adafuse generate --model A --assistant B "The capital of Peru is"`; `hf-adafuse --help` lists
the other commands.

One base with several LoRA adapters is several members that share all weights. The main model runs with the adapter that
is active, an assistant with the one it is named with:

```python
>>> from peft import LoraConfig, get_peft_model
>>> from transformers import AutoModelForCausalLM, AutoTokenizer
>>> from hf_adafuse import enable_adafuse

>>> name = "mistralai/Mistral-7B-Instruct-v0.3"
>>> tokenizer = AutoTokenizer.from_pretrained(name)
>>> shared = get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(), "law")
>>> shared.add_adapter("tales", LoraConfig())
>>> tales = dict(assistant_models=[(shared, "tales")], assistant_tokenizers=[tokenizer])
>>> model = enable_adafuse(shared.get_base_model(), **tales, tokenizer=tokenizer)
>>> inputs = tokenizer("Once upon a time", return_tensors="pt")
>>> output = model.generate(**inputs, max_new_tokens=16, return_dict_in_generate=True)
>>> len(output.stats["members"])
2

```
"""

from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AdaFuseCandidate": "outputs",
    "AdaFuseConfig": "config",
    "AdaFuseDecodingError": "decoding.progress",
    "AdaFuseEnsemble": "ensemble",
    "AdaFuseGenerationMixin": "generation",
    "AdaFuseOutput": "outputs",
    "AdaFusePipeline": "pipelines",
    "AdaFusePredictor": "batch",
    "AdaFuseRound": "outputs",
    "AdaFuseRounds": "rounds.round_lists",
    "AdaFuseRoundsBatch": "rounds.round_lists",
    "AnswerScore": "confidence.answer_score",
    "BranchLogitsProcessor": "logits_process",
    "MarginCriteria": "stopping_criteria",
    "WordBoundaryCriteria": "stopping_criteria",
    "NextToken": "decoding.strategies.token_strategy",
    "ServedModel": "servers.served_model",
    "SpanStrategy": "decoding.strategies.strategy",
    "TokenStrategy": "decoding.strategies.token_strategy",
    "chat_inputs": "members.chat",
    "disable_adafuse": "generation",
    "enable_adafuse": "generation",
    "export_adafuse": "hub.export",
    "prefix_caching": "trees.shared_prefix",
    "register_strategy": "decoding.strategies.registry",
    "text_inputs": "members.prompt_inputs",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Imported when first used: the command line answers `--help` without waiting for torch.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    # Without what is imported here and the inner modules that are loaded by now: nobody completes to these.
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
