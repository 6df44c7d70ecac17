"""Strict loading of weights.

Every parameter is filled, and every tensor of the checkpoint is used or known to be unnecessary; names and shapes are
checked before any data is read. Each tensor is read once and copied to its parameter.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from engine.backends.attention.base import AttentionBackend
from engine.backends.native.ranks import Ranks
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.host.loading import LOADING
from engine.model import families
from engine.model.divided import divided, stored_columns
from engine.model.quantisation import Wanted
from engine.model.quantised_cache import find_folder
from engine.model.quantised_loading import MatrixLoading, mark_stored
from engine.model.sharding import Share, cuts, shard
from engine.model.spec import Lm, MaskedLm, ModelSpec, Pool
from engine.model.table import Conv1d, Destination, Entry, Same, WeightTable
from engine.model.transformer import Transformer
from engine.model.weight_files import FORMATS, Checkpoint

logger = logging.getLogger("octavo.model")

EMBEDDING, ENCODER_EMBEDDING = "decoder.embedding.tokens", "encoder.embedding.tokens"
_SHOWN = 5


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar whose updates also go to `LOADING`, even if the bar is not shown."""

    def update(self, n: float | None = 1) -> bool | None:
        LOADING.add(int(n or 0))
        shown: bool | None = super().update(n)
        return shown


def load_model(
    path: Path,
    config: Any,
    model_spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    max_model_len: int,
    max_encoder_len: int | None = None,
    show_progress: bool | None = None,
    quantization: Wanted | None = None,
    quantization_cache: str | None = "off",
    share_weights: bool = False,
    pack: bool = False,
    table: WeightTable | None = None,
    ranks: Ranks | None = None,
) -> Transformer:
    """The model of a checkpoint folder, with its weights converted to `dtype` on `device`.

    Args:
        config: the checkpoint's config (`engine.model.checkpoint.read_config`).
        model_spec: its parts (`engine.model.families.build_spec`).
        max_model_len, max_encoder_len: as in `Transformer`.
        quantization: format in which matrices are packed as soon as they are filled; None keeps all formats.
        quantization_cache: folder for quantised matrices, or "off"; None for the default folder.
        share_weights: whether all matrices for a CPU's own kernels are stored there.
        pack: whether a CPU's plain matrices are also packed as soon as they are filled; `Transformer.pack` packs the
            rest.
        table: the names of the weights; None: the family's.
        ranks: those that divide the model; the result is the part of one of them.

    Raises:
        ModelLoadError: there are no safetensors, a file cannot be read, names or shapes do not match, or memory is
            insufficient.
        UnsupportedModelError: a part is not implemented.
        ConfigError: max_model_len exceeds the positions of the checkpoint.
    """
    given, table = table, table or families.weight_table(config, model_spec)
    scheme = families.stored_scheme(config)
    with Checkpoint(path, scheme) as checkpoint:
        checkpoint.rename(table)
        stored_spec = as_stored(checkpoint, table, model_spec)
        if stored_spec != model_spec:
            model_spec = stored_spec
            table = given or families.weight_table(config, model_spec)
        if ranks is not None:
            share = Share(ranks.rank, ranks.count)
            parts, model_spec = cuts(model_spec, share), shard(model_spec, share)
        try:
            model = Transformer(
                model_spec,
                backend,
                max_model_len,
                max_encoder_len=max_encoder_len,
                device=device,
                dtype=dtype,
                # A GPU gets no matrix that will be quantised: unfilled parameters take no memory on the host.
                filled_on=None if quantization is None else torch.device("cpu"),
                ranks=ranks,
            )
        except RuntimeError as error:
            # The CPU's allocator raises a plain RuntimeError.
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            raise ModelLoadError(
                f"The weights of {path} do not fit into the free memory of {device} as {dtype}: {error}. "
                "Use a smaller model, a 16-bit --dtype, or another --device."
            ) from error
        table = as_linears(checkpoint, table)
        if ranks is not None:
            table = replace(table, entries=tuple(divided(entry, parts) for entry in table.entries))
        model.table = table
        destinations = plan(checkpoint, table, model)
        title = checkpoint.title  # for a GGUF file this includes reading
        if quantization == "stored":
            mark_stored(model, checkpoint, table, device)
        if title is not None:
            plain = str(dtype).removeprefix("torch.")
            if quantization == "stored":
                packed, expanded = (model.weight_bytes(each) >> 20 for each in ("stored", None))
                fate = (
                    f"stay packed and take {packed} MiB; --quantization none expands them to {expanded} MiB of {plain}"
                )
            elif quantization:
                fate = f"are converted to {quantization} while they load"
            else:
                fate = f"are expanded to {plain} while they load"
                if checkpoint.has_few_bits:
                    fate += "; --quantization stored keeps them packed"
            logger.info("The weights of %s are %s. They %s.", checkpoint.path, title, fate)
        bar = _Bar(
            total=_size_of(destinations), unit="B", unit_scale=True, unit_divisor=1024, desc="Loading weights",
            disable=None if show_progress is None else not show_progress,  # None: only in a terminal
        )  # fmt: skip
        if quantization is None and not (pack and device.type == "cpu"):
            LOADING.begin(_size_of(destinations))
            with bar:
                _fill(checkpoint, destinations, bar)
        else:
            folder = None if quantization is None and not share_weights else find_folder(quantization_cache)
            with (
                bar,
                MatrixLoading(
                    model, quantization, checkpoint, destinations, folder, share_weights, bar.update
                ) as matrices,
            ):
                bar.total = _size_of(destinations) + matrices.kept_bytes
                LOADING.begin(bar.total)
                _fill(checkpoint, destinations, bar, matrices)
                matrices.finish()
            matrices.report()
    return model.eval()


