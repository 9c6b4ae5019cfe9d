"""AdaFuse: adaptive word-level ensemble decoding of several language models inside transformers' `generate()`.

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
    return sorted({*globals(), *__all__})
