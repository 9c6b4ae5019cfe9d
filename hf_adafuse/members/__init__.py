"""One model with its tokenizer: who takes part, what it reads of a prompt, and what it makes of the logits.

`participants` checks models and finds tokenizers, `vocabulary` is a tokenizer seen as text, `prompts` and `chat` give
each member its own ids, `processors` says which logits processors act on it, `readings` what it reads off a node, and
`member` is all of that with its token trees. This room must not know other members: what they do together is decided in
`decoding`.
"""
