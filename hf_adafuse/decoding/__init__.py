"""The algorithm: propose, score, choose, append. `round` is the loop on one screen; read it first.

Rounds: `span_round`, `token_round`, `verified_round`, `sampled_round`, `certainty_gate`, made by `round_factory`. The
winner goes to `committed_text` or `joint_answer`. Parts of a round: `proposer` (how one member proposes),
`word_splitter` (what a word is), `member_turns` (who proposes when), `samplers` (what is drawn at random), `pool` (the
candidates), `selector`, `scored_spans` and `scoring` (which candidate wins), `member_weights`, `reviews` (ratings),
`answer_stops` (where an answer ends). Around rounds: `decoder` decodes a batch, which has `batch_slots`. Rounds ask for
nodes by `requests`, and `scheduler` serves many prompts in common passes. `speculation` saves passes, `long_spans`
memory. `progress` is what became of a prompt. `strategies` has the methods, one a module.
"""
