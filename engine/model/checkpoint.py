"""Finding a checkpoint, in a local folder or on the hub, and reading its config."""

from __future__ import annotations

import difflib
import glob
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, list_repo_files, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import AutoConfig

from engine.errors import ModelLoadError, NotDownloadedError, UnsupportedModelError
from engine.model import families
from engine.model.config_values import check_values, read_values
from engine.model.families.entities import FILE as ENTITIES
from engine.model.families.entities import encoder_config
from engine.model.families.language_part import language_part
from engine.model.gguf.folder import SUFFIX, single_file, stand_in
from engine.model.gguf.on_hub import choose, named_file, nothing_chosen

logger = logging.getLogger("octavo.model")

# Everything a model needs, and no weights in other formats.
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
    # Of sentence-transformers (`engine.model.sentence`): modules have folders of their own, the transformer may, too.
    "modules.json",
    "*sentence_*.json",
    "*/config.json",
    "0_*/*.json",
    "0_*/*.txt",
    # Of GLiNER (`engine.model.families.entities`).
    "gliner_config.json",
    # Of bge-m3 (`engine.model.retrieval`).
    "sparse_linear.pt",
    "colbert_linear.pt",
)


def locate(model: str, revision: str | None = None, hf_token: str | None = None, *, download: bool = True) -> Path:
    """The folder of a checkpoint, downloaded if `model` is a hub id; of a GGUF file the one that stands for it.

    Args:
        model: local folder, GGUF file, hub id such as "org/name", or a GGUF file there, such as "org/name:Q4_K_M" or
            "org/name/*Q4_K_M.gguf".
        revision: branch, tag or commit on the hub.
        hf_token: token for gated models; else HF_TOKEN or the token of `hf auth login`.
        download: false: only what is in the local cache already.

    Raises:
        ModelLoadError: there is no such folder or model, access is denied, or the hub is out of reach.
    """
    return laid_out(find(model, revision, hf_token, download=download))


def laid_out(place: Path) -> Path:
    """The folder that `find` found; of a GGUF file the one that stands for it."""
    return place if place.is_dir() else stand_in(place)


def find(model: str, revision: str | None = None, hf_token: str | None = None, *, download: bool = True) -> Path:
    """The folder of a checkpoint, or the GGUF file that is one; see `locate`."""
    path = Path(model).expanduser()
    if path.is_dir():
        if (file := single_file(path)) is not None:
            return file
        if not _is_checkpoint(path):
            raise ModelLoadError(
                f"The folder {path} holds no config.json, so it is no checkpoint in Hugging Face's layout. "
                "Give the folder that holds config.json and the safetensors files, or a GGUF file."
            )
        return path
    if path.suffix == SUFFIX and path.exists():
        return path
    if path.exists():
        raise ModelLoadError(
            f"{path} is a file; give the folder of the checkpoint that holds config.json, or a file *{SUFFIX}."
        )
    if (named := named_file(model)) is not None:
        return _gguf_file(*named, revision, hf_token, local_only=not download)
    if path.suffix == SUFFIX:
        raise ModelLoadError(f"The file {path} does not exist.")
    if _looks_like_path(model):
        advice = _near(path) or " Name one that holds config.json, or a model on the hub, such as org/name."
        raise ModelLoadError(f"The folder {path} does not exist.{advice}")
    folder = _download(model, PATTERNS, revision, hf_token, local_only=not download)
    if not _is_checkpoint(folder):
        raise ModelLoadError(
            f"The model {_at(model, revision)} on the hub holds no config.json, so it cannot be loaded. Of GGUF files "
            f"there name one: {model}:Q4_K_M, say."
        )
    return folder


def _near(path: Path) -> str:
    """ " Did you mean ...?" if beside a folder that is not there one of a similar name holds a checkpoint, else ""."""
    try:
        beside = [other.name for other in path.parent.iterdir() if other.is_dir() and _is_checkpoint(other)]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, beside, n=1)
    return f" Did you mean {path.parent / found[0]}?" if found else ""


def _is_checkpoint(path: Path) -> bool:
    """It holds a config, or says in which of its folders there is one."""
    return any((path / name).is_file() for name in ("config.json", "modules.json", ENTITIES))


def _looks_like_path(model: str) -> bool:
    parts = model.replace("\\", "/").split("/")
    return (
        model.startswith((".", "~", os.sep))
        or model.endswith("/")
        or os.path.isabs(model)
        or len(parts) > 2
        or "\\" in model
    )


def _at(model: str, revision: str | None) -> str:
    return f"{model} (revision {revision})" if revision else model


