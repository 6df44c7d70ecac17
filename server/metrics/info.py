"""Facts that do not change while the service runs: metrics whose labels have the information."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import EngineStats
from engine.process.client import EngineClient


class InfoMetrics(Collector):
    """The version, the model, the cache's size, catalogues, and adapters in use."""

    def __init__(self, client: EngineClient, model_name: str, version: str):
        self._client = client
        self._model_name = model_name
        self._version = version
        self._started = time.time()

    def collect(self) -> Iterator[Metric]:
        info = self._client.info
        yield _told("build_info", "Octavo's version.", {"version": self._version})
        yield _told(
            "model_info",
            "The served model.",
            {
                "model_name": self._model_name,
                "dtype": info.dtype,
                "device": info.device,
                "max_model_len": str(info.max_model_len),
                "max_num_seqs": str(info.max_num_seqs),
            },
        )
        size = {
            "block_size": str(info.block_size),
            "cache_dtype": info.kv_cache_dtype,
            "num_gpu_blocks": str(info.num_blocks),
        }
        yield _told(
            "cache_config_info", "Tokens per page, their format, and the number of pages in the KV cache.", size
        )
        if info.catalogues:
            text = "Titles that answers can be limited to."
            titles = GaugeMetricFamily("octavo_catalogue_titles", text, labels=["catalogue"])
            for catalogue in info.catalogues:
                titles.add_metric([catalogue.name], catalogue.titles)
            yield titles
        # A router uses the series with the largest value, which is the time of the latest change.
        stats = self._client.stats() if self._client.is_alive else EngineStats()
        adapters = {
            "max_lora": str(info.max_loras),
            "running_lora_adapters": ",".join(stats.running_adapters),
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        }
        text = "Adapters of running and waiting requests; the value is the Unix time of this answer, or of the start."
        yield _told("lora_requests_info", text, adapters, time.time() if info.max_loras else self._started)


def _told(name: str, text: str, labels: dict[str, str], value: float = 1.0) -> Metric:
    family = GaugeMetricFamily(f"octavo_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
