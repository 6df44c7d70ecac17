"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Response
from pydantic import Field

from engine import ADAPTER_NAME, AdapterError
from server.api.base import JsonBody
from server.api.reading import StrictJsonRoute
from server.context import HouseDep, ServiceDep
from server.errors import ApiError, shown

router = APIRouter(route_class=StrictJsonRoute)


class LoadAdapterRequest(JsonBody):
    """An adapter to load."""

    lora_name: str = Field(min_length=1, description="Name by which requests select the adapter.")
    lora_path: str = Field(
        min_length=1, description="A folder or GGUF file in the folder of --enable-lora-loading; may be relative to it."
    )
    load_inplace: Literal[False] | None = Field(None, description="Not supported. Unload the adapter first.")


class UnloadAdapterRequest(JsonBody):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Ignored.")


_EXAMPLE = {"sql": {"value": {"lora_name": "sql", "lora_path": "sql"}}}


@router.post("/v1/load_lora_adapter", response_class=Response, summary="Load a LoRA adapter")
async def load_adapter(
    body: Annotated[LoadAdapterRequest, Body(openapi_examples=_EXAMPLE)], service: ServiceDep, house: HouseDep
) -> Response:
    """Load an adapter from the folder of --enable-lora-loading. Running requests continue."""
    if not ADAPTER_NAME.fullmatch(body.lora_name) or body.lora_name == service.model_id:
        message = (
            f"lora_name must be at most 128 letters, digits, and . _ - / :, and not the name of the model, got "
            f"{shown(body.lora_name)}."
        )
        raise ApiError(400, message, param="lora_name", code="invalid_value")
    if house.models is not None and (owner := house.models.find(body.lora_name)) is not None:
        message = (
            f"lora_name selects the model {owner.name} or one of its adapters, got {shown(body.lora_name)}. Choose "
            "another name."
        )
        raise ApiError(400, message, param="lora_name", code="invalid_value")
    folder = Path(service.settings.enable_lora_loading or "").expanduser()
    path = await asyncio.to_thread(_inside, folder, body.lora_path)
    if path is None:
        message = (
            f"lora_path must be a LoRA adapter in the folder that --enable-lora-loading names, got "
            f"{shown(body.lora_path)}."
        )
        raise ApiError(400, message, param="lora_path", code="invalid_value")
    try:
        await service.client.load_adapter(body.lora_name, str(path))
    except AdapterError as problem:
        raise ApiError(400, str(problem), code="invalid_adapter") from problem
    return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=Response, summary="Unload a LoRA adapter")
async def unload_adapter(
    body: Annotated[UnloadAdapterRequest, Body(openapi_examples={"sql": {"value": {"lora_name": "sql"}}})],
    service: ServiceDep,
) -> Response:
    """Unload an adapter. Its running requests end with an error."""
    try:
        await service.client.unload_adapter(body.lora_name)
    except AdapterError as problem:
        raise ApiError(404, str(problem), param="lora_name", code="model_not_found") from problem
    return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _text(content: str) -> Response:
    return Response(content, media_type="text/plain")


def _inside(folder: Path, path: str) -> Path | None:
    """The resolved path, if it and all files to be read there are inside the folder, even through links."""
    try:
        whole, found = folder.resolve(strict=True), (folder / path).resolve(strict=True)
        files = [found, *found.iterdir()] if found.is_dir() else [found]
        inside = all(file.resolve().is_relative_to(whole) for file in files)
    except (OSError, ValueError, RuntimeError):  # ValueError: a null byte; RuntimeError: a loop of links
        return None
    return found if inside and found != whole else None
