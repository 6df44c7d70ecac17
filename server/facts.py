"""The log lines at start about the served model: its name, sizes and endpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from engine import EngineConfig, EngineInfo, find_here, read_template
from engine.host.logs import adopt_libraries
from engine.pooled import check_sides
from engine.text.processor import Tokenizer, check_vocabulary, give_template, load_tokenizer
from server.config.settings import DEMOS

# Ids of bundled models, and their descriptions for the log.
DEMO_IDS = {DEMOS["chat"]: "octavo-demo", DEMOS["seq2seq"]: "octavo-demo-seq2seq"}

logger = logging.getLogger("octavo.server")


@dataclass(frozen=True, slots=True)
class EarlyTokenizer:
    """A tokenizer and the folder that it was read from."""

    source: str
    tokenizer: Tokenizer | None


def served_model_id(model: str, served_model_name: str | None) -> str:
    """The model's name for clients: the setting, else the last part of the folder's or GGUF file's name, else the hub
    id."""
    if served_model_name:
        return served_model_name
    path = Path(model)
    if path in DEMO_IDS:
        return DEMO_IDS[path]
    if path.suffix == ".gguf" and path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def check_source(config: EngineConfig) -> None:
    """Find a wrong name before any process starts.

    Raises:
        OctavoError: the model's folder or file, or that of its chat template, does not exist.
    """
    find_here(config.model)
    if config.chat_template is not None:
        read_template(config.chat_template)


def read_tokenizer(config: EngineConfig, info: EngineInfo, early: EarlyTokenizer | None = None) -> Tokenizer | None:
    """The tokenizer of the model that an engine has loaded; None if there is none or none is wanted. `early`: a
    tokenizer that was read while the engine loaded; used if it belongs to the engine's model."""
    if config.skip_tokenizer_init:
        return None
    own = config.tokenizer is None
    source = info.model_path if own else config.tokenizer or ""
    if early is not None and early.source == source and not info.lower_case:
        tokenizer = early.tokenizer
    else:
        tokenizer = load_tokenizer(
            source,
            revision=config.revision if own else None,
            hf_token=config.hf_token,
            lower_case=info.lower_case,
            chat_template=config.chat_template,
            alone=True,
        )
    check_vocabulary(info, tokenizer)
    give_template(info, tokenizer)
    check_sides(info, tokenizer)
    adopt_libraries()
    if tokenizer is not None:
        from server.answering.long_texts import leave_to_worker  # in parallel with the app, while the engine loads

        leave_to_worker(tokenizer)
    return tokenizer


def log_facts(info: EngineInfo, tokenizer: Tokenizer | None, model_id: str) -> None:
    """Log the model's name, sizes and endpoints."""
    from server.answering.endpoints import served_endpoints  # in parallel with the app, while the engine loads
    from server.routes.tasks import LACKS

    endpoints = ", ".join(served_endpoints(LACKS, info, tokenizer)) or "no endpoint"
    if tokenizer is None:
        logger.warning("The model has no tokenizer: prompts must be token ids, and answers have no text.")
    if info.encoder_only:
        _log_encoder(info, model_id)
    else:
        _log_decoder(info, model_id)
    if tokenizer is not None and tokenizer.chat_template is None and _is_decoder(info):
        logger.info(
            "No chat: the model has no chat template, so /v1/completions continues texts and /v1/chat/completions "
            "returns 400. If you know the template, set --chat-template to a file or a name such as chatml."
        )
    logger.info("Endpoints: %s.", endpoints)
    if info.max_loras:
        names = ", ".join(adapter.name for adapter in info.adapters) or "none yet"
        logger.info("Adapters: %s; at most %d, up to rank %d.", names, info.max_loras, info.max_lora_rank)


def _is_decoder(info: EngineInfo) -> bool:
    return "generate" in info.tasks and info.max_encoder_len is None


def _log_encoder(info: EngineInfo, model_id: str) -> None:
    logger.info(
        "Model %s from %s: %s on %s, encoder-only, %s, inputs of up to %d tokens.",
        model_id, info.model_file or info.model_path, info.format, info.device, ", ".join(info.tasks),
        info.max_model_len,
    )  # fmt: skip
    logger.info(
        "No KV cache: a step reads whole inputs, at most %d of them with %d tokens together, or a single longer "
        "one.",
        info.max_num_seqs, info.max_num_batched_tokens,
    )  # fmt: skip


def _log_decoder(info: EngineInfo, model_id: str) -> None:
    # At least as many shorter requests fit as longest ones, whose pages outside a sliding window are free again.
    longest, least = info.max_model_len, info.full_requests
    room = f"up to {longest} tokens for prompt and answer together"
    if "generate" not in info.tasks:
        room = f"{', '.join(info.tasks)}, inputs of up to {longest} tokens"
    if info.max_encoder_len is not None:  # its tokens need pages too
        room = f"encoder-decoder, prompts of up to {info.max_encoder_len} tokens, answers of up to {longest}"
        longest, least = longest + info.max_encoder_len, 0.0
    logger.info(
        "Model %s from %s: %s on %s, %s.", model_id, info.model_file or info.model_path, info.format, info.device, room
    )
    tokens = info.num_blocks * info.block_size
    lengths = [longest] + [1024] * (longest > 1024)
    fit = ", or ".join(f"{max(tokens / length, least):.1f} requests of {length} tokens" for length in lengths)
    logger.info(
        "KV cache: %d tokens in %s (%d pages of %d tokens). It holds %s. At most %d requests run at the same time.",
        tokens, info.kv_cache_dtype, info.num_blocks, info.block_size, fit, info.max_num_seqs,
    )  # fmt: skip
