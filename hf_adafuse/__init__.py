"""AdaFuse: adaptive word-level ensemble decoding of several language models inside transformers' `generate()`."""

from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AdaFuseCandidate": "outputs",
    "AdaFuseConfig": "config",
    "AdaFuseDecodingError": "decoding.progress",
    "AdaFuseGenerationMixin": "generation",
    "AdaFuseOutput": "outputs",
    "AdaFusePipeline": "pipelines",
    "AdaFuseRound": "outputs",
    "AdaFuseRounds": "rounds.round_lists",
    "AdaFuseRoundsBatch": "rounds.round_lists",
    "BranchLogitsProcessor": "logits_process",
    "MarginCriteria": "stopping_criteria",
    "WordBoundaryCriteria": "stopping_criteria",
    "chat_inputs": "members.chat",
    "disable_adafuse": "generation",
    "enable_adafuse": "generation",
    "export_adafuse": "hub.export",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Imported when first used: the command line answers `--help` without waiting for torch.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
