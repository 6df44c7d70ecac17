"""Divides the application's arguments into settings of the service and options of Serve."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine import ConfigError
from server.config.settings import Settings, SettingsBase
from server.config.wording import did_you_mean

# Settings of the HTTP server, which is Serve here, and the equivalent in Serve.
_SERVES_OWN = {
    "host": "Set http_options: host",
    "port": "Set http_options: port",
    "uds": "Set http_options: host and port",
    "root_path": "Set http_options: root_path, and the application's route_prefix",
    "api_server_count": "Use more replicas",
    "models": "Deploy an application for each model",
    "forwarded_allow_ips": "Serve has no such option: its proxies trust no X-Forwarded header",
    "ssl_certfile": "Set http_options: ssl_certfile",
    "ssl_keyfile": "Set http_options: ssl_keyfile",
    "ssl_keyfile_password": "Set http_options: ssl_keyfile_password",
    "max_connections": "Serve has no such option: put a gateway before it",
    "max_header_size": "Serve has no such option: put a gateway before it",
    "stream_stall_timeout": "Set http_options: request_timeout_s",
    "loop_timeout": "Set health_check_timeout_s of the deployment",
    "batch_store": "Serve has no such option: each replica would know only its own batches",
    "response_store": "Serve has no such option: each replica would know only its own answers",
}

logger = logging.getLogger("octavo.server")


class DeploymentOptions(BaseModel):
    """Options of the deployment, in addition to the service's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_replicas: int = Field(default=1, ge=1)  # minimum number of replicas
    max_replicas: int = Field(default=1, ge=1)  # maximum number of replicas
    # requests per replica (default: three quarters of max_num_seqs)
    target_ongoing_requests: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    look_back_period_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)  # seconds over which load is averaged
    # seconds of higher load before replicas are added
    upscale_delay_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    # seconds of lower load before replicas are removed
    downscale_delay_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    # seconds between two health checks of a replica
    health_check_period_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    num_cpus: float = Field(default=1, ge=0, allow_inf_nan=False)  # CPUs of a replica, and threads of its engine
    num_gpus: float = Field(default=0, ge=0, allow_inf_nan=False)
    request_router: Literal["prefix", "power-of-two"] = "prefix"  # prefix, or Serve's own power-of-two
    # any text; deploying another one replaces the replicas by new ones, which read the current key file
    keys_version: str = ""


def read_arguments(arguments: Mapping[str, Any]) -> tuple[SettingsBase, DeploymentOptions]:
    """The service's settings, including those from variables, and the deployment's options. Raises ConfigError if an
    argument is unknown, invalid, or not available under Serve."""
    given = {name.replace("-", "_"): value for name, value in arguments.items()}
    known = [*Settings.model_fields.keys() - {"config"}, *DeploymentOptions.model_fields]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown setting or option {name}{did_you_mean(name, known) or '.'}")
    try:
        options = DeploymentOptions(
            **{name: given.pop(name) for name in DeploymentOptions.model_fields if name in given}
        )
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        raise ConfigError(f"{error['loc'][0]}: {error['msg']}, got {error['input']!r}.") from None
    if options.max_replicas < options.min_replicas:
        raise ConfigError(
            f"max_replicas ({options.max_replicas}) must be at least min_replicas ({options.min_replicas})."
        )
    settings = Settings(**given)
    for name, instead in _SERVES_OWN.items():
        if getattr(settings, name) != Settings.model_fields[name].default:
            message = f"{name} has no effect on a replica of Ray Serve. {instead}."
            if name in given:
                raise ConfigError(message)
            logger.warning("%s", message)  # a variable, which may be meant for `octavo serve` in the same image
    return settings, options
