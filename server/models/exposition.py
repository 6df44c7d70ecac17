"""The metrics of a service with several models: those of each model with its name as a label, and those of the
service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from server.metrics.registry import Metrics
from server.models.served import Served

_STATES = ("unloaded", "loading", "loaded", "failed")
# Metrics of the whole service rather than of a model; the last one also exists for each model.
_OF_SERVICE = frozenset(
    {
        "octavo_connections", "octavo_connections_dropped", "octavo_event_loop_lag_seconds", "octavo_build_info",
        "octavo_response_store_failures", "octavo_requests_rejected",
    }
)  # fmt: skip
_OF_BOTH = frozenset({"octavo_requests_rejected"})
_OF_PROCESS = ("process_", "python_")


class ModelMetrics(Collector):
    """The metrics of all models. `house`: the registry of the service itself."""

    def __init__(self, house: CollectorRegistry, served: Sequence[Served]):
        self._house = house
        self._served = served

    def registry(self) -> CollectorRegistry:
        """A registry with only these metrics."""
        made = CollectorRegistry()
        made.register(self)
        return made

    def describe(self) -> list[Metric]:
        """Returns nothing, so that registering collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect the current values."""
        families = {metric.name: metric for metric in self._house.collect() if _is_of_service(metric.name)}
        for served in self._served:
            metrics = None if served.running is None else served.running.service.metrics
            if isinstance(metrics, Metrics):
                for metric in metrics.registry.collect():
                    if not _is_of_service(metric.name) or metric.name in _OF_BOTH:
                        _add(families, metric, served.name)
        yield from families.values()
        yield from self._states()

    def _states(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "octavo_model_state", "1 for the current state of a model.", labels=["model_name", "state"]
        )
        memory = GaugeMetricFamily(
            "octavo_model_memory_bytes", "Memory that a loaded model may take, as predicted.", labels=["model_name"]
        )
        loads = CounterMetricFamily("octavo_model_loads", "Times that a model was loaded.", labels=["model_name"])
        uses = GaugeMetricFamily(
            "octavo_model_requests", "Requests that use a model or wait for it.", labels=["model_name"]
        )
        for served in self._served:
            for name in _STATES:
                state.add_metric([served.name, name], float(served.state == name))
            if served.running is not None:
                memory.add_metric([served.name], served.running.promise.size)
            loads.add_metric([served.name], served.num_loads)
            uses.add_metric([served.name], served.uses)
        yield from (state, memory, loads, uses)


def _is_of_service(name: str) -> bool:
    return name in _OF_SERVICE or name.startswith(_OF_PROCESS)


def _add(families: dict[str, Metric], metric: Metric, model: str) -> None:
    family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
    for sample in metric.samples:
        labels = {"model_name": model, **sample.labels}
        family.samples.append(Sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar))
