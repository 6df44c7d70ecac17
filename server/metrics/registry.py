"""The metrics of a service with one HTTP process."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from engine import EngineStats, RequestDelta
from engine.process.client import EngineClient
from server.metrics.exposition import Exposition
from server.metrics.requests import RequestMetrics


class Metrics(RequestMetrics):
    """All metrics, in their own registry.

    Args:
        client: the engine's client; its updates are observed from now on.
        model_name: the model's name for clients.
        version: Octavo's.
    """

    def __init__(self, client: EngineClient, model_name: str = "", version: str = "0"):
        self.registry = CollectorRegistry()
        super().__init__(client.info, self.registry)
        self.exposition = Exposition(client, model_name, version, self.collectors, self.registry)
        self.engine = self.exposition.engine
        self.render = self.exposition.render
        client.on_news = self._on_news

    def _on_news(self, deltas: Sequence[RequestDelta], stats: EngineStats) -> None:
        self.engine.follow(stats)
        self.note(deltas)
