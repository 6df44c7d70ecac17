"""One soak: the answers alone, a warm-up, rest, the load with its faults, rest again, and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from load.client import Client, TransportError

from soaking import checks
from soaking.cases import heavy_case, make_cases
from soaking.checks import Metrics, Sample, Tolerances, Usage
from soaking.clients import Clients, Known, Outages, ask_alone
from soaking.ledger import Ledger
from soaking.malformed import malformed
from soaking.service import Service, ServiceError, rss_mib, usage
from soaking.shapes import Shapes

_EVERY = 2.0  # seconds between two samples of memory
_SETTLE = 5.0  # seconds that closed connections get until their descriptors are gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run.

    Attributes:
        seconds: of load, after `warm_seconds` of it.
        num_clients: at a time, beside those that stall.
        num_cases: requests whose answers are known.
        pause: mean seconds between two requests of a client.
        kill_every: seconds between two kills of the engine; 0: none.
        burst_every: seconds between two crowds of `burst` requests at once.
        stall_seconds: for which some readers take nothing: above the service's `--stream-stall-timeout`.
        largest_body: that the service accepts, in bytes.
        patience: seconds after which an answer, a restart or rest counts as one that never comes.
    """

    seconds: float
    warm_seconds: float
    num_clients: int = 8
    num_cases: int = 96
    pause: float = 0.05
    kill_every: float = 180.0
    burst_every: float = 45.0
    burst: int = 80
    stall_seconds: float = 8.0
    largest_body: int = 1 << 20
    patience: float = 120.0
    seed: int = 0
    tolerances: Tolerances = field(default_factory=Tolerances)

    @property
    def calm(self) -> tuple[float, float] | None:
        """The part of a long run, as shares, without kills: it shows whether an engine's memory grows."""
        least = self.tolerances.slope_settle_seconds + self.tolerances.slope_seconds
        return (0.25, 0.75) if self.seconds / 2 > least + self.kill_every else None


@dataclass(slots=True)
class Found:
    """The findings of a run."""

    ledger: Ledger = field(default_factory=Ledger)
    dropped: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0
    before: dict[str, Usage] = field(default_factory=dict)
    after: dict[str, Usage] = field(default_factory=dict)
    samples: defaultdict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    metrics: tuple[Metrics, Metrics] = field(default_factory=lambda: ({}, {}))
    violations: list[str] = field(default_factory=list)


