"""The models of a service that may have only one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext

from fastapi import Request

from server.answering.endpoints import served_endpoints
from server.context import Models, Service
from server.errors import ApiError, shown
from server.models.status import ModelStatus


def models_of(service: Service) -> Models:
    """The models that a request of this service can name: several, or the single one."""
    return OneModel(service) if service.models is None else service.models


class OneModel:
    """A service with a single model, which is always loaded.

    Args:
        service: the whole service.
    """

    def __init__(self, service: Service):
        self._service = service

    def opened(self) -> AbstractAsyncContextManager[None]:
        """There is nothing to do."""
        return nullcontext()

    def statuses(self) -> list[ModelStatus]:
        """The model."""
        service, info = self._service, self._service.client.info
        return [
            ModelStatus(
                name=service.model_id,
                state="loaded" if service.client.is_alive else "failed",
                reason="" if service.client.is_alive else "The engine has stopped and is restarting.",
                source=info.model_file or info.model_path,
                pinned=True,
                percent=None,
                tasks=info.tasks,
                endpoints=tuple(served_endpoints(info, service.tokenizer)),
                max_model_len=info.max_model_len,
                loaded_at=service.created,
                last_used=service.created,
                running=service.drain.num_running,
            )
        ]

    def find(self, name: str) -> ModelStatus | None:
        """The model, if it or one of its adapters has this name."""
        service = self._service
        return self.statuses()[0] if name == service.model_id or name in service.client.adapters else None

    async def serve(self, request: Request) -> Service:
        """The service."""
        return self._service

    async def load(self, name: str) -> ModelStatus:
        """Nothing to do.

        Raises:
            ApiError: 404, there is no such model.
        """
        return self._known(name)

    async def unload(self, name: str) -> ModelStatus:
        """Refused: the service needs its only model.

        Raises:
            ApiError: 400; or 404, there is no such model.
        """
        self._known(name)
        message = f"{name} is the only model of this server and stays loaded. Stop the server to free its memory."
        raise ApiError(400, message, param="model", code="only_model")

    def keep(self, name: str, seconds: float | None) -> None:
        """Does nothing: the model stays anyway."""

    def service_of(self, name: str) -> Service | None:
        """The service, if the name is the model's."""
        return None if self.find(name) is None else self._service

    def able(self, endpoint: str) -> list[str]:
        """Returns no other model."""
        return []

    def _known(self, name: str) -> ModelStatus:
        found = self.find(name)
        if found is None:
            message = f"The model {shown(name)} does not exist; this server serves {self._service.model_id!r}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return found
