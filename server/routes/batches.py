"""/v1/files and /v1/batches: requests in files, answered while the engine is idle."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Body, Depends, Path, Query, Request, Response

from server.answering.keeping import tenant_of
from server.answering.reading import fail
from server.api import examples
from server.api.batch_schemas import BatchList, BatchObject, BatchRequest, FileDeleted, FileList, FileObject
from server.api.fields import ignored_header
from server.api.multipart import read_form
from server.api.paging import After, Order
from server.api.reading import StrictJsonRoute
from server.batches.store import Row
from server.context import Batches, HouseDep
from server.door.keys import ApiKey
from server.errors import ApiError, shown
from server.routes.tasks import LACKS

router = APIRouter()
bodies = APIRouter(route_class=StrictJsonRoute)

MOST_LISTED = 10_000  # files of a page, as at OpenAI
# Endpoints whose answers are JSON.
BATCHED = tuple(path for path in LACKS if path != "/translate" and not path.startswith("/v1/audio/"))
_HOUR = {"h": 3600, "d": 86400}
_LONGEST = 30 * 86400  # seconds of a completion_window
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "A JSON object on each line."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}

Id = Annotated[str, Path(max_length=256)]


async def _batches(service: HouseDep) -> Batches:
    if service.batches is None:
        message = "Files and batches need a folder, and this server has none. Start it with --batch-store FOLDER."
        raise ApiError(400, message, code="unsupported_endpoint")
    return service.batches


BatchesDep = Annotated[Batches, Depends(_batches)]


# ---------------------------------------------------------------- files


@router.post("/v1/files", openapi_extra=_FORM, summary="Upload a file")
async def create_file(request: Request, service: HouseDep, batches: BatchesDep) -> FileObject:
    """Store a file with a request on each line, for /v1/batches."""
    content = await request.body()
    async with service.reading:
        form = await asyncio.to_thread(read_form, content, request.headers.get("content-type", ""))
    del content
    purpose = form.texts.get("purpose", [""])[-1]
    if purpose != "batch":
        fail("purpose", f"purpose must be batch, got {shown(purpose)}.")
    upload = form.files.get("file")
    if upload is None:
        raise ApiError(400, "file is required.", param="file", code="missing_required_parameter")
    row = await batches.store.do(batches.store.add_file, tenant_of(request), upload.name[:256], upload.content)
    return _file(row)


@router.get("/v1/files", summary="List files")
async def list_files(
    request: Request,
    batches: BatchesDep,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    order: Order = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """List the files, the last one first by default."""
    tenant, store = tenant_of(request), batches.store
    try:
        rows, more = await store.do(store.files, tenant, after, limit, purpose, order == "asc")
    except KeyError:
        fail("after", f"after must be the id of a file, got {shown(after)}.")
    first, last = _ends(rows)
    return FileList(data=[_file(row) for row in rows], first_id=first, last_id=last, has_more=more)


@router.get("/v1/files/{file_id}", summary="Show a file")
async def get_file(file_id: Id, request: Request, batches: BatchesDep) -> FileObject:
    """Describe a file."""
    return _file(await _found(file_id, request, batches))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
    summary="Read a file",
)
async def get_content(file_id: Id, request: Request, batches: BatchesDep) -> Response:
    """The bytes of a file."""
    await _found(file_id, request, batches)
    content = await batches.store.do(batches.store.content, file_id)
    return Response(content, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", summary="Delete a file")
async def delete_file(file_id: Id, request: Request, batches: BatchesDep) -> FileDeleted:
    """Delete a file. The input of a batch that has not ended is kept."""
    if not await batches.store.do(batches.store.delete_file, file_id, tenant_of(request)):
        _missing("file", file_id)
    return FileDeleted(id=file_id)


async def _found(id_: str, request: Request, batches: Batches) -> Row:
    return await batches.store.do(batches.store.file, id_, tenant_of(request)) or _missing("file", id_)


def _file(row: Row) -> FileObject:
    return FileObject(
        id=row["id"], bytes=row["bytes"], created_at=row["created"], filename=row["name"], purpose=row["purpose"]
    )


# ---------------------------------------------------------------- batches


@bodies.post("/v1/batches", summary="Create a batch")
async def create_batch(
    body: Annotated[BatchRequest, Body(openapi_examples=examples.BATCH)],
    request: Request,
    response: Response,
    service: HouseDep,
    batches: BatchesDep,
) -> BatchObject:
    """Answer the requests of a file while no client waits for the model. The answers come as a file."""
    response.headers.update(ignored_header(body.ignored_fields()))
    if body.endpoint not in BATCHED:
        fail("endpoint", f"endpoint must be one of {', '.join(BATCHED)}, got {shown(body.endpoint)}.")
    if service.models is None:  # of several, each line has its own
        service.require(body.endpoint)
    seconds = int(body.completion_window[:-1]) * _HOUR[body.completion_window[-1]]
    if not 0 < seconds <= _LONGEST:
        fail("completion_window", f"completion_window must be from 1h to 30d, got {shown(body.completion_window)}.")
    store, tenant = batches.store, tenant_of(request)
    key: ApiKey | None = getattr(request.state, "api_key", None)
    file = await store.do(store.file, body.input_file_id, tenant)
    if file is None or file["purpose"] != "batch":
        fail("input_file_id", f"There is no file {shown(body.input_file_id)} with purpose batch.")
    now = store.now()
    fields = {
        "object": "batch",
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "created_at": now,
        "expires_at": now + seconds,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "models": None if key is None or key.models is None else sorted(key.models),
    }
    made = await store.do(store.add_batch, tenant, fields, service.settings.batch_max_unfinished)
    batches.wake()
    return BatchObject(**made)


@router.get("/v1/batches", summary="List batches")
async def list_batches(
    request: Request, batches: BatchesDep, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> BatchList:
    """List the batches, the last one first."""
    try:
        rows, more = await batches.store.do(batches.store.batches, tenant_of(request), after, limit)
    except KeyError:
        fail("after", f"after must be the id of a batch, got {shown(after)}.")
    first, last = _ends(rows)
    return BatchList(data=[BatchObject(**row) for row in rows], first_id=first, last_id=last, has_more=more)


@router.get("/v1/batches/{batch_id}", summary="Show a batch")
async def get_batch(batch_id: Id, request: Request, batches: BatchesDep) -> BatchObject:
    """Show a batch and how far it is."""
    found = await batches.store.do(batches.store.batch, batch_id, tenant_of(request))
    return BatchObject(**(found or _missing("batch", batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(batch_id: Id, request: Request, batches: BatchesDep) -> BatchObject:
    """End a batch. The lines that have an answer keep it. A batch that has ended does not change."""
    found = await batches.store.do(batches.store.cancel, batch_id, tenant_of(request))
    batches.wake()
    return BatchObject(**(found or _missing("batch", batch_id)))


def _missing(what: str, id_: str) -> NoReturn:
    raise ApiError(404, f"There is no {what} {shown(id_)}.", param=f"{what}_id", code=f"{what}_not_found")


def _ends(rows: list[Row]) -> tuple[str, str] | tuple[None, None]:
    return (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
