"""The methods of the field, one module each. `strategy` says what a method is, `registry` which there are.

`adafuse` is the paper's method. `words` is this project's own, and the preset `robust` uses it. Both propose by
`adaptive_spans`.

A method over spans says how a member proposes (`drafting` has the ways) and which candidate is committed; one over
tokens says what comes next from the members' distributions. All else, the loop, batches, caches and traces, is the
decoder's.
"""
