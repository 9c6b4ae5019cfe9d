"""Linear layers over few tokens, quicker on CPU: a kernel in C, where one was built, and a choice by the clock.

`with_small_batch_linears` of `small_batch_linear` gives a model whose layers multiply in the quickest way. Nothing else
of the package knows that there is a kernel; all works, and is tested, without it.
"""
