"""Decides the number of replicas. Serve pickles this module by value and calls it in its controller."""

from __future__ import annotations

from typing import Any

WAITING = "octavo_num_requests_waiting"


def num_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's policy: enough replicas for the requests, at `target_ongoing_requests` each. If requests wait for pages
    because prompts are long, enough replicas for the waiting ones."""
    target = context.config.target_ongoing_requests
    waiting = sum((context.aggregated_metrics or {}).get(WAITING, {}).values())
    wanted = context.total_num_requests / target
    if waiting >= max(1, context.current_num_replicas):  # one per replica: a new request may wait for a step
        wanted = max(wanted, context.current_num_replicas + waiting / target)
    return wanted, {}
