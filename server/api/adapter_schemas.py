"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.api.base import Body


class LoadAdapterRequest(Body):
    """An adapter to load."""

    lora_name: str = Field(min_length=1, description="Name by which requests select the adapter.")
    lora_path: str = Field(
        min_length=1, description="A folder or GGUF file in the folder of --enable-lora-loading; may be relative to it."
    )
    load_inplace: Literal[False] | None = Field(None, description="Not supported. Unload the adapter first.")


class UnloadAdapterRequest(Body):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Ignored.")