class Soak:
    """One run against a service that is ready.

    Args:
        say: told what happens, line by line.
    """

    def __init__(self, service: Service, shapes: Shapes, plan: Plan, say: Callable[[str], None] = print):
        self._service = service
        self._shapes = shapes
        self._plan = plan
        self._say = say
        self._outages = Outages()
        self._rng = random.Random(plan.seed)
        self._known: list[Known] = []
        self._heavy: list[Known] = []
        self._end = 0.0

    async def run(self) -> Found:
        """The whole of it.

        Raises:
            ServiceError: the service cannot be tried any further.
        """
        found, plan = Found(), self._plan
        await self._learn(found)
        self._say(f"{len(self._known)} answers known; warming up for {plan.warm_seconds:g} s")
        # What is wrong in the warm-up is wrong, too; its requests are counted apart.
        warm = Found()
        await self._load(warm, plan.warm_seconds, "warm")
        found.violations += [f"warm-up: {line}" for line in warm.ledger.violations]
        before, found.before = await self._rest(found, "after the warm-up")
        self._say(f"at rest: {found.before}; load for {plan.seconds:g} s")
        begin = time.monotonic()
        await self._load(found, plan.seconds, "soak")
        found.seconds = time.monotonic() - begin
        after, found.after = await self._rest(found, "at the end")
        self._say(f"at rest: {found.after}")
        found.metrics = before, after
        self._judge(found)
        return found

    async def _learn(self, found: Found) -> None:
        client = Client(self._service.target)
        _, models = await client.json("GET", "/v1/models")
        context = models["data"][0]["max_model_len"]
        _, told = await client.json("POST", "/tokenize", {"prompt": " ".join(self._shapes.texts)[:4000]})
        client.close()
        cases = make_cases(self._plan.num_cases, self._shapes, context, told["tokens"], self._rng)
        patience = self._plan.patience
        self._known, found.dropped = await ask_alone(self._service, cases, patience)
        self._heavy, _ = await ask_alone(self._service, [heavy_case(context)], patience)
        if not self._known:
            raise ServiceError(f"the service answers nothing of what it is asked: {found.dropped[:3]}")

    # ------------------------------------------------------------ load

    async def _load(self, found: Found, seconds: float, label: str) -> None:
        """All clients and faults for so long; then until the last answer."""
        plan = self._plan
        self._end = time.monotonic() + seconds
        clients = Clients(
            self._service,
            self._known,
            found.ledger,
            self._outages,
            patience=plan.patience,
            seed=self._rng.randrange(1 << 31),
            label=label,
        )
        wrong = malformed(plan.largest_body)
        behaviours: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.64, clients.ask),
            (0.16, clients.leave),
            (0.06, clients.sip),
            (0.04, clients.upload),
            (0.10, lambda: clients.blunder(self._rng.choice(wrong))),
        ]
        try:
            async with self._killing(found, clients.long_stream), asyncio.TaskGroup() as group:
                for _ in range(plan.num_clients):
                    group.create_task(self._client(behaviours))
                group.create_task(self._repeat(clients.starve))
                group.create_task(self._bursts(clients))
                group.create_task(self._watch(found))
                if self._heavy:
                    group.create_task(self._repeat(lambda: clients.stall(self._heavy[0], plan.stall_seconds)))
        finally:
            clients.close()

    def _goes_on(self) -> bool:
        process = self._service.process
        if process is not None and process.poll() is not None:
            raise ServiceError(f"the service has ended with status {process.returncode}")
        return time.monotonic() < self._end

    async def _client(self, behaviours: Sequence[tuple[float, Callable[[], Awaitable[None]]]]) -> None:
        weights = [weight for weight, _ in behaviours]
        while self._goes_on():
            ((_, behaviour),) = self._rng.choices(behaviours, weights)
            await behaviour()
            await asyncio.sleep(min(10.0, self._plan.pause * self._rng.choice(self._shapes.gaps)))

    async def _repeat(self, behaviour: Callable[[], Awaitable[None]]) -> None:
        while self._goes_on():
            await behaviour()

    async def _bursts(self, clients: Clients) -> None:
        while self._goes_on():
            await asyncio.gather(*(clients.ask() for _ in range(self._plan.burst)))
            await self._sleep(self._plan.burst_every)

    async def _watch(self, found: Found) -> None:
        while self._service.process is not None and self._goes_on():
            for name, pid in self._service.processes().items():
                with contextlib.suppress(OSError):  # it has just ended
                    found.samples[name].append(Sample(time.monotonic(), pid, rss_mib(pid)))
            await self._sleep(_EVERY)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, self._end - time.monotonic())))

    # ------------------------------------------------------------ faults

    @contextlib.asynccontextmanager
    async def _killing(self, found: Found, long_stream: asyncio.Event) -> AsyncIterator[None]:
        """Kill the engine now and then meanwhile; at the end the last successor serves."""
        if self._service.process is None or not self._plan.kill_every:
            yield
            return
        killer = asyncio.create_task(self._kill_now_and_then(found, long_stream))
        try:
            yield
        finally:
            await killer

    async def _kill_now_and_then(self, found: Found, long_stream: asyncio.Event) -> None:
        every, begin = self._plan.kill_every, time.monotonic()
        calm = [begin + share * (self._end - begin) for share in self._plan.calm or ()]
        while True:
            await self._sleep(every * self._rng.uniform(0.7, 1.1))
            if calm and calm[0] < time.monotonic() < calm[1]:
                await self._sleep(calm[1] - time.monotonic())
            # Not at the very end: the last successor shall have worked, too.
            if self._end - time.monotonic() < every / 4 or not self._goes_on():
                return
            # A kill must cut a stream, so it waits until a long one has begun. Chance alone missed them at times.
            long_stream.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(long_stream.wait(), every / 4)
            await self._kill(found)

    async def _kill(self, found: Found) -> None:
        pid = self._service.engine()
        if pid is None:
            raise ServiceError("the service is ready, and has no engine")
        begin, found.kills = time.monotonic(), found.kills + 1
        self._outages.times.append((begin, float("inf")))
        os.kill(pid, signal.SIGKILL)
        while self._service.engine() in (pid, None) or not await self._service.is_ready():
            self._goes_on()
            if time.monotonic() - begin > self._plan.patience:
                raise ServiceError(f"no engine served within {self._plan.patience:g} s of a kill")
            await asyncio.sleep(0.1)
        self._outages.times[-1] = (begin, time.monotonic())
        self._say(f"killed engine {pid}; another served after {time.monotonic() - begin:.1f} s")

    # ------------------------------------------------------------ rest

    async def _rest(self, found: Found, when: str) -> tuple[Metrics, dict[str, Usage]]:
        """Wait until nothing runs any more; what the metrics say then, and what the processes hold."""
        deadline = time.monotonic() + self._plan.patience
        while True:
            try:
                metrics = await self._service.metrics()
            except (TransportError, TimeoutError) as problem:
                raise ServiceError(f"no metrics {when}: {problem}") from problem
            busy = checks.check_empty(metrics)
            if not busy or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        found.violations += [f"{when}: {line}" for line in busy]
        process = self._service.process
        if process is None:
            return metrics, {}
        await asyncio.sleep(_SETTLE)
        if self._service.engine() is None:
            raise ServiceError(f"there is no engine {when}")
        return metrics, {name: usage(pid) for name, pid in self._service.processes().items()}

    def _judge(self, found: Found) -> None:
        limits, ledger, (before, after) = self._plan.tolerances, found.ledger, found.metrics
        for name in found.before:
            found.violations += checks.check_usage(name, found.before[name], found.after[name], limits)
            found.violations += checks.check_slope(name, found.samples[name], limits)
        if checks.num_pages(before) != checks.num_pages(after):
            found.violations.append(
                f"there were {checks.num_pages(before):g} pages; there are {checks.num_pages(after):g}"
            )
        found.violations += ledger.violations
        found.violations += checks.check_counters(before, after, ledger, kills=found.kills)
        if self._service.log is not None:
            found.violations += checks.check_log(self._service.records(), ledger)
        found.violations += checks.check_variety(ledger, kills=found.kills)
