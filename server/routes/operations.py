"""GET /health, /metrics and /version: for operators."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api import examples
from server.api.schemas import VersionResponse
from server.context import ServiceDep
from server.door.drain import shutting_down
from server.errors import ERROR_RESPONSES, ApiError

router = APIRouter()


@router.get("/health/live", responses=ERROR_RESPONSES, summary="Whether the service works, or needs a restart")
async def live(service: ServiceDep) -> dict[str, str]:
    """200 while this answers and the engine is idle, makes progress or is being started again; 503 when it
    has work and has not completed a step for too long."""
    progress, limit = service.client.progress, service.settings.liveness_timeout
    if not progress.idle and progress.seconds > limit:
        message = (
            f"The engine has made no progress for {progress.seconds:.0f} seconds; the limit is "
            f"{limit:g} (liveness_timeout)."
        )
        raise ApiError(503, message, code="engine_stuck")
    return {"status": "ok"}


@router.get("/health", responses=ERROR_RESPONSES, summary="The same as /health/ready")
@router.get("/health/ready", responses=ERROR_RESPONSES, summary="Whether requests can be served")
async def ready(service: ServiceDep) -> dict[str, str]:
    """200 while requests are served; 503 while the service stops or has too much memory, and after the engine has
    died until it has been started again."""
    if service.drain.draining:
        raise shutting_down()
    if service.memory.exceeded():
        raise service.memory.refusal()
    if not service.client.is_alive:
        message = "The engine has stopped and cannot serve requests."
        raise ApiError(503, message, code="engine_dead", headers={"Retry-After": "5"})
    return {"status": "ok"}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": examples.EXPOSITION}, **ERROR_RESPONSES},
    summary="Metrics for Prometheus",
)
async def metrics(request: Request, service: ServiceDep) -> Response:
    """Prometheus text exposition."""
    content, content_type = await service.commons.render(request.headers.get("accept"))
    return Response(content, headers={"Content-Type": content_type})


@router.get("/version", responses=ERROR_RESPONSES, summary="Octavo's version")
async def version(request: Request) -> VersionResponse:
    """The version of the service, not of the model."""
    return VersionResponse(version=request.app.version)
