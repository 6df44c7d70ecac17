"""The application that Ray Serve runs: `serve run octavo.server.replicas.application:build model=...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import ASGIApp

from engine import EngineConfig
from server.config.settings import ServerSettings
from server.replicas import router, scaling
from server.replicas.options import read_arguments
from server.replicas.replica import Replica

_ROUTERS = {
    "prefix": f"{router.__name__}:{router.PrefixRouter.__name__}",
    "power-of-two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}
_GRACE = 5.0  # seconds to close the engine, in addition to the service's own shutdown time


@serve.ingress()
class Octavo:
    """A replica. Serve starts this object, calls it, and ends it.

    Args:
        config: the engine's settings.
        settings: the service's settings, as JSON.
    """

    async def __init__(self, config: EngineConfig, settings: str):  # type: ignore[misc]  # Serve awaits it
        self._replica = await Replica.load(config, ServerSettings.model_validate_json(settings))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._replica.app

    async def check_health(self) -> None:
        """Serve calls this every few seconds, and replaces a replica that raises three times."""
        self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of waiting requests. Serve calls this, and `scaling` reads the result."""
        return {scaling.WAITING: self._replica.num_waiting()}

    def __del__(self) -> None:
        if hasattr(self, "_replica"):  # otherwise it has not loaded
            self._replica.stop()


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, from the arguments of `serve run` or of a config file for `serve deploy`: settings by name, and
    `DeploymentOptions`. OCTAVO_* variables apply and override the arguments. Raises ConfigError if an argument is
    unknown, invalid, or not available under Serve."""
    settings, options = read_arguments(arguments)
    config = settings.engine
    ongoing = options.target_ongoing_requests or max(1, 3 * config.most_seqs // 4)
    own = ServerSettings.model_validate(settings.model_dump(include=set(ServerSettings.model_fields)))
    routing = {"slack": max(2, config.most_seqs // 4), "tenants": settings.prefix_cache_scope == "key"}
    deployment = serve.deployment(
        Octavo,
        name="Octavo",
        # Far more than the service accepts: the service knows its own limits, and refuses at once (503).
        max_ongoing_requests=2 * (config.most_seqs + settings.max_num_queued_reqs) + 16,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=ongoing,
            look_back_period_s=options.look_back_period_s,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
            policy=AutoscalingPolicy(policy_function=f"{scaling.__name__}:{scaling.num_replicas.__name__}"),
        ),
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTERS[options.request_router],
            request_router_kwargs=routing if options.request_router == "prefix" else {},
        ),
        graceful_shutdown_timeout_s=settings.shutdown_timeout + _GRACE,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=10.0,
    )
    return deployment.bind(dataclasses.replace(config, show_progress=False), own.model_dump_json())
