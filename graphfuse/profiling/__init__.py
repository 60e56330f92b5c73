"""Where a model's time goes, by module and by kind of work: behind `graphfuse profile`.

labels.py       a label for each node of a rewritten graph: module path, kind of work, op
ranges.py       a compiled model whose nodes, or Inductor kernels, run under profiler ranges that carry the labels
measure.py      a prefill and a few steps of a model under torch.profiler
attribution.py  a trace, as torch writes it, → time by label; also of a trace that was saved
result.py, text.py, plot.py   what was found, as JSON, table and picture
"""
