"""Retrieval parts of a checkpoint that sentence-transformers' configs do not mention: the matrices of bge-m3, stored
beside its weights (arXiv:2402.03216), and the matrix of a ColBERT model as its own library saves it
(arXiv:2004.12832)."""

from __future__ import annotations

import logging
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.configs.values import read_values
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.interface.outputs import SideInfo
from engine.model.sentence import (
    MODULES,
    AmongModel,
    DenseLayer,
    InputWeights,
    Pipeline,
    TokenVectors,
    TorchFile,
    read_pipeline,
    token_length,
)
from engine.model.weight_files import FORMATS, Checkpoint

logger = logging.getLogger("octavo.model")

SPARSE_FILE, TOKENS_FILE = "sparse_linear.pt", "colbert_linear.pt"
COLBERT = "HF_ColBERT"  # the architecture's name
_COLBERT_WEIGHT, _COLBERT_SETTINGS = "linear.weight", "artifact.metadata"
MOST_BYTES = 64 << 20  # bytes of a torch file: a matrix of 4096 x 4096 numbers in float32


def read_folder(root: Path) -> Pipeline:
    """All settings for embeddings in a checkpoint's folder: sentence-transformers' configs, and the files beside them.
    Raises ModelLoadError if a file is missing or damaged, or has invalid values; UnsupportedModelError if a module, a
    setting or a tensor is not implemented."""
    pipeline = read_pipeline(root)
    path = pipeline.transformer
    if pipeline.sparse is None and (path / SPARSE_FILE).is_file():
        layer = _torch_layer(path, SPARSE_FILE)
        if layer.outputs != 1:
            raise UnsupportedModelError(
                f"{path / SPARSE_FILE} computes {layer.outputs} numbers per token, not one weight."
            )
        pipeline = replace(pipeline, sparse=InputWeights(layer))
    if pipeline.tokens is None and (path / TOKENS_FILE).is_file():
        # The first token's state becomes the vector of the whole input, and has no vector of its own.
        pipeline = replace(pipeline, tokens=TokenVectors(layers=(_torch_layer(path, TOKENS_FILE),), first=1))
    if pipeline.tokens is None and not (root / MODULES).is_file() and is_colbert(path):
        tokens = TokenVectors(layers=(_colbert_layer(path),), sides=_sides(path / _COLBERT_SETTINGS))
        pipeline = replace(pipeline, modes=(), tokens=tokens, prompts=dict.fromkeys(tokens.sides, ""))
    return pipeline


def is_colbert(path: Path) -> bool:
    """Whether the folder's config names ColBERT's own class."""
    try:
        named = read_values(path / "config.json").get("architectures")
    except (ModelLoadError, PermissionError):
        return False  # logged where the config is read
    return isinstance(named, list) and named[:1] == [COLBERT]


def _colbert_layer(path: Path) -> DenseLayer:
    with Checkpoint(path) as stored:
        shape = stored.shape(_COLBERT_WEIGHT) if _COLBERT_WEIGHT in stored.names else torch.Size()
        if len(shape) != 2:
            raise ModelLoadError(f"{path} lacks the matrix {_COLBERT_WEIGHT}, which computes the token vectors.")
        if stored.format(_COLBERT_WEIGHT) not in FORMATS:
            raise UnsupportedModelError(
                f"{path}: the tensor {_COLBERT_WEIGHT} is stored as {stored.format(_COLBERT_WEIGHT)}; only "
                f"{', '.join(FORMATS)} are read."
            )
    return DenseLayer(
        inputs=shape[1],
        outputs=shape[0],
        bias=False,
        activation="Identity",
        residual=False,
        folder=path,
        source=AmongModel(),
    )


def _sides(file: Path) -> dict[str, SideInfo]:
    """The way in which ColBERT's own library reads queries and documents (`QueryTokenizer`, `DocTokenizer` and
    `ColBERT.mask` of its colbert/modeling/), from the settings that it saves and the defaults of its
    colbert/infra/config/settings.py."""
    if not file.is_file():
        logger.warning(
            "%s is missing. Queries and documents are read like any other text, without markers, and queries are "
            "not padded with masks.",
            file,
        )
        return {}
    settings = read_values(file)
    if isinstance(settings.get("config"), dict):  # the form in which settings of whole runs are saved
        settings = settings["config"]
    known = {name: value for name, value in settings.items() if value is not None}
    marks = known.get("query_token_id", "[unused0]"), known.get("doc_token_id", "[unused1]")
    if not all(isinstance(mark, str) and mark for mark in marks):
        raise ModelLoadError(f"{file}: query_token_id and doc_token_id must be tokens of the vocabulary.")
    for name, implemented in (("similarity", "cosine"), ("interaction", "colbert")):
        if known.get(name, implemented) != implemented:
            logger.warning("%s: %s is %s, which Octavo ignores: scores are MaxSim.", file, name, known[name])
    query = SideInfo(
        marker=marks[0],
        length=token_length(file, known, "query_maxlen", 32),
        filled=True,
        attended=known.get("attend_to_mask_tokens") is True,
    )
    document = SideInfo(
        marker=marks[1],
        length=token_length(file, known, "doc_maxlen", 220),
        punctuation=known.get("mask_punctuation", True) is not False,
    )
    return {"query": query, "document": document}


def _torch_layer(folder: Path, name: str) -> DenseLayer:
    state = read_state(folder / name)
    outputs, inputs = state["weight"].shape
    return DenseLayer(
        inputs=inputs,
        outputs=outputs,
        bias="bias" in state,
        activation="Identity",
        residual=False,
        folder=folder,
        source=TorchFile(name),
    )


def read_state(file: Path) -> dict[str, Tensor]:
    """The matrix of a linear layer, "weight", and its "bias", if it has one, from a torch file. Only tensors are read,
    and no more than `MOST_BYTES`. Raises ModelLoadError if the file is larger, damaged, or contains something else."""
    try:
        with zipfile.ZipFile(file) as archive:
            size = max(sum(entry.file_size for entry in archive.infolist()), file.stat().st_size)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{file} was not written by torch 1.6 or newer ({error}).") from error
    if size > MOST_BYTES:
        raise ModelLoadError(f"{file} has {size} bytes; a linear layer may have at most {MOST_BYTES}.")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise ModelLoadError(f"{file} cannot be read as tensors ({str(error).splitlines()[0]}).") from error
    if not isinstance(state, dict) or not _is_linear(state):
        raise ModelLoadError(f'{file} must hold the state of a linear layer: "weight", and "bias" if there is one.')
    return state


def _is_linear(state: dict[object, object]) -> bool:
    weight, bias = state.get("weight"), state.get("bias")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not set(state) <= {"weight", "bias"}:
        return False
    if weight.dtype not in FORMATS.values() or weight.numel() * weight.element_size() > MOST_BYTES:
        return False  # a view may claim more than the file contains
    return "bias" not in state or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1])
