"""Does the service stay what it is under hours of mixed load, bad clients and engines that are killed?

Starts `octavo serve`, asks for each of a set of answers while nothing else runs, and then asks for them again under
load: streams and whole answers, beams, several choices, chat, vectors, stop strings; clients that leave, read slowly or
not at all, and send what is malformed or never comes whole; crowds beyond what the service takes; and an engine that is
killed every few minutes. In the end:

- each answer was token for token what it is alone, and what was cut short a beginning of it;
- each request ended once, in its own time, for the client, in the log and in the metrics;
- resident memory, descriptors, threads and pages of the cache are what they were after the warm-up.

Writes what was found as JSON, a line for each violation, and ends with 1 if there is one.

    python benchmarks/soak.py
    python benchmarks/soak.py --minutes 3 --kill-every 45
    python benchmarks/soak.py --model MODEL --workloads FOLDER --output soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from load.client import Target, TargetError, TransportError  # noqa: E402
from soaking.report import report  # noqa: E402
from soaking.running import Found, Plan, Soak  # noqa: E402
from soaking.service import Service, ServiceError  # noqa: E402
from soaking.shapes import Shapes, from_folder, synthetic  # noqa: E402

from cli.errors import BenchError  # noqa: E402

_STALL = 4.0  # seconds, of the service
_START = 600.0  # seconds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load, the warm-up not counted (60)")
    parser.add_argument("--model", help="a folder or a hub id (default: the bundled demo)")
    parser.add_argument(
        "--pages", type=int, default=192, help="of the cache: few, so that they run short; 0: as many as fit"
    )
    parser.add_argument(
        "--url", help="try a running server with default limits and no other clients: no kills, no /proc, no log"
    )
    parser.add_argument("--processes", type=int, default=1, help="that answer HTTP")
    parser.add_argument("--workloads", type=Path, help="a folder with traces to take texts, lengths and gaps from")
    parser.add_argument("--clients", type=int, default=8, help="at a time")
    parser.add_argument("--cases", type=int, default=96, help="different requests")
    parser.add_argument(
        "--kill-every", type=float, default=180.0, help="seconds between two kills of the engine; 0: none"
    )
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which an answer counts as missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the service's log there")
    parser.add_argument("--output", type=Path, help="write the result there, besides standard output")
    return parser.parse_args(arguments)


def arguments_of(plan: Plan, model: str | None, pages: int, processes: int) -> list[str]:
    """Those of the service: small limits, so that all of them are met."""
    return [
        *([model] if model else []),
        *(["--num-gpu-blocks-override", str(pages)] if pages else []),
        *("--max-num-seqs", "16", "--max-num-queued-reqs", "16", "--max-body-size", str(plan.largest_body)),
        *("--stream-stall-timeout", str(_STALL), "--stream-keepalive", "1", "--max-engine-failures", "1000000"),
        *("--shutdown-timeout", "10", "--api-server-count", str(processes)),
    ]  # fmt: skip


async def soak(options: argparse.Namespace, plan: Plan, shapes: Shapes, log: Path) -> Found:
    """One run, with a service of our own unless there is a URL."""
    if options.url:
        return await Soak(Service(Target.parse(options.url)), shapes, plan).run()
    service = await Service.start(arguments_of(plan, options.model, options.pages, options.processes), log, _START)
    try:
        found = await Soak(service, shapes, plan).run()
    finally:
        status = service.stop(plan.patience)
    if status:
        found.violations.append(f"the service ended with status {status} when it was told to stop")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    seconds = 60 * options.minutes
    plan = Plan(
        seconds=seconds,
        warm_seconds=min(120.0, max(20.0, seconds / 6)),
        num_clients=options.clients,
        num_cases=options.cases,
        kill_every=0.0 if options.url else options.kill_every,
        stall_seconds=2 * _STALL,
        largest_body=(16 if options.url else 1) << 20,
        patience=options.patience,
        seed=options.seed,
    )
    rng = random.Random(options.seed)
    try:
        shapes = from_folder(options.workloads, rng) if options.workloads else synthetic(rng)
        with tempfile.TemporaryDirectory() as made:
            found = asyncio.run(soak(options, plan, shapes, options.log or Path(made) / "service.log"))
    except (BenchError, ServiceError, TargetError, TransportError, TimeoutError) as problem:
        print(f"soak: {problem or type(problem).__name__}", file=sys.stderr)
        return 1
    result = json.dumps(report(found, plan, shapes, options.model or "demo"), indent=2)
    print(result)
    if options.output:
        options.output.write_text(result + "\n")
    for line in found.violations:
        print(f"violation: {line}", file=sys.stderr)
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
