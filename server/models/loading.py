"""Loading one model, in a thread: its engine's process and its tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from engine.host.loading import Tell
from engine.host.logs import LogFormat
from engine.process.client import ProcessEngineClient
from engine.process.known import Known
from engine.text.processor import Tokenizer
from server.early import read_early
from server.facts import EarlyTokenizer, log_facts, read_tokenizer
from server.life import load
from server.models.declared import Declared


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can serve. `tokenizer`: None if it has none."""

    client: ProcessEngineClient
    tokenizer: Tokenizer | None


def load_model(model: Declared, log_format: LogFormat, tell: Tell) -> LoadedModel:
    """Load a model; blocks until it can serve. Raises OctavoError if it cannot be loaded.

    Args:
        log_format: the format of the engine's log lines.
        tell: called with the percentage of the weights that are loaded.
    """
    config = replace(model.engine, show_progress=False)  # several progress bars would share a terminal's line
    early: list[EarlyTokenizer | None] = []
    client = load(
        config, model.settings, log_format, Known, tell, lambda: early.append(read_early(config, model.settings))
    )
    try:
        tokenizer = read_tokenizer(config, client.info, *early)
        log_facts(client.info, tokenizer, model.name)
    except BaseException:
        asyncio.run(client.close())
        raise
    return LoadedModel(client, tokenizer)
