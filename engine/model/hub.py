"""Checkpoints on the hub, downloaded into its local cache."""

from __future__ import annotations

import glob
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, list_repo_files, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.errors import ModelLoadError, NotDownloadedError
from engine.host.logs import adopt_libraries, configured
from engine.model.folders import near
from engine.model.gguf.files import SUFFIX
from engine.model.gguf.on_hub import choose, nothing_chosen

logger = logging.getLogger("octavo.model")

_PROBE = 5.0  # seconds to connect to the hub


def at(model: str, revision: str | None) -> str:
    """The name of a model on the hub, for messages."""
    return f"{model} (revision {revision})" if revision else model


def download(
    model: str, patterns: Sequence[str], revision: str | None, hf_token: str | None, *, local_only: bool
) -> Path:
    """The folder of a model in the local cache, with the files that match patterns. Raises ModelLoadError if the model
    does not exist, access is denied, or the hub cannot be reached; NotDownloadedError: with `local_only`, it is not in
    the cache."""
    if not local_only:
        _say_asked(model)
    with _explained(model, revision, local_only=local_only):
        folder = snapshot_download(
            model, revision=revision, token=hf_token or None, allow_patterns=list(patterns), local_files_only=local_only
        )
    return Path(folder)


def gguf_file(model: str, wanted: str, revision: str | None, hf_token: str | None, *, local_only: bool) -> Path:
    """A GGUF file of a repository; if the hub cannot be reached, one in the local cache."""
    names = None if local_only or constants.HF_HUB_OFFLINE else _listed(model, revision, hf_token)
    if names is None:
        try:
            folder = download(model, [f"*{SUFFIX}"], revision, hf_token, local_only=True)
        except NotDownloadedError as error:
            if local_only:
                raise
            raise ModelLoadError(_unreachable(model, at(model, revision))) from error
        here = [file.relative_to(folder).as_posix() for file in folder.rglob(f"*{SUFFIX}")]
        if (chosen := choose(here, model, wanted)) is None:
            raise NotDownloadedError(f"{wanted} of {at(model, revision)} is not in the local cache yet.")
        return folder / chosen
    if (chosen := choose(names, model, wanted)) is None:
        raise ModelLoadError(nothing_chosen(names, at(model, revision), wanted))
    return download(model, [glob.escape(chosen)], revision, hf_token, local_only=False) / chosen


def _say_asked(model: str) -> None:
    if not constants.HF_HUB_OFFLINE:
        logger.info("%s is not a local path. Asking the hub (%s).", model, constants.ENDPOINT)


def _unreachable_because() -> OSError | None:
    """The reason why the hub cannot be reached; None if it can, or if a proxy must be used. The hub's client would try
    for half a minute."""
    address = urlsplit(constants.ENDPOINT)
    if getproxies().keys() & {address.scheme, "all"}:
        return None
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), _PROBE).close()
    except OSError as error:
        return error
    return None


def _listed(model: str, revision: str | None, hf_token: str | None) -> list[str] | None:
    """The files of a model on the hub; None if the hub cannot be reached."""
    _say_asked(model)
    if (reason := _unreachable_because()) is not None:
        logger.warning("The hub cannot be reached (%s). The local cache is used instead.", reason)
        return None
    refusals = (HFValidationError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
    with _explained(model, revision, local_only=False):
        try:
            return list_repo_files(model, revision=revision, token=hf_token or None)
        except refusals:
            raise
        except Exception as error:  # the exceptions depend on the installed HTTP client
            logger.warning("The hub does not list the files of %s (%s). The local cache is used instead.", model, error)
            return None


@contextmanager
def _explained(model: str, revision: str | None, *, local_only: bool) -> Iterator[None]:
    """Turn exceptions of the hub's client into errors with advice."""
    place = at(model, revision)
    if configured() is not None:
        adopt_libraries()  # otherwise the client's warnings appear twice
    try:
        yield
    except HFValidationError as error:
        raise ModelLoadError(
            f"{model!r} is neither an existing folder nor a valid hub id such as org/name ({error})."
        ) from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"Access to {place} is restricted. Accept its conditions on https://huggingface.co/{model}, then set "
            f"HF_TOKEN to a token with access."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{place} is neither a local folder nor a public model on the hub.{near(Path(model))} "
            "Check the name, or set HF_TOKEN to a token with access."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"The hub has the model {model}, but no revision {revision!r}; see --revision.") from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if local_only and not constants.HF_HUB_OFFLINE:
            raise NotDownloadedError(f"{place} is not in the local cache yet.{near(Path(model))}") from error
        raise ModelLoadError(_unreachable(model, place)) from error
    except Exception as error:
        # Exceptions of the installed HTTP client, full disks, rate limits.
        raise ModelLoadError(
            f"{place} could not be downloaded from the hub ({type(error).__name__}: {error})."
        ) from error


def _unreachable(model: str, place: str) -> str:
    why = "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return (
        f"{place} is not a local folder, its files are not all in the local cache, and {why}.{near(Path(model))} "
        "Check the network, or give the path of a local model."
    )
