"""How many replicas a load needs, and what routing does to it: a simulation, with service times measured from one.

    python benchmarks/fleet.py measure --output            # one engine on this machine: what steps take
    python benchmarks/fleet.py simulate --output           # fleets of 10, 100 and 1,000 of it; some minutes

Measured is the time of a step by what it holds (prompt tokens, decoding rows, context that is read), on a random
checkpoint of SmolLM2-135M's shape, and how well the simulation foretells that same engine under arrivals. Simulated are
replicas with continuous batching, prompts in chunks, and a prefix cache that drops what was used least recently.

Traces: with --workloads, by default ../shared/data/workloads, Mooncake's conversations, whose blocks of 512 tokens say
which prompts share a beginning (all lengths are divided by 16, as suits so small a model), and Azure's conversations of
2023, in which no two prompts share anything. Without them, conversations are made up. What is longer than the model's
context of 2,048 tokens is left out, as a service would refuse it. Arrivals keep their pattern and are made faster or
slower as a whole; where a fleet needs more requests than a trace has, it is repeated, with conversations of its own in
each copy.

Routing: `random`; `least`: the fewest unfinished requests; `prefix`: the least work before the first token, counting
what waits at a replica and what of the prompt it has not cached.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from fleets.fleet import ROUTINGS, Fleet, report  # noqa: E402
from fleets.measured import measure  # noqa: E402
from fleets.replica import Request, Service, serviceable  # noqa: E402
from fleets.traces import FEWEST, arrivals, traces  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
WORKLOADS = ROOT.parent / "shared" / "data" / "workloads"
SIZES = (10, 100, 1000)
LOADS = (0.5, 0.8, 1.0)  # of the rate that a replica can serve without a cache
TARGET = 2.0  # seconds to the first token, for 95 of 100 requests
EACH = 0.1  # seconds for each token after it, for half of them
CONTEXT = 2048  # tokens that the measured model takes
SHORTEST = 120.0  # seconds of a simulation
SUSTAINED = 240.0  # of one that finds out what a fleet can do for long


def simulate(
    service: Service, trace: Sequence[Request], size: int, routing: str, rate: float, shortest: float = SHORTEST
) -> dict[str, float]:
    """A fleet under a trace at so many requests a second for each replica."""
    fleet = Fleet(service, size, routing)
    fleet.run(arrivals(trace, rate * size, max(FEWEST, int(shortest * rate * size))))
    return report(fleet)


def size_for(service: Service, trace: Sequence[Request], routing: str, size: int = 100) -> dict[str, float]:
    """The highest rate of a replica at which a fleet keeps to `TARGET` and `EACH`; what a million requests an hour
    need."""
    low, high = 0.0, 4 * serviceable(service, trace)
    found: dict[str, float] = {}
    for _ in range(7):
        rate = (low + high) / 2
        result = simulate(service, trace, size, routing, rate, SUSTAINED)
        if result["first_token_p95"] <= TARGET and result["per_token_p50"] <= EACH:
            low, found = rate, result
        else:
            high = rate
    needed = math.ceil(1e6 / 3600 / low) if low else math.inf
    return {"rate_per_replica": round(low, 4), "replicas_per_million_an_hour": needed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="service times of one engine")
    one.add_argument("--rounds", type=int, default=5)
    many = commands.add_parser("simulate", help="fleets of it")
    many.add_argument("--service", type=Path, default=RESULTS / "fleet-service.json", help="what measure has written")
    many.add_argument("--workloads", type=Path, default=WORKLOADS)
    many.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    many.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    many.add_argument("--routings", choices=ROUTINGS, nargs="+", default=list(ROUTINGS))
    many.add_argument("--no-sizing", action="store_true", help="leave out what a million requests an hour need")
    for command, name in ((one, "fleet-service.json"), (many, "fleet.json")):
        command.add_argument("--output", type=Path, nargs="?", const=RESULTS / name, help="JSON file to write")
    options = parser.parse_args()
    result = measure(options.rounds) if options.command == "measure" else _simulate(options)
    text = json.dumps(result, indent=1) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text)


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    measured = json.loads(options.service.read_text())
    service = Service(**measured["service"])
    result: dict[str, Any] = {
        "service": measured["service"],
        "measured_on": measured["machine"],
        "target_first_token_p95": TARGET,
        "target_per_token_p50": EACH,
        "traces": {},
    }
    for name, whole in traces(options.workloads).items():
        trace = [request for request in whole if request.tokens + request.output <= CONTEXT]
        base = serviceable(service, trace)
        found: dict[str, Any] = {
            "requests": len(trace),
            "left_out": len(whole) - len(trace),
            "mean_tokens": round(statistics.fmean(request.tokens for request in trace), 1),
            "mean_output": round(statistics.fmean(request.output for request in trace), 1),
            "serviceable_rate": round(base, 4),
            "fleets": [],
        }
        for size in options.sizes:
            for load in options.loads:
                for routing in options.routings:
                    began = time.perf_counter()
                    row = simulate(service, trace, size, routing, load * base)
                    print(name, size, load, routing, row, f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
                    found["fleets"].append({"replicas": size, "load": load, "routing": routing, **row})
        if not options.no_sizing:
            found["sizing"] = {routing: size_for(service, trace, routing) for routing in options.routings}
            print(name, found["sizing"], file=sys.stderr)
        result["traces"][name] = found
    return result


if __name__ == "__main__":
    main()
