"""Bodies of the endpoints that list, load and unload several models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from server.api.base import JsonBody
from server.api.schemas import ModelCard


class LoadModelRequest(JsonBody):
    """A model to load or to unload."""

    model: str = Field(min_length=1, description="The model's name or one of its aliases.")


class ModelState(BaseModel):
    """The state of a model. Sizes in bytes, times in Unix seconds."""

    state: Literal["unloaded", "loading", "loaded", "failed"]
    reason: str | None = Field(None, description="Why it has failed, or cannot be loaded.")
    aliases: list[str] | None = Field(None, description="Other names that select it.")
    pinned: bool = Field(description="Whether it is loaded at the start and stays loaded.")
    percent: int | None = Field(None, description="Percentage of its weights that are loaded, while it loads.")
    memory: int | None = Field(None, description="Memory that it takes when it is loaded, as `octavo models` predicts.")
    weights: int | None = Field(None, description="Size of its weights, which is part of the memory.")
    running_requests: int = Field(description="Requests that use it or wait for it.")
    loaded_at: float | None = None
    expires_at: float | None = Field(None, description="When it will be unloaded if no request arrives.")


class UnloadedCard(ModelState):
    """A model that has to be loaded before more is known, or one of its adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["octavo"] = "octavo"
    root: str
    parent: str | None = Field(None, description="The base model of an adapter.")
    max_model_len: int | None = None
    tasks: list[str] = Field(description="What the model can do, if that is known.")
    endpoints: list[str] | None = Field(None, description="Endpoints that it supports, if it was loaded before.")


class LoadedCard(ModelCard, ModelState):
    """A model that is loaded, or one of its adapters."""


class ModelStates(BaseModel):
    """Answer of GET /v1/models of a service with several models."""

    object: Literal["list"] = "list"
    data: list[LoadedCard | UnloadedCard]
