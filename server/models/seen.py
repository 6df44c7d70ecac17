"""The models of a service as a restricted API key sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractAsyncContextManager

from fastapi import Request

from server.context import Models, Service
from server.errors import ApiError, shown
from server.models.status import ModelStatus


def no_model(name: str | None, served: Iterable[str]) -> ApiError:
    """The error for a name that selects no model.

    Args:
        served: names of the models that the caller may use.
    """
    names = ", ".join(map(shown, served)) or "no models with this API key"
    message = f"The model {shown(name)} does not exist; this server serves {names}."
    return ApiError(404, message, param="model", code="model_not_found")


def not_allowed(asked: str | None, allowed: Iterable[str]) -> ApiError:
    """The error for a model that the caller's API key may not use.

    Args:
        asked: the name that the caller used, perhaps an alias: it may not learn the model's own. None: the caller named
            no model.
        allowed: names of the models that it may use.
    """
    names = ", ".join(map(shown, allowed)) or "none"
    message = f"This API key may not use the model {shown(asked)}. Models that it may use: {names}."
    if asked is None:
        message = "This API key may use no model of this service."
    return ApiError(403, message, param="model", code="model_not_allowed")


class SeenModels:
    """Implements `server.context.Models`. No list and no message names a model that the key may not use.

    Args:
        models: all models of the service.
        allowed: names of those that the key may use.
    """

    def __init__(self, models: Models, allowed: Collection[str]):
        self._models = models
        self._allowed = allowed

    def opened(self) -> AbstractAsyncContextManager[None]:
        return self._models.opened()

    def statuses(self) -> list[ModelStatus]:
        return [status for status in self._models.statuses() if status.name in self._allowed]

    def find(self, name: str) -> ModelStatus | None:
        status = self._models.find(name)
        return status if status is not None and status.name in self._allowed else None

    def choose(self, request: Request, name: str) -> ModelStatus:
        return self._models.choose(request, name)

    async def foreseen(self, name: str) -> None:
        await self._models.foreseen(name)

    async def serve(self, request: Request) -> Service:
        return await self._models.serve(request)

    async def load(self, name: str) -> ModelStatus:
        self._check(name)
        return await self._models.load(name)

    async def unload(self, name: str) -> ModelStatus:
        self._check(name)
        return await self._models.unload(name)

    def keep(self, name: str, seconds: float | None) -> None:
        self._check(name)
        self._models.keep(name, seconds)

    def service_of(self, name: str) -> Service | None:
        return None if self.find(name) is None else self._models.service_of(name)

    def able(self, endpoint: str) -> list[str]:
        return [name for name in self._models.able(endpoint) if name in self._allowed]

    def seen_by(self, allowed: Collection[str]) -> SeenModels:
        return SeenModels(self._models, frozenset(allowed) & frozenset(self._allowed))

    def _check(self, name: str) -> None:
        status = self._models.find(name)
        served = [status.name for status in self.statuses()]
        if status is None:
            raise no_model(name, served)
        if status.name not in self._allowed:
            raise not_allowed(name, served)
