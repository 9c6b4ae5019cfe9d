"""One model with its tokenizer: who takes part, what it reads of a prompt, and what it makes of the logits.

`participants` checks models, `loading` finds models and tokenizers by name, `vocabulary` is a tokenizer seen as text,
`mistral_tokenizers` gives those of mistral-common the usual interface,
`templates` makes prompts of records, `prompts` and `chat` give each member its own ids. `processor_request` says which
logits processors act on a member, `processors` how they are asked, `histories` copies those that remember, `structured`
makes grammars of them, `schema_keywords` and `json_patterns` say what of a JSON schema such a grammar does not
enforce. `node_logprobs` is what a member reads off a node, `member` all of that with its token trees.
`pair_ranker` and `answer_fuser` run models that are no members, on whole texts. This room must not know what members do
together: that is decided in `decoding`.
"""
