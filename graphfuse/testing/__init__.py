"""Golden-graph tests of passes and models: no GPU, no weights, one process.

with fake_tp(4) as group:
    traced = trace(lambda: MyModel(group), torch.zeros(1, 8, dtype=torch.long), group)
    assert_golden(traced.after, "tests/golden/my_model.txt")
"""

from graphfuse.testing.fake_tp import fake_tp
from graphfuse.testing.golden import assert_golden, graph_text
from graphfuse.testing.trace import Trace, assert_fused, trace

__all__ = ["Trace", "assert_fused", "assert_golden", "fake_tp", "graph_text", "trace"]
