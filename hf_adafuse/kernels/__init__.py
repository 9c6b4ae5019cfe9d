"""Linear layers over few tokens, quicker on CPU: a kernel in C, where one was built, and a choice by the clock.

`small_batch_linear` is the door: `with_small_batch_linears` gives a model whose layers multiply in the quickest way. All
works, and is tested, without the kernel.
"""
