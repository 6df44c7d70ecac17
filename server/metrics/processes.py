"""Processor time and memory of each process of a service, as Linux reports them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")  # seconds
_PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes


class ProcessUse(Collector):
    """One series for each process; none if the system does not report them. `processes`: the process ids by role."""

    def __init__(self, processes: Callable[[], Mapping[str, int]]):
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        seconds = CounterMetricFamily(
            "octavo_process_cpu_seconds", "Processor time of all threads of a process.", labels=["process"]
        )
        memory = GaugeMetricFamily(
            "octavo_process_resident_memory_bytes", "Memory of a process, shared pages included.", labels=["process"]
        )
        for name, pid in self._processes().items():
            try:
                # The text before the parenthesis is the program's name.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            seconds.add_metric([name], (int(fields[11]) + int(fields[12])) * _TICK)
            memory.add_metric([name], int(fields[21]) * _PAGE)
        yield from (seconds, memory)
