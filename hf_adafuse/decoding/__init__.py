"""The algorithm: propose, pool, score, commit. `decoder` is the loop on one screen; read it first.

`words` says what a word is. `round_runner`: who proposes when and scores what; `proposer`: how one member proposes;
`pool`: a round's candidates. `selector` prepares the choice: a strategy compares `scored_spans`. `scoring` has the
fused score, `member_weights` the members' weights; `fused_answers` has a text that the method wrote itself take the
winner's place, `committer` appends the winner. A prompt's rounds ask for nodes (`requests`), and `scheduler` serves
many prompts in common passes; `speculation` and `prefetcher` only save passes. `sampled_rounds` and `word_sampler`
draw words instead. This room must not know models, or how caches and trees work.
"""