def stored_dtype(path: Path, config: Any) -> torch.dtype:
    """The format of a checkpoint's weights: from its config, else that of its largest tensor.

    float32 if the format is not float32, float16 or bfloat16.
    """
    named = getattr(config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    if named is None:
        with Checkpoint(path, families.stored_scheme(config)) as checkpoint:
            known = [name for name in checkpoint.names if checkpoint.format(name) in FORMATS]
            largest = max(known, key=lambda name: checkpoint.shape(name).numel(), default=None)
            named = None if largest is None else FORMATS.get(checkpoint.format(largest))
    return named if named in (torch.float16, torch.bfloat16) else torch.float32


def as_stored(checkpoint: Checkpoint, table: WeightTable, model: ModelSpec) -> ModelSpec:
    """The model as stored: with a separate output matrix and separate token tables if the checkpoint has them although
    they should be shared (they are then used, as in transformers), and without a head if an encoder's config names one
    that is not stored. Raises UnsupportedModelError if it is unclear to which table the output matrix is tied."""
    heads = [name for entry in table.entries if entry.target.startswith("head.") for name in entry.sources]
    if isinstance(model.head, MaskedLm) and not any(name in checkpoint.names for name in heads):
        # Sentence encoders often keep the class name of their pretraining.
        logger.info("%s has no masked-language-model head, so /v1/fill-mask is not served.", checkpoint.path)
        return replace(model, head=Pool())
    target = EMBEDDING if model.decoder is not None else ENCODER_EMBEDDING
    tables = (entry.sources[0] for entry in table.chosen(checkpoint.names) if entry.target == target)
    embedding = next(tables, None)
    if embedding is None:  # it reads no tokens
        return model
    if isinstance(model.head, Lm | MaskedLm) and model.head.tied and _differs(checkpoint, table.head, embedding):
        level = logging.INFO if table.expects_head else logging.WARNING
        message = "%s: tie_word_embeddings is true, but %s is stored with different values, which are used."
        logger.log(level, message, checkpoint.path, table.head)
        model = replace(model, head=replace(model.head, tied=False))
    own = [name for name in table.copies if _differs(checkpoint, name, embedding)]
    if not own or not model.shared_tokens:
        return model
    if isinstance(model.head, Lm) and model.head.tied:
        raise UnsupportedModelError(
            f"{checkpoint.path}: tie_word_embeddings is true, but {_some(own)} and {embedding} have different "
            "values, so it is not clear which of them is the output matrix. Store it as a separate tensor "
            f"({table.head}), or drop the unused tables."
        )
    return replace(model, shared_tokens=False)


def as_linears(checkpoint: Checkpoint, table: WeightTable) -> WeightTable:
    """The table, with a linear layer's layout for Conv1D matrices that the checkpoint stores by outputs."""

    def is_linear(entry: Entry) -> bool:
        stored = [name for name in entry.sources if name in checkpoint.names]
        return isinstance(entry.transform, Conv1d) and any(map(checkpoint.by_outputs, stored))

    entries = (replace(entry, transform=Same()) if is_linear(entry) else entry for entry in table.entries)
    return replace(table, entries=tuple(entries))


def _differs(checkpoint: Checkpoint, name: str | None, original: str) -> bool:
    """Whether this tensor is stored with other values than the original; an equal one is dropped from the
    checkpoint."""
    if name is None or name == original or name not in checkpoint.names or original not in checkpoint.names:
        return False
    shape, step = checkpoint.shape(name), 8192
    if shape == checkpoint.shape(original) and all(
        torch.equal(checkpoint.rows(name, row, row + step), checkpoint.rows(original, row, row + step))
        for row in range(0, shape[0], step)
    ):
        del checkpoint.names[name]
        return False
    return True


def plan(checkpoint: Checkpoint, table: WeightTable, model: Transformer) -> dict[str, list[Destination]]:
    """The destination of each stored tensor, by name; its parts may go to several parameters. Raises ModelLoadError:
    names or shapes do not match."""
    parameters = dict(model.named_parameters())
    destinations: dict[str, list[Destination]] = {}
    for entry in table.chosen(checkpoint.names):
        parameter = parameters.pop(entry.target).data
        if entry.default is not None and not any(name in checkpoint.names for name in entry.sources):
            entry.fill_by_default(parameter)
            continue
        shapes = entry.transform.shapes(parameter.shape)
        for place, (name, shape) in enumerate(zip(entry.sources, shapes, strict=True)):
            destinations.setdefault(name, []).append(Destination(parameter, entry.transform, place, shape))
    if parameters:
        raise ModelLoadError(f"The table of weight names does not fill {_some(list(parameters))}.")
    if missing := [name for name in destinations if name not in checkpoint.names]:
        raise ModelLoadError(f"{checkpoint.path} lacks tensors that its config requires: {_some(missing)}.")
    unexpected = [name for name in checkpoint.names if name not in destinations and not table.ignores(name)]
    if unexpected:
        raise ModelLoadError(f"{checkpoint.path} has tensors that do not match its config: {_some(unexpected)}.")
    for name, found in destinations.items():
        if wrong := [each.shape for each in found if each.shape != checkpoint.shape(name)]:
            raise ModelLoadError(
                f"{checkpoint.path}: the tensor {name} should have shape {list(wrong[0])} according to the config, "
                f"but is stored as {list(checkpoint.shape(name))}."
            )
        if checkpoint.format(name) not in FORMATS:
            raise UnsupportedModelError(
                f"{checkpoint.path}: the tensor {name} is stored as {checkpoint.format(name)}; only "
                f"{', '.join(FORMATS)} are supported if the config has no quantization_config."
            )
    return destinations


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _size_of(destinations: dict[str, list[Destination]]) -> int:
    """Bytes of the tensors to read, in the model's format."""
    return sum(d.shape.numel() * d.parameter.element_size() for found in destinations.values() for d in found[:1])


def _fill(
    checkpoint: Checkpoint,
    destinations: dict[str, list[Destination]],
    bar: tqdm[Any],
    matrices: MatrixLoading | None = None,
) -> None:
    """Read all tensors; `matrices` is notified with the address of each filled parameter."""
    # File order, so that a file is read from front to back.
    order = [name for name in checkpoint.names if name in destinations]
    for name in order:
        left = destinations.pop(name)  # it would keep memory that packing releases
        bar.update(left[0].shape.numel() * left[0].parameter.element_size())
        checkpoint.release()
        if matrices is not None and len(left) == 1 and matrices.keeps_table(name, left[0]):
            continue
        if matrices is not None and matrices.reads_itself(name):
            matrices.filled(left.pop().parameter.data_ptr())
            continue
        if matrices is not None and matrices.stores(name):
            destination = left.pop()
            pointer = destination.parameter.data_ptr()
            matrices.take(name, *stored_columns(checkpoint.quantised(name, matrices.keeps_own(name)), destination))
            del destination
            matrices.filled(pointer)
            continue
        formats = {destination.parameter.dtype for destination in left}
        stored = checkpoint.read(name, formats.pop() if len(formats) == 1 else None)
        while left:
            destination = left.pop()
            source = stored.to(destination.parameter.dtype)
            if source.dtype == torch.float16 and not bool(source.isfinite().all()):
                raise ModelLoadError(
                    f"{checkpoint.path}: values of the tensor {name} exceed the range of float16. "
                    "Use --dtype bfloat16 or float32."
                )
            destination.transform.fill(destination.parameter, destination.place, source)
            if matrices is not None:
                pointer = destination.parameter.data_ptr()
                del destination
                matrices.filled(pointer)
    checkpoint.check_unchanged()
