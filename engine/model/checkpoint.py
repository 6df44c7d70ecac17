"""Finds a checkpoint, in a local folder or on the hub, and reads its config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.configs.published import PublishedConfig, read
from engine.configs.values import check_values, read_values
from engine.errors import ModelLoadError
from engine.model import families
from engine.model.families.entities import FILE as ENTITIES
from engine.model.families.entities import encoder_config
from engine.model.families.language_part import language_part
from engine.model.families.sight import SEEING, UNSEEN
from engine.model.folders import find_here, is_checkpoint
from engine.model.gguf.files import NO_PROJECTOR
from engine.model.gguf.folder import stand_in
from engine.model.gguf.on_hub import named_file

logger = logging.getLogger("octavo.model")

ConfigReader = Callable[[Path], Any]  # from a checkpoint folder to its config

# All files that a model needs, without weights in other formats.
PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    # For sentence-transformers (`engine.model.sentence`): modules have their own folders, and the transformer may too.
    "modules.json",
    "*sentence_*.json",
    "*/config.json",
    "0_*/*.json",
    "0_*/*.txt",
    # For GLiNER (`engine.model.families.entities`).
    "gliner_config.json",
    # For bge-m3 (`engine.model.retrieval`).
    "sparse_linear.pt",
    "colbert_linear.pt",
)


def locate(
    model: str,
    revision: str | None = None,
    hf_token: str | None = None,
    *,
    download: bool = True,
    mmproj: str | None = None,
) -> Path:
    """The folder of a checkpoint, downloaded if `model` is a hub id; for a GGUF file, the folder that represents it.
    Raises ModelLoadError if the folder or model does not exist, access is denied, or the hub cannot be reached.

    Args:
        model: local folder, GGUF file, hub id such as "org/name", or a GGUF file there, such as "org/name:Q4_K_M" or
            "org/name/*Q4_K_M.gguf".
        revision: branch, tag or commit on the hub.
        hf_token: token for gated models; else HF_TOKEN or the token of `hf auth login`.
        download: False uses only the local cache.
        mmproj: the image projector of a GGUF file (`engine.model.gguf.folder.stand_in`).
    """
    return laid_out(find(model, revision, hf_token, download=download), mmproj)


def laid_out(place: Path, mmproj: str | None = None) -> Path:
    """The folder that `find` found; for a GGUF file, the folder that represents it. Raises ModelLoadError if a
    projector is given for another model."""
    if not place.is_dir():
        return stand_in(place, mmproj)
    if mmproj not in (None, NO_PROJECTOR):
        raise ModelLoadError(
            f"mmproj is the image projector of a GGUF file, but {place} is a folder in Hugging Face's format, which "
            "contains its own. Remove --mmproj."
        )
    return place


def find(model: str, revision: str | None = None, hf_token: str | None = None, *, download: bool = True) -> Path:
    """The folder of a checkpoint, or its GGUF file; see `locate`."""
    if (place := find_here(model)) is not None:
        return place
    if (named := named_file(model)) is not None:
        from engine.model.hub import gguf_file  # slow to import

        return gguf_file(*named, revision, hf_token, local_only=not download)
    from engine.model import hub  # slow to import

    folder = hub.download(model, PATTERNS, revision, hf_token, local_only=not download)
    if not is_checkpoint(folder):
        raise ModelLoadError(
            f"The model {hub.at(model, revision)} on the hub has no config.json, so it cannot be loaded. If it "
            f"contains GGUF files, choose one, such as {model}:Q4_K_M."
        )
    return folder


def read_config(path: Path, given: PublishedConfig | None = None) -> Any:
    """The config of a checkpoint folder. For a vision-language model, the config of its language part; for GLiNER, that
    of its encoder. Code in the checkpoint never runs. Raises ModelLoadError if there is no readable config, or it
    contains an impossible number; UnsupportedModelError if the model type is unknown, or the weights are stored in an
    unsupported format."""
    if (path / ENTITIES).is_file():
        values = read_values(path / ENTITIES)
        check_values(path / ENTITIES, values, known=True)
        return encoder_config(path, values)
    config = given or read(path, known=families.is_known(read_values(path / "config.json")))
    part = language_part(config)
    if part is not config and families.architecture(config) not in SEEING:
        name = families.architecture(config)
        logger.info("%s is served as a text model; requests with images are refused%s.", name, UNSEEN.get(name, ""))
    families.stored_scheme(part)
    return part
