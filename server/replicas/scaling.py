"""The number of replicas to run. Serve pickles this module by value, and asks it in its controller."""

from __future__ import annotations

from typing import Any

WAITING = "octavo_num_requests_waiting"


def num_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's policy: enough replicas for the requests, at `target_ongoing_requests` each. If long prompts make fewer
    requests than that wait for pages, enough replicas for the waiting ones.

    Args:
        context: Serve's AutoscalingContext.
    """
    target = context.config.target_ongoing_requests
    waiting = sum((context.aggregated_metrics or {}).get(WAITING, {}).values())
    wanted = context.total_num_requests / target
    if waiting >= max(1, context.current_num_replicas):  # one at each: a request that comes may wait for a step, too
        wanted = max(wanted, context.current_num_replicas + waiting / target)
    return wanted, {}
