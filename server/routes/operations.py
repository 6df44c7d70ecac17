"""GET /health, /metrics and other endpoints about the service, for operators."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api import examples
from server.api.schemas import LoadResponse, ServerInfo, TokenizerInfo, VersionResponse
from server.context import HouseDep, ServiceDep
from server.door.drain import shutting_down
from server.errors import ApiError

router = APIRouter()


@router.get("/health/live", summary="Liveness")
async def live(service: HouseDep) -> dict[str, str]:
    """Returns 200 while the engine is idle, makes progress or restarts. Returns 503 if it has work but has not
    completed a step for too long."""
    progress, limit = service.client.progress, service.settings.liveness_timeout
    if not progress.idle and progress.seconds > limit:
        message = (
            f"The engine has made no progress for {progress.seconds:.0f} seconds; the limit is "
            f"{limit:g} (liveness_timeout)."
        )
        raise ApiError(503, message, code="engine_stuck")
    return {"status": "ok"}


@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/health", summary="Readiness (same as /health/ready)")
@router.get("/health/ready", summary="Readiness")
async def ready(service: HouseDep) -> dict[str, str]:
    """Returns 200 while requests are served. Returns 503 while the service stops, uses too much memory, or restarts a
    crashed engine."""
    if service.drain.draining:
        raise shutting_down()
    if service.memory.exceeded():
        raise service.memory.refusal()
    if not service.client.is_alive:
        message = "The engine has stopped and cannot serve requests."
        raise ApiError(503, message, code="engine_dead", headers={"Retry-After": "5"})
    return {"status": "ok"}


@router.get("/load", summary="Number of running requests")
async def load(service: HouseDep) -> LoadResponse:
    """Return the number of requests to the model that are running in this process, as in vLLM."""
    return LoadResponse(server_load=service.drain.num_running)


@router.get("/server_info", summary="Server information")
async def server_info(request: Request, service: ServiceDep) -> ServerInfo:
    """Return information about the service, the model and its memory, without secrets."""
    info = service.client.info
    return ServerInfo(
        version=request.app.version,
        model=service.model_id,
        device=info.device,
        dtype=info.dtype,
        quantization=info.quantization,
        kv_cache_dtype=info.kv_cache_dtype,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_num_beams=info.max_num_beams,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
    )


@router.get("/tokenizer_info", summary="Tokenizer information")
async def tokenizer_info(service: ServiceDep) -> TokenizerInfo:
    """Return the tokenizer's class, size, special tokens and chat template."""
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ApiError(404, f"{service.model_id} has no tokenizer.", code="no_tokenizer")
    return TokenizerInfo(
        tokenizer_class=tokenizer.class_name,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.template_variables,
        chat_template=tokenizer.chat_template,
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": examples.EXPOSITION}},
    summary="Metrics for Prometheus",
)
async def metrics(request: Request, service: HouseDep) -> Response:
    """Return all metrics in Prometheus' text format."""
    content, content_type = await service.commons.render(request.headers.get("accept"))
    return Response(content, headers={"Content-Type": content_type})


@router.get("/version", summary="Version")
async def version(request: Request) -> VersionResponse:
    """Return the version of Octavo."""
    return VersionResponse(version=request.app.version)
