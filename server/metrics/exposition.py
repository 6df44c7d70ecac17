"""The metrics page of a service with any number of processes.

Names are vLLM's with Octavo's prefix, without labels if one series is enough: a service has one model, and
octavo_model_info contains its name. With vLLM's own prefix, the same numbers have its labels (`server.metrics.vllm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Gauge, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from engine.process.client import EngineClient
from server.admission import Admission
from server.metrics.engine import EngineMetrics
from server.metrics.info import InfoMetrics
from server.metrics.vllm import VllmAliases


class Exposition:
    """A registry per service, so that several services fit into one process, together with the engine's statistics.

    Args:
        model_name: the model's name for clients.
        requests: metrics about requests that have an alias; their makers register them.
    """

    def __init__(
        self,
        client: EngineClient,
        model_name: str,
        version: str,
        requests: Iterable[Collector],
        registry: CollectorRegistry,
    ):
        self.registry = registry
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.engine = EngineMetrics(client, registry)
        info = InfoMetrics(client, model_name, version)
        shared = (self.engine, info, *requests, self.engine.step_tokens)
        for collector in (self.engine, info, VllmAliases(shared, model_name)):
            registry.register(collector)

    def show_connections(self, count: Callable[[], int]) -> None:
        """Add metrics about connections."""
        gauge = Gauge("octavo_connections", "Client connections, including the reserve.", registry=self.registry)
        gauge.set_function(count)

    def show_admission(self, *admissions: Admission) -> None:
        """Add metrics about the load of the service, summed over all of these."""
        for name, text, read in (
            (
                "octavo_num_requests_in_service",
                "Requests from their reservation to their end: at most max_num_seqs + max_num_queued_reqs prompts, "
                "and as many requests for vectors, classes or masked tokens, each of which counts as one.",
                lambda: sum(admission.num_prompts for admission in admissions),
            ),
            (
                "octavo_num_queued_tokens",
                "Prompt tokens of requests without a first token, and of inputs without an answer.",
                lambda: sum(admission.num_queued_tokens for admission in admissions),
            ),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The metrics as text and the content type."""
        return encode_metrics(self.registry, accept)


def encode_metrics(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """The metrics of a registry and their content type: OpenMetrics 1.0 if the scraper lists it before plain text."""
    for listed in (accept or "").split(","):
        kind, *parameters = (part.strip() for part in listed.split(";"))
        version = next((part.removeprefix("version=") for part in parameters if part.startswith("version=")), "")
        if kind == "application/openmetrics-text" and version in ("", "1.0.0"):
            # Every name here is a classic one, which no escaping scheme changes. If the scraper names no scheme,
            # the library's own choice of encoder would replace vllm: by vllm_.
            encode: Callable[..., bytes] = openmetrics.generate_latest
            return encode(registry, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
        if kind == "text/plain":
            break
    return generate_latest(registry, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4
