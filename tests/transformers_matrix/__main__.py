"""Measure architectures on two gloo ranks and write docs/transformers.md: all, or those named.

python -m tests.transformers_matrix [NAME ...]
"""

from __future__ import annotations

import logging
import sys
import warnings

from tests.distributed.pool import RankError, RankPool
from tests.transformers_matrix import measure, table, tiny


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # each default config is checked against sizes that are made small
    known = tiny.architectures()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise SystemExit(f"Not among the {len(known)} architectures with a plan: {', '.join(unknown)}")
    found = {name: cells for name, cells in table.rows().items() if name in known}
    failed = {name: reason for name, reason in table.failures().items() if name in known}
    pool = RankPool()
    for name in names or known:
        outcome = on_ranks(pool, name)
        found.pop(name, None)
        failed.pop(name, None)
        if outcome.error:
            failed[name] = table.text(outcome.error)
        else:
            found[name] = table.cells(outcome)
        print(failed.get(name) or table.row(name, outcome), flush=True)
        table.write(found, failed)
    pool.close()


def on_ranks(pool: RankPool, name: str) -> measure.Outcome:
    """The outcome, which is the same on each rank but for the difference."""
    try:
        outcomes = pool.run(measure.TP, measure.computed, name, timeout=900)
    except RankError as error:
        return measure.Outcome(error=measure.one_line(error))
    worst = next((outcome for outcome in outcomes if outcome.error), None)
    return worst or max(outcomes, key=lambda outcome: outcome.difference or 0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
