"""What each process of the tensor-parallel test does, under torchrun: load a share of two models, decode, report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from support.tiny import TOKENIZERS
from transformers import AutoModelForCausalLM

from hf_adafuse import enable_adafuse

PROMPTS = ["Once upon a time", "She"]


def load(folder: Path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def decode(main, assistant, prompts=PROMPTS) -> dict:
    """The ids of the prompts, and the scores of all candidates."""
    tokenizer, characters = TOKENIZERS["byte_level"](), TOKENIZERS["characters"]()
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    output = enable_adafuse(main).generate(
        **inputs, tokenizer=tokenizer, assistant_models=[assistant], assistant_tokenizers=[characters],
        max_new_tokens=8, do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    scores = [candidate.score for rounds in output.rounds for committed in rounds for candidate in committed.candidates]
    return {"sequences": output.sequences.tolist(), "scores": scores}


def share(model) -> int:
    """The number of rows of a projection that this process holds."""
    weight = model.model.layers[0].mlp.up_proj.weight
    return (weight.to_local() if hasattr(weight, "to_local") else weight).shape[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    main, assistant = (load(folder / name, tp_plan="auto") for name in ("main", "assistant"))
    rank = int(os.environ["RANK"])
    found = decode(main, assistant) | {"shares": [share(main), share(assistant)]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    # Threads of gloo may still hold tensors, and abort a process whose interpreter ends meanwhile.
    os._exit(0)
