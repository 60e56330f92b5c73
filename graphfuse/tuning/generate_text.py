"""A measurement of generation as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphfuse.tuning.generate_plan import FUSED
from graphfuse.tuning.generate_result import Result, Row

COLUMNS = (
    "batch", "variant", "ms a step", "p99", "tokens/s", "TTFT p50, ms", "p99", "prefill tokens/s", "GPU busy",
    "J/token", "roofline, ms", "of it", "gain by fusion",
)  # fmt: skip


def show(result: Result) -> None:
    """Print a result to stdout, as wide as the terminal, or as it likes into a file or pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = 170
    for table in tables(result):
        console.print(table)
    for line in footnotes(result):
        console.print(escape(line), highlight=False)


def tables(result: Result) -> Iterator[Table]:
    if result.rows:
        yield _decode(result)
    if result.offline:
        yield _offline(result)
    yield _cold_start(result)


def _decode(result: Result) -> Table:
    table = Table(title=f"decoding behind prompts of {result.input_len} tokens", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "variant" else "right")
    ratios = result.ratios
    for row in result.rows:
        ratio = ratios.get(f"batch {row.batch}") if row.variant == FUSED else None
        table.add_row(*_cells(row), "" if ratio is None else _ratio(ratio))
    return table


def _cells(row: Row) -> list[str]:
    return [
        str(row.batch),
        row.variant,
        f"{row.tpot_ms:.3f}",
        f"{row.tpot_ms_p99:.3f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.ttft_ms_p50:,.1f}",
        f"{row.ttft_ms_p99:,.1f}",
        f"{row.prefill_tokens_per_s:,.0f}",
        "" if row.busy_share is None else f"{100 * row.busy_share:.1f} %",
        "" if row.joules_per_token is None else f"{row.joules_per_token:.3g}",
        f"{row.roofline_ms:.3f}",
        f"{100 * row.roofline_share:.0f} %",
    ]


def _offline(result: Result) -> Table:
    load = result.offline[0]
    title = f"{load.prompts} prompts at once, {load.input_len} tokens in and {load.output_len} out"
    table = Table(title=title, title_justify="left")
    for name in ("variant", "s", "tokens/s in and out", "tokens/s out", "gain by fusion"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for each in result.offline:
        ratio = result.ratios.get("offline") if each.variant == FUSED else None
        table.add_row(
            each.variant,
            " ".join(f"{seconds:.2f}" for seconds in each.seconds),
            f"{each.total_tokens_per_s:,.0f}",
            f"{each.output_tokens_per_s:,.0f}",
            "" if ratio is None else _ratio(ratio),
        )
    return table


def _cold_start(result: Result) -> Table:
    table = Table(title="cold start, s", title_justify="left")
    names = (
        "variant", "load", "memory, caches", "trace and compile", "of it tracing", "rewriting", "compiling",
        "first token", "graph capture", "without the load",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "variant" else "right")
    for variant, cold in result.cold_start.items():
        parts = (
            cold.load_s, cold.build_s, cold.prepare_s, cold.trace_s, cold.passes_s, cold.compile_s, cold.first_token_s,
            cold.graph_capture_s, cold.total_s,
        )  # fmt: skip
        table.add_row(variant, *("" if seconds is None else f"{seconds:.2f}" for seconds in parts))
    return table


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f}x ({ratio['min']:.3f} … {ratio['max']:.3f})"


def footnotes(result: Result) -> Iterator[str]:
    yield (
        f"{result.model} in {result.dtype} on {result.host}, {result.weights} weights, {result.executor}; attention of "
        f"prompts: {result.attention['prefill']}; of single tokens: {result.attention['decode']}"
    )
    for variant, totals in result.all_reduces.items():
        yield f"{variant}: {totals['all_reduce']} all-reduces, {totals['fused']} fused, {totals['merged']} merged"
    known = [row for row in result.rows if row.reduction_us is not None]
    memory = f"Roofline: weights and caches at {result.bandwidth_tb_s:g} TB/s"
    if known:
        first = known[0]
        yield f"{memory}, and {first.reductions} reductions of {first.reduction_us:g} µs each at batch {first.batch}."
    elif result.rows:
        yield f"{memory}. What a reduction takes is not known: there is no size table for this host."
    if len(result.cold_start) > 1:
        yield "Ratios are medians over rounds, with the least and the most. What starts second finds compilers' caches."
    yield from result.notes
