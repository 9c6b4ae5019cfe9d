"""The algorithm: propose, pool, score, commit. `decoder` is the loop on one screen; read it first.

`words` says what a word is, `proposer` how a member proposes, `pool` holds a round's candidates, `scoring` turns
log-probabilities into the fused score, `progress` is what became of each prompt. A prompt's rounds are a generator that
asks for nodes to be read (`requests`); `scheduler` serves many of them in common passes. `look_ahead` and `foresight`
only save passes. This room must not know models, caches or tensors.
"""
