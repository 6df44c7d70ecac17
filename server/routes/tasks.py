"""The tasks of models. Each line adds all endpoints that a file declares."""

from __future__ import annotations

from server.answering.endpoints import Reason
from server.routes import (
    answer,
    audio,
    chat,
    classify,
    cohere,
    completions,
    decisions,
    embeddings,
    entities,
    fill_mask,
    generate,
    infill,
    messages,
    ollama,
    ollama_embed,
    responses,
    scoring,
    text_embeddings,
    translate,
)
from server.routes.task_router import TaskRouter, paths_of

# In the order in which messages list the endpoints.
TASKS: tuple[TaskRouter, ...] = (
    completions.router,
    chat.router,
    decisions.router,
    generate.router,
    infill.router,
    responses.router,
    messages.router,
    embeddings.router,
    cohere.router,
    text_embeddings.router,
    scoring.router,
    classify.router,
    answer.router,
    entities.router,
    fill_mask.router,
    translate.router,
    audio.router,
    ollama.router,
    ollama_embed.router,
)
LACKS: dict[str, Reason] = {path: reason for task in TASKS for path, reason in task.lacks.items()}
PATHS = paths_of(*TASKS)
