"""A member of an ensemble: a model with its tokenizer, what it reads of a prompt, and the log-probabilities it gives.

`model_handle` checks a model and makes a `Member` of it for a call. `loading` finds models and tokenizers by name.
`vocabulary` sees a tokenizer's tokens as text. `prompt_inputs`, `chat` and `templates` write each member's prompts.
`processors` calls logits processors, `structured` makes grammars. `node_logprobs` is what is read off a tree's node.
What members do together is decided in `decoding`.
"""
