"""The shared state of the processes that answer HTTP: kept here if there is one process, or by another process
(`server.processes`) if several share one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from engine import DEFAULT_NUM_SEQS, EngineInfo
from engine.process.client import EngineClient
from server.admission import Admission
from server.answering.turns import Turns
from server.config.settings import ServerSettings
from server.door.key_counts import CountsKeys, KeyCounts
from server.door.rates import RequestRates
from server.gates import Gate
from server.metrics.registry import Metrics
from server.metrics.requests import RequestMetrics

QUEUED_CACHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Commons:
    """The counts over all processes."""

    metrics: RequestMetrics
    generating: Gate  # limits requests that generate text
    # limits requests for vectors, classes and masked tokens; each counts as one, however many inputs it has
    pooling: Gate
    tokenizing: Gate  # limits calls of /tokenize and /detokenize
    lines: Gate  # limits the lines of batches, which take no client's room
    keys: CountsKeys  # counts the running requests of API keys
    # makes the object that submits inputs to an engine with these facts; called once
    make_turns: Callable[[EngineInfo], Turns]
    # the text of all metrics and its content type, in a format that the scraper accepts
    render: Callable[[str | None], Awaitable[tuple[bytes, str]]]
    # ends a tenant's answer, by id, that another process streams; returns the answer so far, or None if there is none
    cancel: Callable[[str, str | None], Awaitable[dict[str, Any] | None]]
    close: Callable[[], Awaitable[None]]  # releases all resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissions:
    """The limits from the settings, one for each kind of request.

    Args:
        settings: the service's settings.
        rejected: called with the reason for each refused request.
    """

    generating: Admission
    pooling: Admission
    tokenizing: Admission

    @classmethod
    def of(cls, client: EngineClient, settings: ServerSettings, rejected: Callable[[str], None]) -> Admissions:
        """The shared state of a service."""
        generating = _admission(
            client.info,
            settings,
            rejected,
            max_queue_time=settings.max_queue_time,
            lacks_room=lambda: client.is_alive and client.stats().lacks_room,
        )
        pooling, tokenizing = (_admission(client.info, settings, rejected) for _ in range(2))
        return cls(generating=generating, pooling=pooling, tokenizing=tokenizing)


def own_commons(client: EngineClient, settings: ServerSettings, model_id: str, version: str) -> Commons:
    """The shared state of a service with one HTTP process. Raises ConfigError: Redis cannot be used."""
    metrics = Metrics(client, model_id, version)
    admissions = Admissions.of(client, settings, metrics.rejected)
    metrics.exposition.show_admission(admissions.generating, admissions.pooling)
    rates = RequestRates(settings.rate_limit_storage)

    def make_turns(info: EngineInfo) -> Turns:
        turns = Turns(info.max_num_seqs, info.max_num_batched_tokens)
        metrics.engine.also_waiting, metrics.engine.stepped = lambda: turns.num_waiting, turns.stepped
        return turns

    async def render(accept: str | None) -> tuple[bytes, str]:
        return metrics.render(accept)

    async def cancel(response_id: str, tenant: str | None) -> None:
        """Does nothing: there is no other process."""

    return Commons(
        metrics=metrics,
        generating=admissions.generating,
        pooling=admissions.pooling,
        tokenizing=admissions.tokenizing,
        lines=gate_of_lines(client.info, settings),
        keys=KeyCounts(rates),
        make_turns=make_turns,
        render=render,
        cancel=cancel,
        close=rates.close,
    )


def max_queued_tokens(info: EngineInfo, settings: ServerSettings) -> int:
    """Maximum prompt tokens that may wait. By default they fill the KV cache `QUEUED_CACHES` times; for a model without
    one, the largest cache that it might have."""
    if settings.max_num_queued_tokens is not None:
        return settings.max_num_queued_tokens
    held = _max_running(info) * info.max_model_len if info.encoder_only else info.num_blocks * info.block_size
    return QUEUED_CACHES * held


def gate_of_lines(info: EngineInfo, settings: ServerSettings) -> Admission:
    """A gate for the lines of batches, all of which begin in one process. Refused ones are sent again."""
    return _admission(info, settings, lambda reason: None)


def _max_running(info: EngineInfo) -> int:
    return min(info.max_num_seqs, DEFAULT_NUM_SEQS) if info.encoder_only else info.max_num_seqs


def _admission(
    info: EngineInfo,
    settings: ServerSettings,
    rejected: Callable[[str], None],
    *,
    max_queue_time: float | None = 0.0,
    lacks_room: Callable[[], bool] = lambda: False,
) -> Admission:
    running = _max_running(info)
    return Admission(
        max_running=running,
        max_queued=settings.max_num_queued_reqs,
        max_queued_tokens=max_queued_tokens(info, settings),
        rejected=rejected,
        max_queue_time=max_queue_time,
        lacks_room=lacks_room,
    )