def _download(
    model: str, patterns: Sequence[str], revision: str | None, hf_token: str | None, *, local_only: bool
) -> Path:
    with _explained(model, revision, local_only=local_only):
        folder = snapshot_download(
            model,
            revision=revision,
            token=hf_token or None,
            allow_patterns=list(patterns),
            local_files_only=local_only,
        )
    return Path(folder)


def _gguf_file(model: str, wanted: str, revision: str | None, hf_token: str | None, *, local_only: bool) -> Path:
    """A GGUF file of a repository; where the hub cannot be asked, one that is in the local cache."""
    names = None if local_only or constants.HF_HUB_OFFLINE else _listed(model, revision, hf_token)
    if names is None:
        try:
            folder = _download(model, [f"*{SUFFIX}"], revision, hf_token, local_only=True)
        except NotDownloadedError as error:
            if local_only:
                raise
            raise ModelLoadError(_unreachable(model, _at(model, revision))) from error
        here = [file.relative_to(folder).as_posix() for file in folder.rglob(f"*{SUFFIX}")]
        if (chosen := choose(here, model, wanted)) is None:
            raise NotDownloadedError(f"{wanted} of {_at(model, revision)} is not in the local cache yet.")
        return folder / chosen
    if (chosen := choose(names, model, wanted)) is None:
        raise ModelLoadError(nothing_chosen(names, _at(model, revision), wanted))
    return _download(model, [glob.escape(chosen)], revision, hf_token, local_only=False) / chosen


def _listed(model: str, revision: str | None, hf_token: str | None) -> list[str] | None:
    """The files of a model on the hub; None where it is out of reach."""
    refusals = (HFValidationError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
    with _explained(model, revision, local_only=False):
        try:
            return list_repo_files(model, revision=revision, token=hf_token or None)
        except refusals:
            raise
        except Exception as error:  # whatever the HTTP client of the installed version raises
            logger.warning("%s: the hub cannot be asked for its files: %s", model, error)
            return None


@contextmanager
def _explained(model: str, revision: str | None, *, local_only: bool) -> Iterator[None]:
    """Turn what the hub's client raises into errors that say what to do."""
    at = _at(model, revision)
    try:
        yield
    except HFValidationError as error:
        raise ModelLoadError(
            f"{model!r} is neither an existing folder nor a valid hub id such as org/name ({error})."
        ) from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"Access to {at} is restricted. Accept its conditions on https://huggingface.co/{model}, then give a "
            "token that has access in HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"There is no folder {model}, and no model {at} on the hub; it may also be private.{_near(Path(model))} "
            "Check the name, or give a token that has access in HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"The hub has the model {model}, but no revision {revision!r}; see --revision.") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if local_only and not constants.HF_HUB_OFFLINE:
            raise NotDownloadedError(f"{at} is not in the local cache yet.{_near(Path(model))}") from error
        raise ModelLoadError(_unreachable(model, at)) from error
    except Exception as error:
        # Whatever the HTTP client of the installed version raises, full disks, rate limits.
        raise ModelLoadError(f"{at} could not be downloaded from the hub ({type(error).__name__}: {error}).") from error


def _unreachable(model: str, at: str) -> str:
    why = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return (
        f"There is no folder {model}, {at} is not complete in the local cache, and {why}.{_near(Path(model))} "
        "Connect to the network, or give a local folder that holds the checkpoint."
    )


def read_config(path: Path) -> Any:
    """The transformers config of a checkpoint folder, of a vision-language model that of its language part, of GLiNER
    that of its encoder; code in the checkpoint is never run.

    Raises:
        ModelLoadError: there is no readable config, or it holds a number that no model has.
        UnsupportedModelError: unknown model type, or weights that are stored in a way that is not read.
    """
    if (path / ENTITIES).is_file():
        values = read_values(path / ENTITIES)
        check_values(path / ENTITIES, values, known=True)
        return encoder_config(path, values)
    file = path / "config.json"
    values = read_values(file)
    check_values(file, values, known=families.is_known(values))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, all of them about this file
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{path} brings its own model code (auto_map in config.json), which is never run. "
                "Use a checkpoint whose architecture transformers itself knows."
            ) from error
        raise ModelLoadError(f"{file} cannot be read: {_first_paragraph(error)}") from error
    part = language_part(config)
    if part is not config:
        logger.info("%s is served as a text model: images are refused.", families.architecture(config))
    families.stored_scheme(part)
    return part


def _first_paragraph(error: Exception) -> str:
    return str(error).strip().split("\n\n")[0] or type(error).__name__
