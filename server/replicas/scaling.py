"""The number of replicas to run. Serve pickles this module by value, and asks it in its controller."""

from __future__ import annotations

from typing import Any

WAITING = "octavo_num_requests_waiting"


def num_replicas(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's policy: as many as the requests need at `target_ongoing_requests` each. Where prompts are so long that
    requests wait for pages although there are fewer than that: enough for those that wait.

    Args:
        context: Serve's AutoscalingContext.
    """
    target = context.config.target_ongoing_requests
    waiting = sum((context.aggregated_metrics or {}).get(WAITING, {}).values())
    wanted = context.total_num_requests / target
    if waiting >= max(1, context.current_num_replicas):  # one at each: a request that comes may wait for a step, too
        wanted = max(wanted, context.current_num_replicas + waiting / target)
    return wanted, {}
