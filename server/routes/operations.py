"""GET /health, /metrics and /version: for whoever runs the service."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError
from server.schemas import VersionResponse

router = APIRouter()


@router.get("/health", responses=ERROR_RESPONSES, summary="Whether requests can be served")
async def health(service: ServiceDep) -> dict[str, str]:
    """200 while the engine can serve, 503 after it has died."""
    if not service.client.is_alive:
        raise ApiError(503, "The engine has stopped and cannot serve requests.", code="engine_dead")
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses=ERROR_RESPONSES, summary="Metrics for Prometheus")
async def metrics(request: Request, service: ServiceDep) -> Response:
    """Prometheus text exposition."""
    content, content_type = service.metrics.render(request.headers.get("accept"))
    return Response(content, headers={"Content-Type": content_type})


@router.get("/version", responses=ERROR_RESPONSES, summary="Octavo's version")
async def version(request: Request) -> VersionResponse:
    """The version of the service, not of the model."""
    return VersionResponse(version=request.app.version)
