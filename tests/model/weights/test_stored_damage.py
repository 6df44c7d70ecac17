"""Damaged checkpoints of few bits: each change of a tensor or of the config ends in numbers or in an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import packing
from support.packing import Packing, Stored
from test_stored_weights import IN_GROUPS, KINDS, write
from torch import Size, Tensor

from engine.errors import ModelLoadError
from engine.model.stored.methods import find_scheme
from engine.model.weight_files import Checkpoint

FILE = "model.safetensors"
ROWS, COLUMNS = 32, 64


def _compressed(bits: int, stored: str, group: int | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group" if group else "channel",
               "group_size": group, "block_structure": None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": stored, "sparsity_config": {"format": "dense"},
            "config_groups": {"group_0": {"weights": weights}}}  # fmt: skip


def _packed_integers(bits: int, *, zeros: bool, ordered: bool) -> Packing:
    def pack(outputs: int, inputs: int, seed: int) -> Stored:
        values = torch.arange(outputs * inputs).view(outputs, inputs) % (1 << bits)
        parts = {
            ".weight_packed": packing.packed(values, bits, 1),
            ".weight_scale": torch.ones(outputs, inputs // 32, dtype=torch.bfloat16),
            ".weight_shape": torch.tensor([outputs, inputs]),
        }
        if zeros:
            middles = torch.full((outputs, inputs // 32), 1 << bits - 1)
            parts[".weight_zero_point"] = packing.packed(middles, bits, 0)
        if ordered:
            parts[".weight_g_idx"] = torch.arange(inputs, dtype=torch.int32) // 32
        return Stored(parts, values.float() - (1 << bits - 1))

    return pack


def _plain_integers(*, zeros: bool) -> Packing:
    def pack(outputs: int, inputs: int, seed: int) -> Stored:
        values = (torch.arange(outputs * inputs).view(outputs, inputs) % 255 - 127).to(torch.int8)
        parts = {".weight": values, ".weight_scale": torch.ones(outputs, 1)}
        if zeros:
            parts[".weight_zero_point"] = torch.zeros(outputs, 1, dtype=torch.int8)
        return Stored(parts, values.float())

    return pack


def _plain_nf4(outputs: int, inputs: int, seed: int) -> Stored:
    """Whose largest numbers are floats."""
    made = packing.nf4()(outputs, inputs, seed)
    parts = {name: part for name, part in made.parts.items() if "nested" not in name}
    parts[".weight.absmax"] = torch.rand(outputs * inputs // 64)
    state = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [%d, %d]}' % (outputs, inputs)
    parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    return Stored(parts, made.holds)


def _mxfp4(outputs: int, inputs: int, seed: int) -> Stored:
    parts = {"_blocks": torch.zeros(2, outputs, inputs // 32, 16, dtype=torch.uint8),
             "_scales": torch.full((2, outputs, inputs // 32), 127, dtype=torch.uint8)}  # fmt: skip
    return Stored(parts, torch.zeros(2, outputs, inputs))


FORMATS: dict[str, tuple[dict[str, Any], Packing]] = {
    **KINDS,
    "awq-in-groups": IN_GROUPS["awq"],
    "gptq-4-in-groups": IN_GROUPS["gptq-4"],
    "nf4-plain": (KINDS["nf4"][0], _plain_nf4),
    "compressed-4": (_compressed(4, "pack-quantized", 32), _packed_integers(4, zeros=False, ordered=False)),
    "compressed-4-zeros": (_compressed(4, "pack-quantized", 32), _packed_integers(4, zeros=True, ordered=False)),
    "compressed-4-order": (_compressed(4, "pack-quantized", 32), _packed_integers(4, zeros=True, ordered=True)),
    "compressed-8": (_compressed(8, "pack-quantized", 32), _packed_integers(8, zeros=False, ordered=False)),
    "compressed-bytes": (_compressed(8, "int-quantized"), _plain_integers(zeros=False)),
    "compressed-bytes-zeros": (_compressed(8, "int-quantized"), _plain_integers(zeros=True)),
    "compressed-fp8": (_compressed(8, "float-quantized"), packing.fp8((1, 1 << 20), ".weight_scale")),
    "mxfp4": ({"quant_method": "mxfp4"}, _mxfp4),
}  # fmt: skip

STATES = (
    b"[" * 60_000, b"[1]", b"7", b"{}", b'{"shape": 1, "blocksize": 64}', b'{"shape": [32, 64], "blocksize": 0}',
    b'{"shape": [32, 64], "blocksize": 1e999}', b'{"shape": [32, 64], "blocksize": 1000000000000}',
    b'{"shape": [4294967296, 4294967296], "blocksize": 64}', b'{"shape": [1e9, true], "blocksize": 64}',
    b'{"shape": [99999999999999999999, 2], "blocksize": 64}', b'{"shape": [32, -64], "blocksize": 64}',
    *(b'{"shape": [32, 64], "blocksize": 64, "nested_blocksize": %s, "nested_offset": 0.125}' % size
      for size in (b"0", b"-1", b"99999999999", b"null", b"[]")),
    b'{"shape": [32, 64], "blocksize": 64, "nested_blocksize": 4, "nested_offset": []}',
)  # fmt: skip


def _changes(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """Other ranks, sizes, formats and values of a tensor, with what was done; None where it is gone."""
    yield "gone", None
    yield "scalar", tensor.flatten()[0]
    yield "flat", tensor.flatten()
    yield "one more dimension", tensor[None]
    for dim in range(tensor.dim()):
        for size in (0, 1, 5, tensor.shape[dim] - 1):
            yield f"{size} of dimension {dim}", tensor.narrow(dim, 0, min(size, tensor.shape[dim]))
        yield f"dimension {dim} twice", torch.cat((tensor, tensor), dim)
    numbers = tensor.float()
    for kind in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64,
                 torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):  # fmt: skip
        yield f"as {kind}", numbers.to(kind)
    for kind in (torch.float32, tensor.dtype) if tensor.is_floating_point() else (torch.float32,):
        for value in (float("nan"), float("inf"), -1.0):
            yield f"{value} as {kind}", torch.full(tensor.shape, value).to(kind)
    for kind in (torch.int64, torch.int32, torch.int8):
        for number in (torch.iinfo(kind).min, -5, 0, torch.iinfo(kind).max):
            yield f"{number} as {kind}", torch.full(tensor.shape, number, dtype=kind)


def _stored(folder: Path, pack: Packing) -> dict[str, Tensor]:
    """One matrix in a folder."""
    tensors = {f"m{ending}": part for ending, part in pack(ROWS, COLUMNS, 1).parts.items()}
    write(folder / FILE, tensors)
    return tensors


def _numbers(folder: Path, said: object) -> None:
    """Read all of a folder as the loader does, and as matrices that stay in few bits."""
    scheme = find_scheme(SimpleNamespace(quantization_config=said), reads_mxfp4=True)
    with Checkpoint(folder, scheme) as checkpoint:
        for name in checkpoint.names:
            shape = checkpoint.shape(name)
            if shape not in (Size((ROWS, COLUMNS)), Size((2, ROWS, COLUMNS))):
                continue  # the loader refuses it by the config
            assert checkpoint.read(name).shape == shape
            if checkpoint.kind(name) is not None:
                assert checkpoint.quantised(name).dense().shape == shape


def _refused(folder: Path, said: object, what: str, wrong: list[str]) -> bool:
    """Whether that ends in an error of ours; another error is listed as wrong."""
    try:
        _numbers(folder, said)
    except ModelLoadError:
        return True
    except Exception as error:
        wrong.append(f"{what}: {error!r}")
    return False


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_tensors_end_in_numbers_or_in_errors_of_ours(kind: str, tmp_path: Path) -> None:
    said, pack = FORMATS[kind]
    tensors = _stored(tmp_path, pack)
    _numbers(tmp_path, said)
    wrong: list[str] = []
    refused = 0
    for name, tensor in tensors.items():
        changes = list(_changes(tensor))
        if "quant_state" in name:
            changes += [(str(text[:99]), torch.tensor(list(text), dtype=torch.uint8)) for text in STATES]
        for what, changed in changes:
            rest = {other: part for other, part in tensors.items() if other != name}
            write(tmp_path / FILE, rest if changed is None else rest | {name: changed})
            refused += _refused(tmp_path, said, f"{name}, {what}", wrong)
    assert not wrong
    assert refused > 20


VALUES = (None, True, 0, -1, 1 << 62, 1e999, "x", "4", [], [0, 0], [1 << 62, 1 << 62], [[1], 2], {}, {"x": 1})


def _configs(said: object) -> Iterator[object]:
    """Configs with another value in one place."""
    yield from VALUES
    if isinstance(said, dict):
        for key, value in said.items():
            for changed in _configs(value):
                yield said | {key: changed}


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_configs_end_in_numbers_or_in_errors_of_ours(kind: str, tmp_path: Path) -> None:
    said, pack = FORMATS[kind]
    _stored(tmp_path, pack)
    wrong: list[str] = []
    refused = sum(_refused(tmp_path, other, str(other), wrong) for other in _configs(said))
    assert not wrong
    assert refused > 5
