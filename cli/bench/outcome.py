"""The results of a benchmark: a table, a JSON file, plots; for one load or for several levels of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence

from tqdm import tqdm

from cli.bench.measure import Distribution, Goals, Summary, summarise
from cli.bench.report import Run, document, notes, table
from cli.errors import BenchError
from cli.terminal.style import print_table, styled
from engine.host.logs import printable

_HEAD = (
    "at a time", "requests", "failed", "requests/s", "output tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
    "e2e p50", "e2e p99",
)  # fmt: skip


@contextlib.contextmanager
def progress(total: int | None, level: int | None, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on stderr, where a person looks on; what it gives counts a request, whatever it is called with."""
    label = None if level is None else f"{level} at a time"
    bar = tqdm(total=total, desc=label, unit=" requests", disable=quiet or not sys.stderr.isatty(), leave=False)
    with bar:

        def count(*_: object) -> None:
            bar.update()

        yield count


def report(args: argparse.Namespace, runs: Sequence[Run]) -> int:
    """Print the table, write what --json and --plot name; 1 if no request succeeded.

    Raises:
        BenchError: a file cannot be written.
    """
    summaries = [summarise(run.records, _goals(args)) for run in runs]
    if len(runs) == 1:
        print(table(summaries[0], runs[0].facts))
    else:
        _print_levels(runs, summaries)
    if args.json is not None:
        documents = [
            document(summary, run.facts, run.records if args.save_requests else None)
            for run, summary in zip(runs, summaries, strict=True)
        ]
        whole = documents[0] if len(runs) == 1 else {"benchmark": runs[0].facts.benchmark, "levels": documents}
        try:
            args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        except OSError as problem:
            raise BenchError(f"--json {args.json}: {problem.strerror or problem}.") from None
        print(f"\nWritten to {args.json}.")
    if args.plot is not None and any(summary.completed for summary in summaries):
        from cli.bench.plots import draw

        written = draw(args.plot, runs, summaries)
        print(f"\nPlotted in {', '.join(map(str, written))}.")
    return 0 if any(summary.completed for summary in summaries) else 1


def _goals(args: argparse.Namespace) -> Goals | None:
    limits = (getattr(args, "slo_ttft", None), getattr(args, "slo_tpot", None))
    if limits == (None, None):
        return None
    return Goals(*(None if limit is None else limit / 1e3 for limit in limits))


def _print_levels(runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    print(styled(runs[0].facts.title, "bold") + ", latencies in ms\n")
    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        rates = (f"{summary.request_throughput:.2f}", f"{summary.output_throughput:.1f}")
        latencies = [_ms(found, place) for found in (summary.ttft, summary.itl, summary.e2e) for place in (0, -1)]
        rows.append((str(run.level), str(summary.completed), str(summary.failed), *rates, *latencies))
    print_table(_HEAD, rows, numbers=True)
    told = notes(summaries[-1], runs[-1].facts)
    errors = {f"{kind}: {printable(text)}": None for summary in summaries for kind, text in summary.examples.items()}
    for line in (*told, *errors):
        print(f"\nNote: {line}")


def _ms(found: Distribution | None, place: int) -> str:
    return "-" if found is None else f"{found.percentiles[place] * 1e3:.1f}"
