"""`AdaFusePipeline`: text generation with an ensemble, each member reading a chat through its own template.

Importing this module registers it as the task `adafuse-text-generation`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.text_generation import Chat, TextGenerationPipeline

from .call.arguments import member_handles
from .generation import AdaFuseGenerationMixin, default_to_greedy, enable_adafuse
from .members.chat import chat_inputs
from .members.prompt_inputs import text_inputs
from .members.vocabulary import vocabulary_of

TASK = "adafuse-text-generation"

# Arguments of `apply_chat_template` that are the main tokenizer's own affair.
_OF_THE_MAIN = ("padding", "return_tensors", "return_dict", "tokenize")


class AdaFusePipeline(TextGenerationPipeline):
    """
    [`~transformers.TextGenerationPipeline`] for an ensemble. It gives `generate()` the tokenizer, renders a chat with
    each member's own chat template, encodes a text with each member's own tokenizer, leaves out an end token that the
    main tokenizer appends to a text, keeps the space at the start of a continuation, and enables the model with
    [`enable_adafuse`] where that has not been done. It samples where it is given `do_sample=True`, and not by default.

    Example:

    ```python
    >>> import hf_adafuse.pipelines
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    >>> names = ["mistralai/Mistral-7B-Instruct-v0.3", "meta-llama/Llama-3.1-8B-Instruct"]
    >>> tok, other_tok = [AutoTokenizer.from_pretrained(name) for name in names]
    >>> model, other = [AutoModelForCausalLM.from_pretrained(name) for name in names]
    >>> assistants = dict(assistant_models=[other], assistant_tokenizers=[other_tok])
    >>> pipe = pipeline("adafuse-text-generation", model=model, tokenizer=tok, **assistants)
    >>> answer = pipe([{"role": "user", "content": "Who wrote Faust?"}], max_new_tokens=64)
    >>> answer[0]["generated_text"][-1]["role"]
    'assistant'

    ```

    Args:
        model (`PreTrainedModel`): the main model. Its generation config says `do_sample=False` from then on where it
            says nothing.
        assistant_models, assistant_tokenizers, adafuse_config (*optional*): as in `generate()` with AdaFuse; here, in
            a call, or bound to the model.
        args, kwargs: as in [`~transformers.TextGenerationPipeline`].
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(model, AdaFuseGenerationMixin):
            enable_adafuse(model)
        default_to_greedy(model)
        super().__init__(model, *args, **kwargs)

    def preprocess(self, prompt_text: Any, **kwargs: Any) -> Any:
        """Tokenize a prompt or render a chat for the main model; both keep what the assistants' own prompts are made
        of: a chat how it was rendered, a prompt its text, where all of it has been kept."""
        inputs = super().preprocess(prompt_text, **kwargs)
        encoding = kwargs.get("tokenizer_encode_kwargs") or {}
        if isinstance(prompt_text, Chat):
            options = {key: kwargs.get(key) for key in ("continue_final_message", "tools", "documents", "truncation")}
            options.update({key: value for key, value in encoding.items() if key not in _OF_THE_MAIN})
            inputs["prompt_text"] = _TemplatedChat(prompt_text.messages, options)
        elif isinstance(prompt_text, str):
            added = encoding.get("add_special_tokens", kwargs.get("add_special_tokens")) is not False
            inputs = self._without_appended(inputs, kwargs.get("prefix", "") + prompt_text, added)
        return inputs

    def _without_appended(self, inputs: Any, text: str, has_special_tokens: bool) -> Any:
        """The inputs of a text that is to go on, without the end token that some tokenizers append to every text."""
        vocabulary = vocabulary_of(self.tokenizer)
        width = inputs["input_ids"].shape[-1]
        kept = width - vocabulary.num_appended(text) if has_special_tokens else width
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.shape[-1] == width:
                inputs[name] = value[..., :kept]
        # Truncation may have cut it, or the pipeline's way with long prompts.
        read = vocabulary.prompt_text(inputs["input_ids"][0].tolist())
        is_whole = read == vocabulary.prompt_text(vocabulary.encode_prompt(text))
        inputs["prompt_text"] = _KnownText(inputs["prompt_text"], text if is_whole else None)
        return inputs

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:
        generate_kwargs["tokenizer"] = generate_kwargs.get("tokenizer") or self.tokenizer
        prompts = model_inputs["prompt_text"]
        prompts = prompts if isinstance(prompts, list) else [prompts]
        if generate_kwargs.get("assistant_inputs") is None:
            inputs = self._assistant_inputs(prompts, generate_kwargs)
            if inputs is not None:
                generate_kwargs["assistant_inputs"] = inputs
        return super()._forward(model_inputs, **generate_kwargs)

    def _assistant_inputs(self, prompts: list[Any], generate_kwargs: dict[str, Any]) -> list[Any] | None:
        """The prompts as each assistant reads them; `None` where there is none to read them, and where they are to be
        made of the main model's ids."""
        texts = [prompt.whole for prompt in prompts if isinstance(prompt, _KnownText) and prompt.whole]
        is_chat = isinstance(prompts[0], _TemplatedChat)
        if not is_chat and len(texts) < len(prompts):
            return None
        config, own = generate_kwargs.get("generation_config"), generate_kwargs["tokenizer"]
        members = member_handles(self.model, generate_kwargs, config, own)
        if members is None or len(members) == 1:
            return None
        tokenizers = [member.tokenizer for member in members]
        if is_chat:
            made = chat_inputs([chat.messages for chat in prompts], tokenizers, **prompts[0].options)
        else:
            made = text_inputs(texts, tokenizers)
        return list(made["assistant_inputs"])

    def postprocess(self, model_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The records of the host's pipeline, with the space that decoding the new ids alone may have lost."""
        records = super().postprocess(model_outputs, *args, **kwargs)
        prompt, input_ids = model_outputs["prompt_text"], model_outputs["input_ids"]
        opens_an_answer = isinstance(prompt, Chat) and not _is_continued(prompt)
        if opens_an_answer or input_ids is None or prompt == "":  # at the start of a text a space is none
            return records
        rows = model_outputs["generated_sequence"][0].tolist()
        for record, row in zip(records, rows, strict=True):
            text = record.get("generated_text")
            if text is not None:
                record["generated_text"] = self._with_space(text, row[input_ids.shape[-1] :])
        return records

    def _with_space(self, text: Any, new_ids: list[int]) -> Any:
        alone = self.tokenizer.decode(new_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        behind = vocabulary_of(self.tokenizer).text(new_ids)
        space = behind[: len(behind) - len(alone)]
        if not space or behind != space + alone or space.strip():
            return text
        if isinstance(text, str):
            return text[: len(text) - len(alone)] + space + alone if text.endswith(alone) else text
        *messages, last = text
        return [*messages, {**last, "content": self._with_space(last["content"], new_ids)}]


class _KnownText(str):
    """A prompt with all of the text that the main model reads; `whole` is `None` where a part of it was cut."""

    whole: str | None

    def __new__(cls, prompt: str, whole: str | None = None) -> _KnownText:
        text = super().__new__(cls, prompt)
        text.whole = whole
        return text


class _TemplatedChat(Chat):
    """A chat with the options that its template was given."""

    def __init__(self, messages: Any, options: dict[str, Any]) -> None:
        super().__init__(messages)
        self.options = options


def _is_continued(chat: _TemplatedChat) -> bool:
    given = chat.options["continue_final_message"]
    return bool(chat.messages[-1]["role"] == "assistant" if given is None else given)


if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
    PIPELINE_REGISTRY.register_pipeline(
        TASK, pipeline_class=AdaFusePipeline, pt_model=AutoModelForCausalLM, type="text"
    )
    # With it, `save_pretrained` would write the task and a copy of this code beside the weights, and loading them would
    # then ask for trust in that copy. Without it, what is saved is the plain main model.
    del AdaFusePipeline._registered_impl
