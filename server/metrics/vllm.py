"""The metrics once more under vLLM's names, for dashboards and routers that expect them.

The Gateway API inference extension and llm-d read the waiting and running requests, the use of the KV cache,
cache_config_info and lora_requests_info; dashboards read the rest. Nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

# Metrics that vLLM also has, with the same meaning.
SHARED_NAMES = frozenset(
    (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
        "lora_requests_info", "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success",
        "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    )
)  # fmt: skip
_OURS, _THEIRS = "octavo_", "vllm:"


class VllmAliases(Collector):
    """Repeats the metrics of other collectors under vLLM's names: with its prefix and its labels model_name and
    engine."""

    def __init__(self, sources: Sequence[Collector], model_name: str):
        self._sources = sources
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                if metric.name.removeprefix(_OURS) in SHARED_NAMES:
                    yield self._alias(metric)

    def _alias(self, metric: Metric) -> Metric:
        name = _THEIRS + metric.name.removeprefix(_OURS)
        alias = Metric(name, f"The same as {metric.name}.", metric.type)
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                shown = _THEIRS + sample.name.removeprefix(_OURS)
                alias.samples.append(Sample(shown, {**self._labels, **sample.labels}, sample.value))
        return alias
