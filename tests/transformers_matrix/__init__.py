"""Every causal language model of the installed transformers that has a tensor-parallel plan, made tiny, compiled at
TP 2 and compared with the whole model in eager mode. `python -m tests.transformers_matrix` writes
docs/transformers.md."""
