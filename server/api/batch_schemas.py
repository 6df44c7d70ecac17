"""The HTTP bodies of /v1/files and /v1/batches, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from server.api.base import JsonBody
from server.api.fields import Name
from server.api.response_schemas import Metadata

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip


class FileObject(BaseModel):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """Answer of DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchRequest(JsonBody):
    """Body of POST /v1/batches."""

    input_file_id: Name = Field(description="Id of a file with a request on each line.")
    endpoint: Name = Field(description="Path that all lines are for, such as /v1/chat/completions.")
    completion_window: Annotated[str, Field(pattern="^[0-9]{1,4}[hd]$")] = Field(
        description="Time after which the batch expires: hours or days, such as 24h or 7d."
    )
    metadata: Metadata = Field(None, description="Key-value pairs that come back with the batch.")


class BatchProblem(BaseModel):
    """A reason why a batch failed before it began."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(BaseModel):
    """The reasons, as a list."""

    object: Literal["list"] = "list"
    data: list[BatchProblem]


class BatchCounts(BaseModel):
    """Lines of a batch: all, those with an answer, and those with an error."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts
    metadata: dict[str, Any] | None = None


class BatchList(BaseModel):
    """A page of batches, the last one first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
